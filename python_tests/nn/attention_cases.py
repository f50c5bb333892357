"""The modules and calls that the tests of attention compare with nn.MultiheadAttention, and how: see reference.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from reference import TOLERANCE, assert_same, random, whole_gradients
from torch import nn

from rtp_ext.nn import RotatedMultiheadAttention

L, S = 4, 5  # lengths of target and source

# embed_dim, num_heads and options. No width is a multiple of all ring sizes, and most shards end within a head.
MODULES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "packed": (15, 3, {}),
    "packed batch_first": (14, 7, {"batch_first": True}),
    "packed no bias": (14, 7, {"bias": False}),
    "packed bias_kv zero": (15, 3, {"add_bias_kv": True, "add_zero_attn": True}),
    "packed narrow": (2, 1, {"batch_first": True, "add_bias_kv": True}),  # fewer rows than ranks
    "separate": (14, 7, {"kdim": 9, "vdim": 11, "batch_first": True}),
    "separate alike": (15, 3, {"kdim": 9, "vdim": 9}),
    "separate bias_kv": (14, 7, {"kdim": 9, "vdim": 11, "add_bias_kv": True}),
    "separate no bias": (15, 5, {"kdim": 15, "vdim": 11, "bias": False, "add_zero_attn": True}),
}


@dataclass(frozen=True)
class Form:
    """A call of a module: its inputs, masks and results."""

    inputs: str  # "self", "cross" (key is value) or "all" (three different tensors)
    attn_mask: str | None = None
    padding: str | None = None
    batched: bool = True
    need_weights: bool = True
    average: bool = True
    is_causal: bool = False


FORMS = {
    "self": Form("self"),
    "self causal hint": Form("self", "causal", need_weights=False, is_causal=True),
    "self causal hint, padding": Form("self", "causal", "bool", need_weights=False, is_causal=True),
    "self causal hint, weights": Form("self", "causal", average=False, is_causal=True),
    "cross": Form("cross", need_weights=False),
    "cross 2d": Form("cross", "bool 2d", need_weights=False),
    "all 2d": Form("all", "float 2d"),
    "all 3d": Form("all", "float 3d", "float", average=False),
    "all 3d bool": Form("all", "bool 3d", "bool", need_weights=False),
    "all padding": Form("all", padding="float", need_weights=False),
    "unbatched self": Form("self", "bool 2d", "bool", batched=False),
    "unbatched all": Form("all", "float 3d", "float", batched=False, average=False),
    "unbatched cross": Form("cross", padding="bool", batched=False, need_weights=False),
}


def make_module(name: str, dtype: torch.dtype) -> nn.MultiheadAttention:
    embed_dim, heads, options = MODULES[name]
    module = nn.MultiheadAttention(embed_dim, heads, dtype=dtype, **options)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            scale = parameter.shape[-1] ** -0.5
            parameter.copy_(random(*parameter.shape, dtype=dtype, seed=number, scale=scale))
    return module


def fits(module: nn.MultiheadAttention, form: Form) -> bool:
    if form.inputs == "self":
        return module._qkv_same_embed_dim
    return form.inputs == "all" or module.kdim == module.vdim


def make_tensors(module: nn.MultiheadAttention, form: Form, rank: int, dtype: torch.dtype, seed: int = 100) -> list:
    """The different input tensors of a rank; the ranks have different batches."""
    batch = (2 + rank,) if form.batched else ()
    wanted = {
        "self": [(L, module.embed_dim)],
        "cross": [(L, module.embed_dim), (S, module.kdim)],
        "all": [(L, module.embed_dim), (S, module.kdim), (S, module.vdim)],
    }[form.inputs]
    return [
        random(*((*batch, length) if module.batch_first else (length, *batch)), features, dtype=dtype, seed=seed + at)
        for at, (length, features) in enumerate(wanted, 10 * rank)
    ]


def make_masks(module: nn.MultiheadAttention, form: Form, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    batch, source = 2 + rank if form.batched else 1, L if form.inputs == "self" else S

    def mask(kind: str | None, *shape: int) -> torch.Tensor | None:
        if kind is None:
            return None
        if kind == "causal":
            return torch.ones(shape, dtype=torch.bool).triu(1)
        values = random(*shape, dtype=dtype, seed=200 + rank)
        if kind.startswith("float"):
            return values
        allowed = values < 0.3
        allowed[..., 0] = True  # no row without any key
        return ~allowed

    each = form.attn_mask is not None and "3d" in form.attn_mask
    return {
        "attn_mask": mask(form.attn_mask, *((batch * module.num_heads,) if each else ()), L, source),
        "key_padding_mask": mask(form.padding, *((batch,) if form.batched else ()), source),
        "need_weights": form.need_weights,
        "average_attn_weights": form.average,
        "is_causal": form.is_causal,
    }


def call(module: nn.MultiheadAttention, form: Form, tensors: list, masks: dict[str, Any]) -> tuple:
    query, key, value = (tensors[at] for at in {"self": (0, 0, 0), "cross": (0, 1, 1), "all": (0, 1, 2)}[form.inputs])
    return module(query, key, value, **masks)


def loss(results: tuple, rank: int, seed: int = 300) -> torch.Tensor:
    total = torch.zeros((), dtype=results[0].dtype)
    for at, result in enumerate(results):
        if result is not None:
            weigh = random(*result.shape, dtype=torch.bfloat16, seed=seed + 10 * rank + at)
            total = total + (result * weigh.to(result.dtype)).sum()
    return total


def run(module: nn.MultiheadAttention, form: Form, rank: int, dtype: torch.dtype, compute: torch.dtype) -> dict:
    """Runs forward and backward of one local batch: results and input gradients, by their kind."""
    tensors = [tensor.to(compute).requires_grad_() for tensor in make_tensors(module, form, rank, dtype)]
    masks = make_masks(module, form, rank, dtype)
    for key in ("attn_mask", "key_padding_mask"):
        if masks[key] is not None and masks[key].is_floating_point():
            masks[key] = masks[key].to(compute)
    results = call(module, form, tensors, masks)
    loss(results, rank).backward()
    values = {"output": results[0].detach(), "weights": None if results[1] is None else results[1].detach()}
    return values | {f"gradient of input {at}": tensor.grad for at, tensor in enumerate(tensors)}


@functools.cache
def reference(
    name: str, form: str, dtype: torch.dtype, ranks: int, compute: torch.dtype = torch.float64, skipped: int = -1
) -> tuple[list[dict], dict]:
    """Returns the plain module's results on every rank's batch, and the averaged gradients of its parameters.

    `skipped`: a rank whose gradients are left out, for controls.
    """
    module, values, gradients = make_module(name, dtype).to(compute), [], {}
    for rank in range(ranks):
        module.zero_grad()
        values.append(run(module, FORMS[form], rank, dtype, compute))
        for key, parameter in module.named_parameters():
            part = parameter.grad.double() / ranks * (rank != skipped)
            gradients[key] = gradients[key] + part if key in gradients else part
    return values, gradients


def error(actual: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Returns the error relative to the largest expected magnitude."""
    if expected is None or not expected.any():
        return 0.0
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def tolerances(name: str, form: str, dtype: torch.dtype, ranks: int, rank: int) -> dict[str, float]:
    """Returns the tolerance of each comparison. In bfloat16 a result has many roundings, of q, k, v, scores, weights
    and heads: its error may exceed twice the error of the plain module in bfloat16 by two roundings."""
    values, gradients = reference(name, form, dtype, ranks)
    if dtype != torch.bfloat16:
        return dict.fromkeys([*values[rank], *gradients], TOLERANCE[dtype])
    rough_values, rough_gradients = reference(name, form, dtype, ranks, dtype)
    plain = {key: error(value, values[rank][key]) for key, value in rough_values[rank].items()}
    plain |= {key: error(value, gradients[key]) for key, value in rough_gradients.items()}
    return {key: 2 * TOLERANCE[dtype] + 2 * value for key, value in plain.items()}


def observe(module: RotatedMultiheadAttention, form: str, dtype: torch.dtype) -> dict:
    """Everything that one pass of this rank gives, gradients of parameters in full."""
    module.zero_grad()
    values = run(module, FORMS[form], module.ring.rank, dtype, dtype)
    return values | whole_gradients(module)


def check(module: RotatedMultiheadAttention, name: str, form: str, dtype: torch.dtype) -> None:
    ring = module.ring
    values, gradients = reference(name, form, dtype, ring.size)
    allowed = tolerances(name, form, dtype, ring.size, ring.rank)
    actual = observe(module, form, dtype)
    assert actual["output"].dtype == dtype, f"output dtype: expected {dtype}, got {actual['output'].dtype}"
    expected = values[ring.rank] | gradients
    assert list(actual) == list(expected), "names of parameters"
    for key, right in expected.items():
        assert_same(actual[key], right, allowed[key], key)
