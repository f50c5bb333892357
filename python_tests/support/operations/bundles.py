"""MLPs, experts and a vocabulary head with its loss, rotated as bundles and in plain torch: see operation_checks.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from operation_checks import Operation, make_features, token_shape
from reference import random
from torch import Tensor
from torch.nn import functional as F

from rtp_ext.functional import rotated_experts, rotated_linear_cross_entropy, rotated_mlp


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# name -> (activation, gated)
ACTIVATIONS = {
    "relu": (F.relu, False),
    "gelu": (F.gelu, False),
    "gelu_tanh": (gelu_tanh, False),
    "silu": (F.silu, False),
    "swiglu": (F.silu, True),
    "geglu": (F.gelu, True),
    "geglu_tanh": (gelu_tanh, True),
    "reglu": (F.relu, True),
}


def make_mlp(
    size: tuple[int, int, int] = (5, 7, 6),
    activation: str = "swiglu",
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    transposed: bool = False,
    **rotation: Any,
) -> Operation:
    """`size`: in, hidden and out features."""
    inputs, hidden, outputs = size
    function, gated = ACTIVATIONS[activation]
    names = ("gate", "up") if gated else ("up",)
    shapes = {name: (hidden, inputs) for name in names}
    shapes["down"] = (outputs, hidden)
    parameters, cuts = {}, {}
    for seed, (name, shape) in enumerate(shapes.items()):
        stored = random(*shape, dtype=dtype, seed=seed, scale=shape[1] ** -0.5)
        parameters[name] = stored.t().contiguous() if transposed else stored
        cuts[name] = int((name == "down") != transposed)
        if bias:
            parameters[f"{name}_bias"] = random(shape[0], dtype=dtype, seed=seed + 5)
            cuts[f"{name}_bias"] = 0

    def linear(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
        return F.linear(x, p[name].t() if transposed else p[name], p.get(f"{name}_bias"))

    def plain(p: dict[str, Tensor], batch: list[Tensor]) -> Tensor:
        values = linear(batch[0], p, "up")
        values = function(linear(batch[0], p, "gate")) * values if gated else function(values)
        return linear(values, p, "down")

    def rotated(p: dict[str, Tensor], batch: list[Tensor], **options: Any) -> Tensor:
        biases = {f"{name}_bias": p.get(f"{name}_bias") for name in ("gate", "up", "down")}
        given = {"activation": activation, "transposed": transposed, **biases, **rotation, **options}
        return rotated_mlp(batch[0], p["up"], p["down"], p.get("gate"), **given)

    return Operation(
        parameters, cuts, plain, rotated, lambda form, rank, seed: [make_features(form, rank, inputs, dtype, seed)]
    )


# How tokens choose: experts at random (also the same one twice), distinct ones, all the first or the last, none of
# the experts of this rank, only those, no expert, no expert for some tokens.
ROUTINGS = ["random", "distinct", "first", "last", "away", "home", "nobody", "sentinel"]
BOTH = ("up_bias", "down_bias")
ALPHA, LIMIT = 1.3, 0.6  # so small a limit that values reach it


def make_index(
    routing: str, shape: tuple[int, ...], experts: int, choices: int, rank: int, ranks: int, seed: int
) -> Tensor:
    generator = torch.Generator().manual_seed(seed + rank)
    size = (*shape, choices)
    anyone = torch.randint(experts, size, generator=generator)
    per_rank = -(-experts // ranks)
    if routing == "distinct":
        return torch.rand(*shape, experts, generator=generator).argsort(-1)[..., :choices]
    if routing in ("first", "last", "nobody"):
        return torch.full(size, {"first": 0, "last": experts - 1, "nobody": experts}[routing])
    if routing == "home":
        return anyone % per_rank + min(rank * per_rank, experts - per_rank)
    if routing == "away":
        return (per_rank * ((rank + 1) % ranks)) % experts + torch.zeros_like(anyone)
    if routing == "sentinel":
        anyone = torch.randint(experts + 1, size, generator=generator)
        anyone.view(-1, choices)[:1] = experts
    return anyone


def plain_hidden(values: Tensor, activation: str) -> Tensor:
    """Computes an expert's activation of up(x), with the gate's half first."""
    if activation == "clamped_swiglu":
        gate, up = values.chunk(2, -1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(ALPHA * gate)
    function, gated = ACTIVATIONS[activation]
    if not gated:
        return function(values)
    gate, up = values.chunk(2, -1)
    return function(gate) * up


def make_experts(
    size: tuple[int, int, int] = (5, 6, 4),
    activation: str = "swiglu",
    dtype: torch.dtype = torch.float64,
    *,
    choices: int = 2,
    routing: str = "random",
    weights_dtype: torch.dtype | None = None,
    ranks: int = 1,
    biases: Sequence[str] = (),
    transposed: bool = False,
    interleaved: bool = False,
    **rotation: Any,
) -> Operation:
    """`size`: experts, features and hidden features. `ranks`: for routings that depend on where experts are at home."""
    experts, features, hidden = size
    rows = 2 * hidden if activation not in ACTIVATIONS or ACTIVATIONS[activation][1] else hidden
    shapes = {
        "up": (experts, features, rows) if transposed else (experts, rows, features),
        "up_bias": (experts, rows),
        "down": (experts, hidden, features) if transposed else (experts, features, hidden),
        "down_bias": (experts, features),
    }
    scales = {"up": features**-0.5, "down": hidden**-0.5}
    parameters = {
        name: random(*shape, dtype=dtype, seed=seed, scale=scales.get(name, 0.5))
        for seed, (name, shape) in enumerate(shapes.items(), 1)
        if name in ("up", "down", *biases)
    }

    def plain(p: dict[str, Tensor], batch: list[Tensor]) -> Tensor:
        x, index, weights = batch
        y = torch.zeros_like(x)
        for expert in range(experts):
            up, down = p["up"][expert], p["down"][expert]
            values = x @ (up if transposed else up.t())
            if "up_bias" in p:
                values = values + p["up_bias"][expert]
            if interleaved:
                values = torch.cat([values[..., ::2], values[..., 1::2]], -1)
            out = plain_hidden(values, activation) @ (down if transposed else down.t())
            if "down_bias" in p:
                out = out + p["down_bias"][expert]
            y = y + (weights * (index == expert)).sum(-1, keepdim=True) * out
        return y

    def rotated(p: dict[str, Tensor], batch: list[Tensor], **options: Any) -> Tensor:
        given = {"activation": activation, "transposed": transposed, "interleaved": interleaved}
        given |= {"alpha": ALPHA, "limit": LIMIT, **{name: p[name] for name in biases}, **rotation, **options}
        return rotated_experts(*batch, p["up"], p["down"], **given)

    def inputs(form: str, rank: int, seed: int) -> list[Tensor]:
        shape = token_shape(form, rank)
        index = make_index(routing, shape, experts, choices, rank, ranks, seed)
        weights = random(*shape, choices, dtype=weights_dtype or dtype, seed=seed + rank + 50).abs()
        if form == "strided":
            index, weights = (torch.stack([t, t], -1)[..., 0] for t in (index, weights))
        return [make_features(form, rank, features, dtype, seed), index, weights]

    return Operation(parameters, dict.fromkeys(parameters, 0), plain, rotated, inputs)


# The loss of a vocabulary head.
SETTINGS: list[dict[str, Any]] = [
    {"reduction": "mean"},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "mean", "soft_cap": 2.0},
    {"reduction": "none", "z_loss": 0.1},
    {"reduction": "mean", "ignore_index": 2},
    {"reduction": "none", "label_smoothing": 0.3, "soft_cap": 3.0, "z_loss": 0.05, "ignore_index": 1},
]


def make_targets(shape: tuple[int, ...], vocabulary: int, seed: int, ignored: int = -100) -> Tensor:
    """Every third one is ignored, but the first."""
    targets = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))
    if targets.numel() > 1:
        targets.view(-1)[2::3] = ignored
        targets.view(-1)[0] = 0  # not an ignored one
    return targets


def plain_loss(
    z: Tensor,
    targets: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """`z` [..., V]"""
    if soft_cap is not None:
        z = soft_cap * torch.tanh(z / soft_cap)
    flat, kept = targets.reshape(-1), targets.ne(ignore_index)
    losses = F.cross_entropy(
        z.reshape(-1, z.shape[-1]), flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    ).view(targets.shape)
    if z_loss > 0:
        losses = losses + z_loss * torch.logsumexp(z, -1).square() * kept
    if reduction == "mean":
        return losses.sum() / kept.sum()
    return losses.sum() if reduction == "sum" else losses


def make_head(
    size: tuple[int, int] = (11, 5),
    settings: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    transposed: bool = False,
    tokens: int | None = None,
    **rotation: Any,
) -> Operation:
    """`size`: vocabulary and features. `tokens`: of every rank, instead of a few."""
    vocabulary, features = size
    settings = settings or {}
    weight = random(vocabulary, features, dtype=dtype, seed=1, scale=features**-0.5)
    parameters = {"weight": weight.t().contiguous() if transposed else weight}
    if bias:
        parameters["bias"] = random(vocabulary, dtype=dtype, seed=2)

    def plain(p: dict[str, Tensor], batch: list[Tensor]) -> Tensor:
        z = F.linear(batch[0], p["weight"].t() if transposed else p["weight"], p.get("bias"))
        return plain_loss(z, batch[1], **settings)

    def rotated(p: dict[str, Tensor], batch: list[Tensor], **options: Any) -> Tensor:
        given = {**settings, "transposed": transposed, **rotation, **options}
        return rotated_linear_cross_entropy(batch[0], p["weight"], batch[1], p.get("bias"), **given)

    def inputs(form: str, rank: int, seed: int) -> list[Tensor]:
        ignored = settings.get("ignore_index", -100)
        if tokens is not None:
            x = random(tokens + rank, features, dtype=dtype, seed=seed + rank)
            return [x, make_targets((tokens + rank,), vocabulary, seed + rank, ignored)]
        targets = make_targets(token_shape(form, rank), vocabulary, seed + rank, ignored)
        if form == "strided":
            targets = torch.stack([targets, targets], -1)[..., 0]
        return [make_features(form, rank, features, dtype, seed), targets]

    return Operation(parameters, {"weight": int(transposed), "bias": 0}, plain, rotated, inputs, float32_output=True)
