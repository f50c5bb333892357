"""Optimizers of other packages: torchao's on shards, and those that are refused. Skipped where they are missing."""

import copy

import pytest
import torch
from harness import Cases, run_ranks
from optimizer_cases import Mixed, assert_alike, batch_loss, convert, train
from reference import assert_same, full
from torch import nn
from torch.distributed.tensor import DTensor

# The tolerance of five steps against torch's AdamW, relative to their updates: AdamW4bit has an error of 0.42 in one
# process, too.
OFF = {"AdamW8bit": 0.2, "AdamW4bit": 0.45, "AdamWFp8": 0.2, "_AdamW": 1e-3}
OPTIONS = {"lr": 0.02, "weight_decay": 0.0}


class _Elementwise(torch.optim.Optimizer):
    """An optimizer like torchao's: elementwise, with its own state, with operations that are wrong on DTensors."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                assert type(p.grad) is torch.Tensor, type(p.grad)
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = torch.tensor(0.0), torch.zeros(p.shape, dtype=p.dtype)
                state["step"] += 1
                state["mean"] = state["mean"].lerp(p.grad, 0.1)  # another tensor in each step
                p.sub_(state["mean"].sign(), alpha=group["lr"])
        return loss


_Elementwise.__module__ = "torchao.optim.adam"


class _Subclass(_Elementwise):
    pass


def _like_torchao(rank, ranks, shape):
    plain, model = Mixed(), convert(Mixed(), shape)
    reference = _Subclass(plain.parameters())
    train(plain, [reference], range(ranks))
    optimizer = _Subclass(model.parameters())
    train(model, [optimizer], [rank])
    assert_alike(model, plain)
    for parameter, known in zip(model.parameters(), plain.parameters(), strict=True):
        state = optimizer.state[parameter]
        assert isinstance(state["mean"], DTensor) and state["step"] == 5
        assert_same(full(state["mean"]), reference.state[known]["mean"], 1e-12, "mean", scale=0.1)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_classes_of_torchao_step_on_shards(shape):
    run_ranks(_like_torchao, torch.Size(shape).numel(), shape)


class _Wide(nn.Module):
    """Shards of 4096 numbers and more, whose state is quantized, beside the small ones."""

    def __init__(self):
        super().__init__()
        self.inner = Mixed(torch.float32)
        self.wide = nn.Sequential(nn.Linear(5, 2048, bias=False), nn.Linear(2048, 5, bias=False))
        with torch.no_grad():
            for number, layer in enumerate(self.wide):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(number)) / 9)

    def forward(self, x):
        return self.inner(x) + self.wide(x)


def _torchao(rank, ranks, names):
    import torchao

    cases = Cases()
    for name in names:
        with cases.case(name):
            plain, model = _Wide(), convert(_Wide(), (ranks,))
            start = copy.deepcopy(plain)
            train(plain, [torch.optim.AdamW(plain.parameters(), **OPTIONS)], range(ranks))
            optimizer = getattr(torchao.optim, name)(model.parameters(), **OPTIONS)
            train(model, [optimizer], [rank])
            quantized = 0
            for (label, found), known, before in zip(
                model.named_parameters(), plain.parameters(), start.parameters(), strict=True
            ):
                error = (full(found.detach()) - known).norm().item() / (known - before).norm().item()
                assert error < OFF[name], f"{label}: {error} of what it has moved"
                state = optimizer.state[found]["exp_avg"]
                assert isinstance(state, DTensor) and state.placements == found.placements
                quantized += type(state._local_tensor) is not torch.Tensor
            assert quantized == (0 if name == "_AdamW" else 2), quantized
    cases.finish()


def test_torchao():
    pytest.importorskip("torchao")
    run_ranks(_torchao, 2, [*OFF], timeout=400.0)


def _others(rank, ranks, package, name, words):
    model = convert(Mixed(torch.float32), (ranks,))
    batch_loss(model, rank, 0).backward()
    cls = getattr(__import__(package, fromlist=[name]), name)
    with pytest.raises(ValueError, match=words):
        cls(model.parameters()).step()


@pytest.mark.parametrize(
    ("package", "name", "words"),
    [
        ("transformers.optimization", "Adafactor", r"Use torch\.optim\.Adafactor"),
        ("bitsandbytes.optim", "AdamW8bit", r"Use torchao\.optim\.AdamW8bit"),
        ("bitsandbytes.optim", "PagedAdamW", r"Use torchao\.optim\.AdamW8bit"),
        ("bitsandbytes.optim", "Lion", r"Use torchao\.optim\.AdamW8bit"),
    ],
)
def test_others_are_refused_by_name(package, name, words):
    pytest.importorskip(package)
    run_ranks(_others, 2, package, name, words)
