"""Modules whose parameters are gathered while in use: frozen ones under activation checkpointing, recurrent ones."""

import copy
import functools
from itertools import product

import torch
from grids import few
from harness import on_ranks
from models import batch_loss, make_model, mean_loss, train
from reference import adamw, assert_same
from test_convert import assert_same_model
from torch import nn

import rtp_ext

EXACT = 1e-9
FROZEN = {
    "norms": ("norm.weight", "norm.bias"),
    "weights of norms": ("norm.weight",),
    "stray parameters": ("scale", "temperature"),
    "what is gathered, in the first block": ("blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.scale"),
    "the second block": ("blocks.1.",),
}


def freeze(model: nn.Module, kind: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name.startswith(FROZEN[kind]) or name.endswith(FROZEN[kind]):
            parameter.requires_grad_(False)
    return model


def _halve(weight: nn.Parameter, *_: object) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


@on_ranks(few([3], [2, 3]))
def test_frozen_parameters_and_checkpoints(rank, ranks, cases):
    for kind, reentrant, inside in product(FROZEN, (True, False), (True, False)):
        with cases.case(f"{kind}, use_reentrant={reentrant}, inside={inside}"):
            plain = freeze(make_model(), kind)
            model = freeze(make_model(checkpointed=reentrant, inside=inside), kind)
            untrained = copy.deepcopy(plain)
            model = rtp_ext.fully_rotate(model, timeout=30.0)
            train(model, lambda step, model=model: batch_loss(model, rank, step), 2)
            train(plain, lambda step, plain=plain: mean_loss(plain, ranks, step), 2)
            assert_same_model(model, plain, EXACT)
            moved = [not torch.equal(p, untrained.get_parameter(name)) for name, p in plain.named_parameters()]
            assert moved == [p.requires_grad for p in model.parameters()] and False in moved, "control"
        rtp_ext.ring_of(model).close()
    with cases.case("a module that no rank uses gets no gradient"):
        model = make_model()
        model.spare = nn.LayerNorm(4, dtype=torch.float64)
        model = rtp_ext.fully_rotate(model, timeout=30.0)
        batch_loss(model, rank, 0).backward()
        assert model.norm.weight.grad is not None
        assert [p.grad for p in model.spare.parameters()] == [None, None]
    with cases.case("a write within the forward, after parameters were gathered"):
        plain, model = make_model(), rtp_ext.fully_rotate(make_model(), timeout=30.0)
        for each in (plain, model):
            each.blocks[0].register_forward_pre_hook(functools.partial(_halve, each.norm.weight))
        train(model, lambda step: batch_loss(model, rank, step), 2)
        train(plain, lambda step: mean_loss(plain, ranks, step), 2)
        assert_same_model(model, plain, EXACT)


RECURRENT = {
    "LSTM": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "LSTM with projections": (nn.LSTM, {"proj_size": 3, "batch_first": True}),
    "GRU": (nn.GRU, {"num_layers": 2}),
    "GRU without biases": (nn.GRU, {"bias": False, "bidirectional": True}),
    "RNN": (nn.RNN, {"nonlinearity": "relu"}),
}
TOKENS = 11


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        cls, options = RECURRENT[kind]
        torch.manual_seed(3)
        self.embed = nn.Embedding(TOKENS, 4)
        self.layers = cls(4, 5, **options)
        width = (options.get("proj_size") or 5) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, TOKENS)
        self.flattens = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.flattens:
            self.layers.flatten_parameters()
        return self.head(self.layers(self.embed(ids))[0])


def recurrent_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    ids = torch.randint(TOKENS, (3, 4), generator=torch.Generator().manual_seed(100 * rank + step))
    return nn.functional.cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten())


@on_ranks(few([3], [2, 3]))
def test_recurrent_layers(rank, ranks, cases):
    def check(model, plain, first):
        """Trains both."""
        for each, loss in (
            (model, lambda step: recurrent_loss(model, rank, step)),
            (plain, lambda step: sum(recurrent_loss(plain, other, step) for other in range(ranks)) / ranks),
        ):
            optimizer = adamw(each.parameters(), lr=0.01)
            for step in range(first, first + 2):
                optimizer.zero_grad()
                loss(step).backward()
                optimizer.step()
        assert_same_model(model, plain, EXACT)
        kept = model.layers._flat_weights
        assert len(kept) == len(plain.layers._flat_weights)
        own = [model.layers.get_parameter(name) for name in model.layers._flat_weights_names]
        assert all(weight is p for weight, p in zip(kept, own, strict=True)), "gathered weights outlive the forward"

    for kind in RECURRENT:
        with cases.case(kind):
            plain = Recurrent(kind).double()
            model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=30.0)
            check(model, plain, 0)
            twin, plain_twin = copy.deepcopy(model), copy.deepcopy(plain)
            check(twin, plain_twin, 10)
            assert_same_model(model, plain, EXACT)
            model.layers.flatten_parameters()
            model.flattens = plain.flattens = True
            check(model, plain, 20)
            with torch.no_grad():
                ids = torch.arange(8).view(2, 4)
                assert_same(model(ids), plain(ids), EXACT, "without gradients")
            copy.deepcopy(model)
            for each in (model.float(), plain.float()):
                each.double()
            check(model, plain, 30)
        rtp_ext.ring_of(model).close()
