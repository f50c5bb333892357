"""Linear layers, tables and convolutions, rotated and in plain torch: see operation_checks.py."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from operation_checks import Operation, make_features
from reference import random
from torch import Tensor, nn
from torch.nn import functional as F

import rtp_ext
from rtp_ext.functional import rotated_convolution, rotated_embedding, rotated_linear, rotated_linears
from rtp_ext.nn import RotatedConv1d, RotatedConv2d, RotatedConv3d, RotatedEmbedding, RotatedLinear


def make_linear(
    size: tuple[int, int] = (5, 7),
    *,
    dim: int = 0,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    transposed: bool = False,
    **rotation: Any,
) -> Operation:
    """`size`: in and out features. `dim`: of the weight [out, in], however it is stored."""
    features, outputs = size
    weight = random(outputs, features, dtype=dtype, seed=1, scale=features**-0.5)
    parameters = {"weight": weight.t().contiguous() if transposed else weight}
    if bias:
        parameters["bias"] = random(outputs, dtype=dtype, seed=2)

    def plain(p: dict[str, Tensor], batch: list[Tensor]) -> Tensor:
        return F.linear(batch[0], p["weight"].t() if transposed else p["weight"], p.get("bias"))

    def rotated(p: dict[str, Tensor], batch: list[Tensor], **options: Any) -> Tensor:
        layout = {"shard_dim": dim, "transposed": transposed}
        return rotated_linear(batch[0], p["weight"], p.get("bias"), **{**layout, **rotation, **options})

    def module(ring: rtp_ext.Ring, **options: Any) -> nn.Module:
        layer = nn.Linear(features, outputs, bias, dtype=dtype)
        layer.load_state_dict(parameters)
        return RotatedLinear.from_module(layer, ring, shard_dim=dim, **options)

    return Operation(
        parameters,
        {"weight": dim ^ transposed, "bias": 0},
        plain,
        rotated,
        lambda form, rank, seed: [make_features(form, rank, features, dtype, seed)],
        weights_return=lambda needs_inputs: needs_inputs,
        module=None if transposed else module,
    )


def make_linears(
    sizes: dict[str, int],
    features: int = 6,
    dtype: torch.dtype = torch.float64,
    biased: Collection[str] = (),
    used: Collection[str] | None = None,
) -> Operation:
    """Layers with one input, whose shards travel together; the outputs of those that are `used` in one tensor."""
    parameters = {}
    for seed, (name, size) in enumerate(sizes.items()):
        parameters[name] = random(size, features, dtype=dtype, seed=seed, scale=0.4)
        if name in biased:
            parameters[f"{name}_bias"] = random(size, dtype=dtype, seed=seed + 5)

    def plain(p: dict[str, Tensor], x: list[Tensor]) -> Tensor:
        return torch.cat([F.linear(x[0], p[name], p.get(f"{name}_bias")) for name in used or sizes], -1)

    def rotated(p: dict[str, Tensor], x: list[Tensor], **options: Any) -> Tensor:
        biases = [p.get(f"{name}_bias") for name in sizes]
        ys = rotated_linears([x[0]], [p[name] for name in sizes], biases, **options)
        return torch.cat([y for name, y in zip(sizes, ys, strict=True) if name in (used or sizes)], -1)

    return Operation(
        parameters,
        dict.fromkeys(parameters, 0),
        plain,
        rotated,
        lambda form, rank, seed: [make_features(form, rank, features, dtype, seed)],
        weights_return=lambda needs_inputs: needs_inputs,
    )


ID_FORMS = ["2d", "1d", "int32", "strided", "scalar", "empty", "empty on rank 0", "one row"]


def make_ids(form: str, vocabulary: int, rank: int, seed: int) -> Tensor:
    """The local ids of a rank; the ranks have different numbers of them."""
    generator = torch.Generator().manual_seed(seed + rank)
    ids = torch.randint(vocabulary, (2, 4 + rank), generator=generator)
    if form == "1d":
        return ids[0]
    if form == "int32":
        return ids.int()
    if form == "strided":
        return ids.t()
    if form == "scalar":
        return ids[0, 0]
    if form == "empty" or (form == "empty on rank 0" and rank == 0):
        return ids[:, :0]
    if form == "one row":  # all tokens meet the same row: the sum of many contributions
        return torch.full_like(ids, vocabulary - 1)
    return ids


def make_embedding(
    size: tuple[int, int] = (5, 7),
    *,
    dim: int = 0,
    padding: int | None = None,
    every: bool = False,
    dtype: torch.dtype = torch.float64,
    **rotation: Any,
) -> Operation:
    """`size`: vocabulary and features. `every`: a batch has each id twice."""
    vocabulary = size[0]
    parameters = {"weight": random(*size, dtype=dtype, seed=1)}

    def rotated(p: dict[str, Tensor], batch: list[Tensor], **options: Any) -> Tensor:
        given = {"shard_dim": dim, "padding_idx": padding, **rotation, **options}
        return rotated_embedding(batch[0], p["weight"], **given)

    def module(ring: rtp_ext.Ring, **options: Any) -> nn.Module:
        table = nn.Embedding(*size, padding_idx=padding, dtype=dtype)
        table.load_state_dict(parameters)
        return RotatedEmbedding.from_module(table, ring, shard_dim=dim, **options)

    return Operation(
        parameters,
        {"weight": dim},
        lambda p, batch: F.embedding(batch[0], p["weight"], padding),
        rotated,
        lambda form, rank, seed: [
            torch.arange(vocabulary).repeat(2) if every else make_ids(form, vocabulary, rank, seed)
        ],
        weights_return=lambda needs_inputs: False,
        module=module,
    )


CONVOLUTION_FORMS = ["batched", "unbatched", "channels last", "empty", "empty on rank 0"]
CONVOLVED = {1: (nn.Conv1d, RotatedConv1d), 2: (nn.Conv2d, RotatedConv2d), 3: (nn.Conv3d, RotatedConv3d)}
# in, out channels, kernel, the other arguments, extents of the input
CONVOLUTIONS: dict[str, tuple[int, int, Any, dict[str, Any], tuple[int, ...]]] = {
    "1d": (5, 7, 3, {}, (6,)),
    "1d, one channel": (3, 1, 2, {"padding": 1}, (4,)),
    "1d, same, uneven": (4, 5, 4, {"padding": "same", "dilation": 3}, (9,)),
    "1d, replicate, same": (2, 3, 4, {"padding": "same", "padding_mode": "replicate"}, (5,)),
    "2d": (3, 6, (3, 2), {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)}, (5, 6)),
    "2d, valid, no bias": (3, 2, 2, {"padding": "valid", "bias": False}, (4, 3)),
    "2d, 3 groups": (6, 9, 3, {"groups": 3, "stride": 2, "padding": 1}, (4, 5)),
    "2d, 2 wide groups": (4, 12, 2, {"groups": 2}, (3, 4)),
    "2d, head, whole groups, tail": (10, 15, 2, {"groups": 5, "bias": False}, (3, 3)),
    "2d, depthwise, reflect": (5, 10, 3, {"groups": 5, "padding": 1, "padding_mode": "reflect"}, (3, 4)),
    "3d, circular": (2, 5, (1, 2, 3), {"padding": (0, 1, 1), "padding_mode": "circular"}, (2, 3, 4)),
    "3d, 2 groups": (2, 6, 2, {"groups": 2, "padding": 1}, (2, 3, 2)),
}


def make_convolution(
    shape: str = "2d, 3 groups", *, times: int = 1, dtype: torch.dtype = torch.float64, **rotation: Any
) -> Operation:
    """`shape`: one of CONVOLUTIONS, with as many times its outputs."""
    inputs, outputs, kernel, options, extents = CONVOLUTIONS[shape]
    outputs *= times
    layer = CONVOLVED[len(extents)][0](inputs, outputs, kernel, **options, dtype=dtype)
    scale = layer.weight[0].numel() ** -0.5
    parameters = {"weight": random(*layer.weight.shape, dtype=dtype, seed=1, scale=scale)}
    if layer.bias is not None:
        parameters["bias"] = random(outputs, dtype=dtype, seed=2)
    layer.load_state_dict(parameters)

    def rotated(p: dict[str, Tensor], batch: list[Tensor], **more: Any) -> Tensor:
        given = {key: value for key, value in options.items() if key != "bias"}
        return rotated_convolution(batch[0], p["weight"], p.get("bias"), **{**given, **rotation, **more})

    def batches(form: str, rank: int, seed: int) -> list[Tensor]:
        """The ranks have batches of different sizes."""
        x = random(1 + rank % 2, inputs, *extents, dtype=dtype, seed=seed + rank)
        if form == "unbatched":
            return [x[0]]
        if form == "channels last":
            return [x.movedim(1, -1).contiguous().movedim(-1, 1)]
        return [x[:0] if form == "empty" or (form == "empty on rank 0" and rank == 0) else x]

    return Operation(
        parameters,
        dict.fromkeys(parameters, 0),
        lambda p, batch: torch.func.functional_call(layer, p, batch[0]),
        rotated,
        batches,
        weights_return=lambda needs_inputs: needs_inputs,
        module=lambda ring, **more: CONVOLVED[len(extents)][1].from_module(layer, ring, **more),
    )
