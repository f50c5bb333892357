"""Rotated convolutions give what nn.Conv1d, 2d and 3d give in one process: see reference.py for what is compared."""

import copy
import functools
from itertools import product

import pytest
import torch
from grids import RINGS
from harness import Cases, run_ranks
from reference import (
    STEPS,
    TOLERANCE,
    adamw,
    assert_same,
    chunk,
    differs,
    double_copy,
    full,
    local,
    random,
    reference_pass,
    trained_tolerance,
)
from test_linear import loss, output_weights, scale_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.functional import rotated_convolution
from rtp_ext.nn import RotatedConv1d, RotatedConv2d, RotatedConv3d

TIMEOUT = 30.0
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ROTATED = {nn.Conv1d: RotatedConv1d, nn.Conv2d: RotatedConv2d, nn.Conv3d: RotatedConv3d}

# in, out channels, kernel, the other arguments, extents of the input
SHAPES = {
    "1d": (nn.Conv1d, 5, 7, 3, {}, (6,)),
    "1d, one channel": (nn.Conv1d, 3, 1, 2, {"padding": 1}, (4,)),
    "1d, same, uneven": (nn.Conv1d, 4, 5, 4, {"padding": "same", "dilation": 3}, (9,)),
    "1d, replicate, same": (nn.Conv1d, 2, 3, 4, {"padding": "same", "padding_mode": "replicate"}, (5,)),
    "2d": (nn.Conv2d, 3, 6, (3, 2), {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)}, (5, 6)),
    "2d, valid, no bias": (nn.Conv2d, 3, 2, 2, {"padding": "valid", "bias": False}, (4, 3)),
    "2d, 3 groups": (nn.Conv2d, 6, 9, 3, {"groups": 3, "stride": 2, "padding": 1}, (4, 5)),
    "2d, 2 wide groups": (nn.Conv2d, 4, 12, 2, {"groups": 2}, (3, 4)),
    "2d, head, whole groups, tail": (nn.Conv2d, 10, 15, 2, {"groups": 5, "bias": False}, (3, 3)),
    "2d, depthwise, reflect": (nn.Conv2d, 5, 10, 3, {"groups": 5, "padding": 1, "padding_mode": "reflect"}, (3, 4)),
    "3d, circular": (nn.Conv3d, 2, 5, (1, 2, 3), {"padding": (0, 1, 1), "padding_mode": "circular"}, (2, 3, 4)),
    "3d, 2 groups": (nn.Conv3d, 2, 6, 2, {"groups": 2, "padding": 1}, (2, 3, 2)),
}
FORMS = ["batched", "unbatched", "channels last", "empty", "empty on rank 0"]


def make_convolution(shape: str, dtype: torch.dtype) -> nn.Module:
    kind, inputs, outputs, kernel, options, _ = SHAPES[shape]
    module = kind(inputs, outputs, kernel, **options, dtype=dtype)
    with torch.no_grad():
        scale = module.weight[0].numel() ** -0.5
        module.weight.copy_(random(*module.weight.shape, dtype=dtype, seed=1, scale=scale))
        if module.bias is not None:
            module.bias.copy_(random(outputs, dtype=dtype, seed=2))
    return module


def make_input(shape: str, form: str, rank: int, dtype: torch.dtype, seed: int = 10) -> torch.Tensor:
    """The local batch of a rank; the ranks have batches of different sizes."""
    inputs, extents = SHAPES[shape][1], SHAPES[shape][5]
    x = random(1 + rank % 2, inputs, *extents, dtype=dtype, seed=seed + rank)
    if form == "unbatched":
        return x[0]
    if form == "channels last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if form == "empty" or (form == "empty on rank 0" and rank == 0):
        return x[:0]
    return x


@functools.cache
def reference(shape: str, form: str, dtype: torch.dtype, ranks: int):
    """Inputs, outputs and input gradients of all ranks, and the plain module with its averaged gradients."""
    module = double_copy(make_convolution(shape, dtype))
    inputs = [make_input(shape, form, rank, dtype) for rank in range(ranks)]
    outputs, gradients = reference_pass(module, inputs, loss)
    return inputs, outputs, gradients, module


def check_gradients(module, expected, tolerance: float) -> None:
    ring = module.ring
    for name, parameter in module.named_parameters():
        whole = getattr(expected, name)
        cut = chunk(whole.grad, ring.size, ring.rank)
        assert_same(local(parameter.grad), cut, tolerance * scale_of(whole.grad, cut), f"{name} gradient")
        assert_same(local(parameter), chunk(whole, ring.size, ring.rank), 0.0, f"{name} at home")


def check_pass(module, shape: str, form: str, dtype: torch.dtype) -> None:
    rank = module.ring.rank
    inputs, outputs, gradients, expected = reference(shape, form, dtype, module.ring.size)
    x = inputs[rank].detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    loss(y, rank).backward()
    assert y.dtype == dtype, f"output dtype: expected {dtype}, got {y.dtype}"
    assert_same(y, outputs[rank], TOLERANCE[dtype], "output")
    assert_same(x.grad, gradients[rank], TOLERANCE[dtype], "input gradient")
    check_gradients(module, expected, TOLERANCE[dtype])


def _passes(rank, ranks, transport):
    cases = Cases()
    for route in ("ring", "direct"):
        with rtp_ext.Ring(transport=transport, route=route, timeout=TIMEOUT) as ring:
            everything = route == "ring" and transport == "shm"
            for shape, dtype, in_place in product(SHAPES, DTYPES, (False, True)):
                if dtype != torch.float64 and (in_place or not everything):
                    continue
                if in_place and route == "direct":
                    continue  # in place every hop goes to the neighbour
                plain = make_convolution(shape, dtype)
                module = ROTATED[type(plain)].from_module(plain, ring, in_place=in_place)
                for form in FORMS if dtype == torch.float32 else FORMS[:1]:
                    with cases.case(f"{route} {shape} {dtype} in_place={in_place} {form}"):
                        check_pass(module, shape, form, dtype)
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport"), RINGS)
def test_one_pass(ranks, transport):
    run_ranks(_passes, ranks, transport)


def _controls(rank, ranks):
    """Each tolerance fails where a contribution is missing, or gradients are summed instead of averaged."""
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for dtype, shape in product(DTYPES, ("2d", "2d, 3 groups")):
            plain = make_convolution(shape, dtype)
            expected, lacking = double_copy(plain), double_copy(plain)
            inputs = [make_input(shape, "batched", other, dtype) for other in range(ranks)]
            outputs, gradients = reference_pass(expected, inputs, loss)
            reference_pass(lacking, inputs, lambda y, other: loss(y, other) * (other != (rank + 1) % ranks))
            module = RotatedConv2d.from_module(plain, ring)
            x = inputs[rank].detach().requires_grad_()
            y = module(x)
            loss(y, rank).backward()
            for name in ("weight", "bias"):
                actual, whole = local(getattr(module, name).grad), getattr(expected, name).grad
                right, wrong = (chunk(getattr(p, name).grad, ranks, rank) for p in (expected, lacking))
                tolerance = TOLERANCE[dtype] * scale_of(whole, right)
                assert not differs(actual, right, tolerance)
                assert differs(actual, right * ranks, tolerance)
                assert differs(actual, wrong, tolerance)
            owner = (rank + 1) % ranks  # one shard not added to outputs and input gradients
            weights = output_weights(y, rank).double()
            chunk(weights, ranks, owner, 1).zero_()
            leaf = inputs[rank].double().requires_grad_()
            (double_copy(plain)(leaf) * weights).sum().backward()
            assert differs(x.grad, leaf.grad, TOLERANCE[dtype])
            chunk(outputs[rank], ranks, owner, 1).zero_()
            assert differs(y, outputs[rank], TOLERANCE[dtype])
            assert not differs(x.grad, gradients[rank], TOLERANCE[dtype])


def test_tolerances_fail_on_wrong_results():
    run_ranks(_controls, 3)


def training_loss(y: torch.Tensor, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """Depends on the parameters through the output, except in bfloat16, where roundings would feed back."""
    value = loss(y, rank, 100 * step)
    return value if dtype == torch.bfloat16 else value + 0.5 * y.square().sum()


TRAININGS = [("1d", torch.float64), *(("2d, 3 groups", dtype) for dtype in DTYPES), ("3d, circular", torch.float32)]


def _training(rank, ranks, transport):
    """Five steps of AdamW, with an evaluation between them, in place and not."""
    cases = Cases()
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        for (shape, dtype), in_place in product(TRAININGS, (False, True)):
            plain = make_convolution(shape, dtype)
            expected, lacking = double_copy(plain), double_copy(plain)
            module = ROTATED[type(plain)].from_module(plain, ring, in_place=in_place)
            ours, theirs, less = (adamw(m.parameters()) for m in (module, expected, lacking))
            for step in range(STEPS):
                inputs = [make_input(shape, "batched", other, dtype, 100 * step) for other in range(ranks)]
                for optimizer in (ours, theirs, less):
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                value = functools.partial(training_loss, step=step, dtype=dtype)
                reference_pass(expected, inputs, value)
                reference_pass(lacking, inputs, lambda y, other, f=value: f(y, other) * (other != (rank + 1) % ranks))
                with torch.no_grad():
                    module(inputs[rank])
                value(module(inputs[rank]), rank).backward()
                for optimizer in (ours, theirs, less):
                    optimizer.step()
            with cases.case(f"{shape} {dtype} in_place={in_place}"):
                for name, parameter in module.named_parameters():
                    right = getattr(expected, name)
                    tolerance = trained_tolerance(dtype, right.abs().max().item())
                    assert_same(full(parameter), right, tolerance, name)
                    if ranks > 1 and name == "weight":
                        assert differs(full(parameter), lacking.weight, tolerance), "the control passes"
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport"), [(1, "shm"), (2, "c10d"), (3, "shm"), (4, "c10d")])
def test_parameters_after_adamw_steps(ranks, transport):
    run_ranks(_training, ranks, transport)


def _needs(rank, ranks):
    """Only what is needed travels, and only what is wanted gets a gradient."""
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for needs in product((True, False), repeat=3):
            if not any(needs):
                continue
            needs_x, needs_weight, needs_bias = needs
            plain = make_convolution("2d, 3 groups", torch.float64)
            expected = double_copy(plain)
            inputs = [make_input("2d, 3 groups", "batched", other, torch.float64) for other in range(ranks)]
            _, gradients = reference_pass(expected, inputs, loss)
            module = RotatedConv2d.from_module(plain, ring)
            module.weight.requires_grad_(needs_weight)
            module.bias.requires_grad_(needs_bias)
            x = inputs[rank].detach().requires_grad_(needs_x)
            y = module(x)
            before = ring.hops("weight"), ring.hops("gradient")
            loss(y, rank).backward()
            sent = ring.hops("weight") - before[0], ring.hops("gradient") - before[1]
            assert sent == ((ranks - 1) * needs_x, (ranks - 1) * (needs_weight or needs_bias)), (needs, sent)
            assert_same(x.grad, gradients[rank] if needs_x else None, 1e-10, "input gradient")
            for name, wanted in (("weight", needs_weight), ("bias", needs_bias)):
                gradient = getattr(module, name).grad
                right = chunk(getattr(expected, name).grad, ranks, rank) if wanted else None
                assert_same(local(gradient) if wanted else gradient, right, 1e-9, name)
        module = RotatedConv2d.from_module(plain, ring).requires_grad_(False)
        assert not module(inputs[rank]).requires_grad


def test_only_wanted_gradients_are_computed():
    run_ranks(_needs, 3)


def _precisions(rank, ranks):
    """Float32 parameters that compute and travel in bfloat16: autocast, and a policy with either reduce_dtype."""
    cases = Cases()
    shape, dtype = "2d, 3 groups", torch.bfloat16
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        plain = make_convolution(shape, dtype).float()
        expected = double_copy(plain)
        inputs = [make_input(shape, "batched", other, dtype) for other in range(ranks)]
        outputs, gradients = reference_pass(expected, inputs, loss)
        sent: dict = {}
        for kind, in_place in product(("autocast", torch.float32, torch.bfloat16), (False, True)):
            module = RotatedConv2d.from_module(plain, ring, in_place=in_place)
            autocast = kind == "autocast"
            if not autocast:
                module.mp_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=kind)
            x = inputs[rank].to(torch.float32 if autocast else dtype, copy=True).requires_grad_()
            before = ring.bytes_sent("weight"), ring.bytes_sent("gradient")
            with torch.autocast("cpu", dtype, enabled=autocast):
                y = module(x)
            loss(y, rank).backward()
            sent[kind] = ring.bytes_sent("weight") - before[0], ring.bytes_sent("gradient") - before[1]
            with cases.case(f"{kind} in_place={in_place}"):
                assert y.dtype == dtype and x.grad.dtype == x.dtype and module.weight.grad.dtype == torch.float32
                assert_same(y, outputs[rank], TOLERANCE[dtype], "output")
                assert_same(x.grad, gradients[rank], TOLERANCE[dtype], "input gradient")
                # where partial sums travel in 16 bits, each rank rounds them
                check_gradients(module, expected, TOLERANCE[dtype] * (ranks if kind == dtype else 1))
        assert sent["autocast"] == sent[torch.float32] == (sent[dtype][0], 2 * sent[dtype][1])
        assert 0 < sent[dtype][0] < sent[torch.float32][1], "weights travel in 16 bits, twice"
    cases.finish()


def test_autocast_and_mixed_precision():
    run_ranks(_precisions, 3)


def _behaviour(rank, ranks, transport):
    """Two forwards before a backward, checkpointing, other memory formats, deep copies."""
    shape, dtype = "2d, head, whole groups, tail", torch.float64
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        for in_place in (False, True):
            plain = make_convolution(shape, dtype)
            expected = double_copy(plain)
            module = RotatedConv2d.from_module(plain, ring, in_place=in_place)
            first, second = ([make_input(shape, "batched", r, dtype, seed) for r in range(ranks)] for seed in (10, 50))
            reference_pass(expected, first, loss)
            reference_pass(expected, second, loss)
            (loss(module(first[rank]), rank) + loss(module(second[rank]), rank)).backward()
            check_gradients(module, expected, 1e-10)
            for reentrant in (False, True):
                module.zero_grad()
                for x in (first[rank], second[rank]):
                    x = x.clone().requires_grad_()
                    loss(checkpoint(module, x, use_reentrant=reentrant), rank).backward()
                check_gradients(module, expected, 1e-10)
            twin = copy.deepcopy(module).to(memory_format=torch.channels_last)
            twin.zero_grad()
            loss(twin(first[rank]), rank).backward()
            y = twin(second[rank].to(memory_format=torch.channels_last))
            assert y.is_contiguous(memory_format=torch.channels_last) and not y.is_contiguous()
            loss(y, rank).backward()
            check_gradients(twin, expected, 1e-10)
            check_gradients(module, expected, 1e-10)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_behaviour(transport):
    run_ranks(_behaviour, 3, transport)


def _construct(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for shape, (kind, inputs, outputs, kernel, options, extents) in SHAPES.items():
            torch.manual_seed(3)
            plain = kind(inputs, outputs, kernel, **options)
            torch.manual_seed(3)
            module = ROTATED[kind](inputs, outputs, kernel, **options, ring=ring)
            assert isinstance(module, kind) and list(module.state_dict()) == list(plain.state_dict())
            assert_same(full(module.weight), plain.weight, 0.0, shape)
            torch.manual_seed(3)
            module.reset_parameters()
            assert_same(full(module.weight), plain.weight, 0.0, f"{shape} after reset_parameters")
            assert repr(module).startswith(f"Rotated{repr(plain)[:-1]}") and f"ring={ranks}" in repr(module)
            assert ROTATED[kind](inputs, outputs, kernel, **options, device="meta", ring=ring).weight.is_meta
            x = torch.zeros(1, inputs, *extents)
            for bad in (x[0, 0], x[:, :1], x.unsqueeze(0)):
                if bad.shape != x.shape:
                    with pytest.raises(ValueError, match=rf"{inputs}.*got"):
                        module(bad)
        with pytest.raises(ValueError, match="at least as large as the kernel"):
            RotatedConv1d(2, 3, 4, ring=ring)(torch.zeros(1, 2, 3))
        with pytest.raises(TypeError, match=r"float32.*float64"):
            RotatedConv1d(2, 3, 1, ring=ring)(torch.zeros(1, 2, 3, dtype=torch.float64))
        with pytest.raises(TypeError, match="expected a Conv1d, got a Conv2d"):
            RotatedConv1d.from_module(nn.Conv2d(1, 1, 1), ring)
        weight = torch.zeros(2, 2, 3)
        for options, text in (
            ({"groups": 4}, "groups that divide"),
            ({"padding": "all"}, "'same', 'valid'"),
            ({"padding": "same", "stride": 2}, "stride 1"),
            ({"padding": (1, 1)}, r"padding of one or 1 integers >= 0, got \(1, 1\)"),
            ({"stride": 0}, "stride"),
            ({"padding_mode": "mirror"}, "mirror"),
        ):
            channels = 2 * options.get("groups", 1)
            with pytest.raises(ValueError, match=text):
                rotated_convolution(torch.zeros(1, channels, 8), weight, ring=ring, **options)
        with pytest.raises(ValueError, match="3, 4 or 5 dimensions"):
            rotated_convolution(torch.zeros(1, 2), torch.zeros(2, 2), ring=ring)


def test_constructor_is_that_of_the_plain_module():
    run_ranks(_construct, 3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_emulated_ring_is_a_convolution_of_repeated_shards(ranks):
    weight = random(3, 4, 3, dtype=torch.float64, seed=1).requires_grad_()
    plain = weight.detach().clone().requires_grad_()
    x = random(2, 4, 6, dtype=torch.float64, seed=2)
    y = rotated_convolution(x, weight, ring=rtp_ext.Ring.emulated(ranks))
    expected = nn.functional.conv1d(x, plain.repeat(ranks, 1, 1))
    loss(y, 0).backward()
    loss(expected, 0).backward()
    assert_same(y, expected, 1e-12, "output")
    assert_same(weight.grad, plain.grad / ranks, 1e-12, "weight gradient")
    assert ranks == 1 or differs(weight.grad, plain.grad, 1e-12)
