"""The transformer layers of torch.nn, converted: as in one process, in training and in evaluation."""

import copy
import functools
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from harness import Cases, on_ranks
from reference import TOLERANCE, assert_same, differs, double_copy, random, whole_gradients
from torch import nn

import rtp_ext
from rtp_ext.convert.fast_path import keep_from_fast_path
from rtp_ext.nn import RotatedLinear, RotatedMultiheadAttention

TIMEOUT = 30.0
WIDTH, HEADS, HIDDEN = 10, 2, 13  # an even number of heads, as the fast path needs it
SOURCE, TARGET = 5, 4
KINDS = ["encoder layer", "encoder", "decoder layer", "transformer"]
VARIANTS = list(product((False, True), ("relu", "gelu"), (True, False)))  # norm_first, activation, batch_first


def make_model(kind: str, variant: tuple[bool, str, bool], dtype: torch.dtype) -> nn.Module:
    norm_first, activation, batch_first = variant
    options: dict[str, Any] = {
        "dim_feedforward": HIDDEN,
        "dropout": 0.0,
        "activation": activation,
        "norm_first": norm_first,
        "batch_first": batch_first,
    }
    if kind == "encoder layer":
        model = nn.TransformerEncoderLayer(WIDTH, HEADS, **options)
    elif kind == "decoder layer":
        model = nn.TransformerDecoderLayer(WIDTH, HEADS, **options)
    elif kind == "encoder":
        nested = not norm_first and batch_first  # torch warns where it cannot
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, **options)
        model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=nested)
    else:
        model = nn.Transformer(WIDTH, HEADS, 2, 1, **options)
    model.to(dtype)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            values = random(*parameter.shape, dtype=dtype, seed=number, scale=WIDTH**-0.5)
            parameter.copy_(values + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return model


def inputs_of(kind: str) -> list[int]:
    return [SOURCE] if "encoder" in kind else [TARGET, SOURCE] if "decoder" in kind else [SOURCE, TARGET]


def make_inputs(kind: str, variant: tuple, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """In the order of the arguments; the ranks have different batches."""
    batch = 2 + rank
    return [
        random(*((batch, length) if variant[2] else (length, batch)), WIDTH, dtype=dtype, seed=100 * rank + length)
        for length in inputs_of(kind)
    ]


def padding(length: int, rank: int) -> torch.Tensor:
    """True where a sequence has ended: every one has another length, the first none."""
    lengths = length - torch.arange(2 + rank) % (length - 1)
    return torch.arange(length)[None, :] >= lengths[:, None]


def causal(length: int, dtype: torch.dtype) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)


def make_masks(kind: str, masked: str, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """`masked`: "", "padding", "causal" or "causal padding"."""
    mask = causal(SOURCE, dtype) if "causal" in masked else None
    tgt_mask = causal(TARGET, dtype) if "causal" in masked else None
    pad = padding(SOURCE, rank) if "padding" in masked else None
    if pad is not None and mask is not None:  # of one type, as torch needs them
        pad = torch.zeros(pad.shape, dtype=dtype).masked_fill(pad, -torch.inf)
    if kind == "encoder layer":
        return {"src_mask": mask, "src_key_padding_mask": pad, "is_causal": mask is not None}
    if kind == "encoder":
        return {"mask": mask, "src_key_padding_mask": pad}
    if kind == "decoder layer":
        return {"tgt_mask": tgt_mask, "memory_key_padding_mask": pad, "tgt_is_causal": tgt_mask is not None}
    return {
        "src_mask": mask,
        "tgt_mask": tgt_mask,
        "src_key_padding_mask": pad,
        "memory_key_padding_mask": pad,
    }


MASKED = ["", "padding", "causal", "causal padding"]


def convert(model: nn.Module, ring: rtp_ext.Ring, swapped: bool = True, **options: Any) -> nn.Module:
    """`swapped`: the attention and linear layers are given their classes beforehand, one by one."""
    if swapped:
        for name, part in list(model.named_modules()):
            if type(part) in (nn.Linear, nn.MultiheadAttention):
                part.__class__ = RotatedLinear if type(part) is nn.Linear else RotatedMultiheadAttention
                part._rotate(ring, name=name, **options)
            keep_from_fast_path(part)
    return rtp_ext.fully_rotate(model, mesh=ring, **options)


def loss(y: torch.Tensor, rank: int) -> torch.Tensor:
    return (y * random(*y.shape, dtype=torch.bfloat16, seed=500 + rank).to(y.dtype)).sum()


@functools.cache
def reference(kind: str, variant: tuple, dtype: torch.dtype, masked: str, ranks: int, skipped: int = -1):
    """Outputs and input gradients of all ranks, and the plain module with averaged gradients, in float64.

    `skipped`: a rank whose gradients are left out, for controls.
    """
    model, outputs, gradients = double_copy(make_model(kind, variant, dtype)), [], []
    for rank in range(ranks):
        inputs = [x.double().requires_grad_() for x in make_inputs(kind, variant, rank, dtype)]
        outputs.append(model(*inputs, **make_masks(kind, masked, rank, torch.float64)))
        (loss(outputs[-1], rank) / ranks * (rank != skipped)).backward()
        gradients.append([x.grad * ranks for x in inputs])
    return [y.detach() for y in outputs], gradients, model


def check(
    model: nn.Module, ring: rtp_ext.Ring, kind: str, variant: tuple, dtype: torch.dtype, masked: str, control: bool
) -> None:
    outputs, gradients, expected = reference(kind, variant, dtype, masked, ring.size)
    inputs = [x.requires_grad_() for x in make_inputs(kind, variant, ring.rank, dtype)]
    y = model.train()(*inputs, **make_masks(kind, masked, ring.rank, dtype))
    model.zero_grad()
    loss(y, ring.rank).backward()
    # In float32 the norms and attentions of several layers follow each other.
    tolerance = TOLERANCE[dtype] * (1 if dtype == torch.float64 else 10)
    assert_same(y, outputs[ring.rank], tolerance, "output")
    for at, x in enumerate(inputs):
        assert_same(x.grad, gradients[ring.rank][at], tolerance, f"gradient of input {at}")
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    found = whole_gradients(model)
    for name, right in expected.named_parameters():
        gradient = found[name]
        assert_same(gradient, right.grad, tolerance, f"gradient of {name}")
        if control and "in_proj_bias" not in name:  # that of the keys is zero but for roundings
            _, _, lacking = reference(kind, variant, dtype, masked, ring.size, (ring.rank + 1) % ring.size)
            assert differs(gradient, lacking.get_parameter(name).grad, tolerance), f"the control passes: {name}"


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "transport", "in_place", "every"),
    # each of the models on one number of ranks: one and four share a third
    [(1, "shm", False, 6), (2, "shm", False, 3), (3, "c10d", True, 3), (4, "shm", False, 6)],
)
def test_training(ranks, ring, cases, transport, in_place, every):
    for number, (kind, variant) in list(enumerate(product(KINDS, VARIANTS)))[ranks % every :: every]:
        dtype = torch.float32 if number % 5 == 3 else torch.float64
        masked = MASKED[(number + number // 4) % 4]
        model = make_model(kind, variant, dtype)
        names = list(model.state_dict())
        types = {name: type(part) for name, part in model.named_modules() if "Transformer" in type(part).__name__}
        convert(model, ring, swapped=number % 2 == 0)
        assert list(model.state_dict()) == names
        for name, cls in types.items():
            assert isinstance(model.get_submodule(name), cls)
        with cases.case(f"{kind} {variant} {dtype} {masked}"):
            check(model, ring, kind, variant, dtype, masked, control=ranks > 1 and number % 4 == 1)


class FastPathError(Exception):
    """The fast path was taken."""


@contextmanager
def without_fast_path(forbidden: bool):
    """Makes plain modules compute through their parts, and detects a module that takes the fast path."""
    names = ["_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_nested_tensor_from_mask"]
    originals = {name: getattr(torch, name) for name in names}

    def fail(*_: Any, **__: Any) -> None:
        raise FastPathError

    torch.backends.mha.set_fastpath_enabled(forbidden)
    for name in names if forbidden else []:
        setattr(torch, name, fail)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        for name, original in originals.items():
            setattr(torch, name, original)


def undo(model: nn.Module) -> None:
    """Enables the fast path again, for controls."""
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 1
        elif isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = True


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "transport", "in_place", "every"), [(1, "shm", False, 3), (2, "c10d", True, 3), (3, "shm", False, 3)]
)
def test_evaluation_never_takes_the_fast_path(rank, ranks, transport, in_place, every):
    cases, taken, found = Cases(), 0, 0
    dtype = torch.float64
    with rtp_ext.Ring(transport=transport, in_place=in_place, timeout=TIMEOUT) as ring:
        for number, (kind, variant) in list(enumerate(product(KINDS, VARIANTS)))[ranks % every :: every]:
            norm_first, _, batch_first = variant
            plain = make_model(kind, variant, dtype).eval()
            model = convert(copy.deepcopy(plain), ring, swapped=number % 2 == 0).eval()
            twin = copy.deepcopy(model)
            inputs = make_inputs(kind, variant, rank, dtype)
            for masked in MASKED:
                masks = make_masks(kind, masked, rank, dtype)
                label = f"{kind} {variant} {masked}"
                with without_fast_path(forbidden=False), torch.no_grad():
                    expected = plain(*inputs, **masks)
                with torch.no_grad():
                    fast = plain(*inputs, **masks)
                try:
                    with without_fast_path(forbidden=True), torch.no_grad():
                        plain(*inputs, **masks)
                except FastPathError:
                    taken += 1
                with cases.case(label), without_fast_path(forbidden=True):
                    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
                        with mode():
                            y = (twin if mode is torch.no_grad else model)(*inputs, **masks)
                        assert_same(y, expected, 1e-10, f"output in {mode.__name__}")
                    valid = torch.ones(y.shape[:2], dtype=torch.bool)
                    if "padding" in masked and kind.startswith("encoder"):  # there torch's fast path gives zeros
                        valid = ~padding(SOURCE, rank)
                        valid = valid if batch_first else valid.t()
                    assert_same(y[valid], fast[valid], 1e-10, "output of the fast path")
            if norm_first or not batch_first:  # no fast path anyway
                continue
            undo(model)
            with without_fast_path(forbidden=True), torch.no_grad():
                for masked in ("", "padding"):
                    try:
                        model(*inputs, **make_masks(kind, masked, rank, dtype))
                    except FastPathError:
                        found += 1
    cases.finish()
    assert taken > 0, "control: no plain model took the fast path"
    assert found > 0, "control: no converted model takes the fast path where it may"


def test_emulated_ring_computes_through_its_parts():
    """If a shard is a plain tensor, the fast path would use it as the whole weight."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, dtype=torch.float64)
    model = convert(nn.TransformerEncoder(layer, 2), rtp_ext.Ring.emulated(2))
    x, ended = random(2, SOURCE, 8, dtype=torch.float64, seed=0), padding(SOURCE, 0)
    for mask in ({}, {"src_key_padding_mask": ended}):
        expected = model.train()(x, **mask)
        model.eval()
        with torch.no_grad():
            assert_same(model(x, **mask), expected, 1e-10, "output")
    undo(model)
    with pytest.raises(FastPathError), torch.no_grad(), without_fast_path(forbidden=True):
        model(x, **mask)


def test_what_keep_from_fast_path_knows():
    known = {kind: keep_from_fast_path(make_model(kind, (False, "relu", True), torch.float64)) for kind in KINDS}
    assert known == {"encoder layer": True, "encoder": True, "decoder layer": False, "transformer": False}
    layer = make_model("encoder layer", (False, "gelu", True), torch.float64)
    state = list(layer.state_dict())
    keep_from_fast_path(layer)
    assert type(layer) is nn.TransformerEncoderLayer and list(layer.state_dict()) == state
    assert layer.activation is nn.functional.gelu
    with pytest.warns(UserWarning, match="activation_relu_or_gelu was not True"):
        stack = nn.TransformerEncoder(layer, 2)  # clones of a kept layer are kept
    assert not stack.use_nested_tensor and all(each.activation_relu_or_gelu == 0 for each in stack.layers)
