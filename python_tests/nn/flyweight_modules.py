"""Modules that can be cut, how, and what one process computes with them.

In bfloat16 a module itself rounds between its operations; the tolerance is twice that of a single operation.
"""

import functools

import torch
from operation_checks import loss, scale_of
from reference import TOLERANCE, assert_same, chunk, double_copy, local, random
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from rtp_ext.nn import Flyweight

FEATURES = 5


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0, bias: bool = True, checkpointed: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 7, bias)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(7, FEATURES, bias)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.checkpointed else self.hidden(x)
        return self.down(hidden)

    def hidden(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.up(x)))


class Attention(nn.Module):
    """Cross attention whose heads are a dimension of its parameters; a mask; queries scaled equally in every head."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Parameter(torch.empty(3, 2, FEATURES)))
        self.scale = nn.Parameter(torch.empty(2))
        self.register_buffer("temperature", torch.tensor(0.5))

    def forward(self, x: Tensor, context: dict[str, Tensor], *, mask: Tensor | None = None) -> Tensor:
        values = context["values"]
        q = torch.einsum("ti,hdi->htd", x, self.q) * self.scale
        k = torch.einsum("ti,hdi->htd", values, self.k)
        scores = q @ k.mT * self.temperature.to(q.dtype)
        if mask is not None:
            scores = scores.masked_fill(mask, -1e4)
        mixed = scores.softmax(-1) @ torch.einsum("ti,hdi->htd", values, self.v)
        return torch.einsum("htd,hdi->ti", mixed, self.o)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, 3, bias=False)
        self.decoder = nn.Module()
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encoder(x)) @ self.decoder.weight


MLP_CUT = {
    "shard_dims": {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": -1},
    "combine": "sum",
    "added_once": ("down.bias",),
}
HEADS = {"shard_dims": {"q": 0, "k": 0, "v": 0, "o": 0, "scale": None}, "combine": "sum"}
KINDS = {
    "mlp": (MLP, MLP_CUT),
    "mlp without bias": (
        functools.partial(MLP, bias=False),
        {"shard_dims": {"up.weight": 0, "down.weight": -1}, "combine": "sum"},
    ),
    "linear": (functools.partial(nn.Linear, FEATURES, 7), {"shard_dims": {"weight": 0, "bias": 0}, "combine": "cat"}),
    "convolution": (
        functools.partial(nn.Conv1d, FEATURES, 3, 2),
        {"shard_dims": {"weight": 0, "bias": 0}, "combine": "cat", "dim": 1},
    ),
    "attention": (Attention, HEADS),
    "tied": (Tied, {"shard_dims": {"encoder.weight": 0}, "combine": "sum"}),
}


def make_module(kind: str, dtype: torch.dtype) -> nn.Module:
    module = KINDS[kind][0]().to(dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, dtype=dtype, seed=seed, scale=0.5))
    return module


def make_call(kind: str, rank: int, dtype: torch.dtype, seed: int = 10) -> tuple[tuple, dict]:
    """The arguments of a rank; the ranks have different numbers of tokens."""
    tokens, seed = 3 + rank, seed + rank
    x = random(tokens, FEATURES, dtype=dtype, seed=seed)
    if kind == "convolution":
        return (random(2, FEATURES, tokens, dtype=dtype, seed=seed),), {}
    if kind == "attention":
        values = random(4, FEATURES, dtype=dtype, seed=seed + 500)
        mask = torch.ones(tokens, 4, dtype=torch.bool).triu(1)
        return (x, {"values": values, "unused": random(2, dtype=dtype, seed=1)}), {"mask": mask if rank else None}
    return (x,), {}


def leaves_of(call: tuple[tuple, dict]) -> list[Tensor]:
    args, _ = call
    return [args[0], args[1]["values"]] if len(args) > 1 else [args[0]]


def as_leaves(call: tuple[tuple, dict], dtype: torch.dtype) -> tuple[tuple, dict]:
    """Returns the same call with floating tensors in `dtype` that require gradients."""
    return tree_map_only(
        Tensor, lambda x: x.detach().to(dtype, copy=True).requires_grad_() if x.is_floating_point() else x, call
    )


def reference_pass(module: nn.Module, calls: list[tuple], value=loss) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Outputs and input gradients by rank; leaves the averaged gradients in the parameters."""
    calls = [as_leaves(call, torch.float64) for call in calls]
    outputs = [module(*args, **kwargs) for args, kwargs in calls]
    total = sum(value(y, rank) for rank, y in enumerate(outputs)) / len(calls)
    total.backward()
    return [y.detach() for y in outputs], [[x.grad * len(calls) for x in leaves_of(call)] for call in calls]


@functools.cache
def reference(kind: str, dtype: torch.dtype, ranks: int):
    module = double_copy(make_module(kind, dtype))
    calls = [make_call(kind, rank, dtype) for rank in range(ranks)]
    return calls, *reference_pass(module, calls), module


def tolerance_of(dtype: torch.dtype) -> float:
    return 2 * TOLERANCE[dtype] if dtype == torch.bfloat16 else TOLERANCE[dtype]


def take(whole: Tensor, dim: int | None, ranks: int, rank: int) -> Tensor:
    return whole if dim is None else chunk(whole, ranks, rank, dim)


def check_gradients(module: Flyweight, expected: nn.Module, tolerance: float) -> None:
    ring, ours = module.ring, dict(module.module.named_parameters())
    for name, whole in expected.named_parameters():
        cut = take(whole.grad, module.shard_dims[name], ring.size, ring.rank)
        assert_same(local(ours[name].grad), cut, tolerance * scale_of(whole.grad, cut), f"gradient of {name}")
        here = take(whole, module.shard_dims[name], ring.size, ring.rank)
        assert_same(local(ours[name]), here, 0.0, f"{name} at home")
