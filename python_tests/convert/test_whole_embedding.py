"""Embeddings with max_norm, scale_grad_by_freq or sparse: like the plain module on the batches of all ranks at once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grids import few
from harness import on_ranks
from reference import adamw, assert_same, differs, full, local
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import rtp_ext

EXACT = 1e-9
ROWS, WIDTH, CLASSES = 7, 5, 3
STEPS = 3


class SubclassedEmbedding(nn.Embedding):
    """Computes as its base does."""


class Tables(nn.Module):
    """The table, looked up in twice where `twice`, and a layer that rotates."""

    def __init__(self, cls: type = nn.Embedding, twice: bool = False, recomputed: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = cls(ROWS, WIDTH, **options)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.twice, self.recomputed = twice, recomputed

    def forward(self, ids: Tensor) -> Tensor:
        x = checkpoint(self.embed, ids, use_reentrant=False) if self.recomputed else self.embed(ids)
        if self.twice:
            x = x * self.embed(ids.flip(0) // 2)
        return self.head(x)


KINDS: dict[str, dict[str, Any]] = {
    "max_norm": {"max_norm": 1.5},
    "max_norm of another norm": {"max_norm": 2.0, "norm_type": 1.0, "twice": True},
    "max_norm recomputed": {"max_norm": 1.5, "recomputed": True},
    "frequency": {"scale_grad_by_freq": True, "twice": True},
    "both, padded": {"max_norm": 1.5, "scale_grad_by_freq": True, "padding_idx": 2},
    "subclass": {"cls": SubclassedEmbedding, "max_norm": 1.5},
    "frozen": {"max_norm": 1.5, "_freeze": True},
}
SPARSE: dict[str, dict[str, Any]] = {
    "sparse": {"sparse": True, "twice": True},
    "sparse, padded, max_norm": {"sparse": True, "padding_idx": 0, "max_norm": 1.5},
}


def ids_of(rank: int, step: int) -> Tensor:
    """Returns the ids of a rank: rank 0 has few. Some occur on several ranks, and several times."""
    return torch.randint(ROWS, (2 + 3 * rank,), generator=torch.Generator().manual_seed(50 * step + rank))


def local_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, ids % CLASSES)


def ring_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    ids = ids_of(rank, step)
    return local_loss(model(ids), ids)


def plain_loss(model: nn.Module, ranks: int, step: int) -> Tensor:
    """One forward of the ids of all ranks; `twice` looks up in parts, and the ranks' second lookups come together."""
    every = [ids_of(rank, step) for rank in range(ranks)]
    ids = torch.cat(every)
    x = model.embed(ids)
    if model.twice:
        x = x * model.embed(torch.cat([each.flip(0) // 2 for each in every]))
    parts = model.head(x).split([len(each) for each in every])
    return sum(local_loss(part, each) for part, each in zip(parts, every, strict=True)) / ranks


def foreach(parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=0.05, foreach=True)]


def fused(parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=0.05, fused=True)]


def lazily(parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
    """The table comes first."""
    return [torch.optim.SparseAdam(parameters[:1], lr=0.05), adamw(parameters[1:])]


def trained(
    model: nn.Module, loss: Callable[[int], Tensor], optimizers: Callable, clip: float | None = None, first: int = 0
) -> list[Tensor]:
    """Norms of the gradients before they are clipped."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    each, norms = optimizers(parameters), []
    for step in range(first, first + STEPS):
        for optimizer in each:
            optimizer.zero_grad()
        loss(step).backward()
        if clip is not None:
            norms.append(full(nn.utils.clip_grad_norm_(parameters, clip, foreach=True)))
        for optimizer in each:
            optimizer.step()
    return norms


def assert_same_tables(model: nn.Module, plain: nn.Module, ring: rtp_ext.Ring) -> None:
    for name, parameter in plain.named_parameters():
        assert_same(full(model.get_parameter(name)), parameter, EXACT, name)
    copies = ring.exchange(local(model.embed.weight.detach()).tolist())
    assert all(each == copies[0] for each in copies), "the copies of the ranks have drifted apart"


def compare(model: nn.Module, plain: nn.Module, rank: int, ranks: int, optimizers: Callable, **options: Any) -> None:
    ours = trained(model, lambda step: ring_loss(model, rank, step), optimizers, **options)
    theirs = trained(plain, lambda step: plain_loss(plain, ranks, step), optimizers, **options)
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other, EXACT, "norm")
    assert_same_tables(model, plain, rtp_ext.ring_of(model))


@on_ranks(few([3], [2, 3]))
def test_like_one_process(rank, ranks, cases):
    for kind, options in {**KINDS, **SPARSE}.items():
        sparse = kind in SPARSE
        for optimizers in (lazily,) if sparse else (foreach, fused):
            with cases.case(f"{kind}, {optimizers.__name__}"):
                plain = Tables(**options).double()
                model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=30.0)
                assert isinstance(model.embed, type(plain.embed))
                if not sparse:
                    weight = model.embed.weight
                    assert isinstance(weight, DTensor) and weight.placements == (Replicate(),)
                alone = copy.deepcopy(plain)
                compare(model, plain, rank, ranks, optimizers, clip=None if sparse else 0.1)
                assert model.embed.weight.grad is None or local(model.embed.weight.grad).is_sparse == sparse
                assert differs(plain.embed.weight, alone.embed.weight, 1e-3), "control: nothing happened to the table"
                trained(alone, lambda step, alone=alone: plain_loss(alone, 1, step), optimizers)
                assert differs(alone.embed.weight, plain.embed.weight, 1e-4), "control: rank 0 alone"
                twin, plain_twin = copy.deepcopy(model), copy.deepcopy(plain)
                compare(twin, plain_twin, rank, ranks, optimizers, first=10)
                assert_same_tables(model, plain, rtp_ext.ring_of(model))
                with torch.no_grad():  # max_norm writes in evaluations too
                    every = torch.cat([ids_of(other, 90) for other in range(ranks)])
                    model(ids_of(rank, 90)), plain.embed(every)
                    if model.twice:
                        plain.embed(torch.cat([ids_of(other, 90).flip(0) // 2 for other in range(ranks)]))
                assert_same_tables(model, plain, rtp_ext.ring_of(model))
                twin.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
                compare(twin, copy.deepcopy(plain), rank, ranks, optimizers, first=20)
            rtp_ext.ring_of(model).close()


@on_ranks(2)
def test_policies_and_states(rank, ranks, cases):
    with cases.case("mixed precision"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        plain = Tables(scale_grad_by_freq=True)
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mp_policy=policy, timeout=30.0)
        ring, reduced = rtp_ext.ring_of(model), []
        reduce, seen = ring.all_reduce, []
        ring.all_reduce = lambda values, name: reduced.append((values.dtype, tuple(values.shape))) or reduce(values)
        model.embed.register_forward_hook(lambda module, arguments, output: seen.append(output.dtype))
        ring_loss(model, rank, 0).backward()
        plain_loss(plain, ranks, 0).backward()
        assert seen == [torch.bfloat16]
        assert (torch.bfloat16, (ROWS, WIDTH)) in reduced and (torch.int64, (ROWS,)) in reduced, reduced
        gradient = model.embed.weight.grad
        assert gradient.dtype == torch.float32
        # each of the operations on the way, from the table through the head, the loss and the sum, rounds once
        assert_same(full(gradient), plain.embed.weight.grad, 8 * 2.0**-8, "gradient")
        assert differs(full(gradient), plain.embed.weight.grad, 1e-5), "control: computed in float32"
    ring.close()
    with cases.case("states"):
        with torch.device("meta"):
            model = Tables(max_norm=1.5)
        model = rtp_ext.fully_rotate(model, timeout=30.0).to_empty(device="cpu")
        plain = Tables(max_norm=1.5)
        for each in (model, plain):
            for part in (each.embed, each.head):
                torch.manual_seed(9)
                part.reset_parameters()
        assert_same_tables(model, plain, rtp_ext.ring_of(model))
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert_same(whole["embed.weight"], plain.embed.weight, 0.0, "state")
        with torch.inference_mode():
            assert_same(model(ids_of(rank, 0)), plain(ids_of(rank, 0)), 1e-6, "inference")
    with cases.case("counts of sparse gradients"):
        model = rtp_ext.fully_rotate(Tables(sparse=True, scale_grad_by_freq=True), timeout=30.0)
        with pytest.raises(RuntimeError, match=r"embed: scale_grad_by_freq .* sparse"):
            ring_loss(model, rank, 0).backward()


class OwnForward(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@on_ranks(2)
def test_what_cannot_be_kept_whole_is_refused():
    for make, name in (
        (lambda: nn.EmbeddingBag(ROWS, WIDTH, max_norm=1.0), r"0 \(EmbeddingBag\): max_norm=1\.0"),
        (lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True), r"0 \(EmbeddingBag\): sparse"),
        (lambda: OwnForward(ROWS, WIDTH, scale_grad_by_freq=True), r"0 \(OwnForward\): scale_grad_by_freq"),
    ):
        model = nn.Sequential(make(), nn.Linear(WIDTH, CLASSES))
        with pytest.raises(ValueError, match=name):
            rtp_ext.fully_rotate(model, timeout=30.0)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), "half converted"
        rtp_ext.fully_rotate(model, ignored_params=[model[0].weight], timeout=30.0)
        ids = torch.arange(ROWS).view(1, -1)
        model(ids).sum().backward()
        assert not isinstance(model[0].weight, DTensor) and model[0].weight.grad is not None


@on_ranks(2)
def test_ignored_parameters_are_the_ranks_own(rank, ranks):
    """An ignored table is the rank's own: clipped and optimized on its own, next to DTensors."""
    plain = Tables(max_norm=1.5).double()
    model, table = copy.deepcopy(plain), nn.Parameter(plain.embed.weight.detach().clone())
    model.embed.weight = table
    rtp_ext.fully_rotate(model, ignored_params=[table], timeout=30.0)
    assert model.embed.weight is table
    tables = [copy.deepcopy(plain.embed) for _ in range(ranks)]
    sharded = list(model.head.parameters())
    optimizers = [
        torch.optim.AdamW([{"params": sharded}, {"params": [table]}], lr=0.05, foreach=True),
        torch.optim.AdamW([*plain.head.parameters(), *(each.weight for each in tables)], lr=0.05),
    ]
    for step in range(STEPS):
        ring_loss(model, rank, step).backward()
        losses = [
            local_loss(plain.head(tables[other](ids_of(other, step))), ids_of(other, step)) for other in range(ranks)
        ]
        (sum(losses) / ranks).backward()
        for each in tables:
            each.weight.grad.mul_(ranks)
        for together in (sharded, [table], list(plain.head.parameters()), *([each.weight] for each in tables)):
            nn.utils.clip_grad_norm_(together, 0.1, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(table, tables[rank].weight, EXACT, "the table")
    for name, parameter in plain.head.named_parameters():
        assert_same(full(model.head.get_parameter(name)), parameter, EXACT, name)
    assert differs(table, tables[1 - rank].weight, 1e-4), "control: the tables of the ranks differ"
