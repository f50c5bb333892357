"""Rotated linear layers give what nn.Linear gives in one process: see reference.py for what is compared and how."""

import copy
import functools
from itertools import product

import pytest
import torch
from grids import pairs
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
from torch import nn

import rtp_ext
from rtp_ext.functional import rotated_linear
from rtp_ext.nn import RotatedLinear

TIMEOUT = 30.0
SIZES = [(5, 7), (16, 17), (64, 1)]  # in, out features; 64 -> 1 has fewer rows than ranks
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
FORMS = ["2d", "empty on rank 0", "3d", "strided", "1d", "empty"]


def make_linear(size: tuple[int, int], bias: bool, dtype: torch.dtype) -> nn.Linear:
    module = nn.Linear(*size, bias=bias, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(random(*reversed(size), dtype=dtype, seed=1, scale=size[0] ** -0.5))
        if bias:
            module.bias.copy_(random(size[1], dtype=dtype, seed=2))
    return module


def make_input(form: str, features: int, rank: int, dtype: torch.dtype, seed: int = 10) -> torch.Tensor:
    """The local batch of a rank; the ranks have different numbers of tokens."""
    tokens, seed = 3 + rank, seed + rank
    if form == "1d":
        return random(features, dtype=dtype, seed=seed)
    if form == "3d":
        return random(2, tokens, features, dtype=dtype, seed=seed)
    if form == "strided":
        return random(features, tokens, dtype=dtype, seed=seed).t()
    if form == "empty" or (form == "empty on rank 0" and rank == 0):
        return random(0, features, dtype=dtype, seed=seed)
    return random(tokens, features, dtype=dtype, seed=seed)


def output_weights(y: torch.Tensor, rank: int, seed: int = 30) -> torch.Tensor:
    """What the loss weighs outputs with: the gradient that reaches them, exact in bfloat16."""
    return random(*y.shape, dtype=torch.bfloat16, seed=seed + rank).to(y.dtype)


def loss(y: torch.Tensor, rank: int, seed: int = 30) -> torch.Tensor:
    return (y * output_weights(y, rank, seed)).sum()


@functools.cache
def reference(form: str, size: tuple[int, int], dtype: torch.dtype, bias: bool, ranks: int):
    """Inputs, outputs and input gradients of all ranks, and the plain module with its averaged gradients."""
    module = double_copy(make_linear(size, bias, dtype))
    inputs = [make_input(form, size[0], rank, dtype) for rank in range(ranks)]
    outputs, gradients = reference_pass(module, inputs, loss)
    return inputs, outputs, gradients, module


def check_pass(module: RotatedLinear, form: str, dtype: torch.dtype, shard_dim: int) -> None:
    ring, size, bias = module.ring, (module.in_features, module.out_features), module.bias is not None
    inputs, outputs, gradients, expected = reference(form, size, dtype, bias, ring.size)
    x = inputs[ring.rank].detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    loss(y, ring.rank).backward()

    tolerance = TOLERANCE[dtype]
    assert y.dtype == dtype, f"output dtype: expected {dtype}, got {y.dtype}"
    assert_same(y, outputs[ring.rank], tolerance, "output")
    assert_same(x.grad, gradients[ring.rank], tolerance, "input gradient")
    weight, cut = module.weight, chunk(expected.weight.grad, ring.size, ring.rank, shard_dim)
    assert_same(local(weight), chunk(expected.weight, ring.size, ring.rank, shard_dim), 0.0, "weight at home")
    assert_same(local(weight.grad), cut, tolerance * scale_of(expected.weight.grad, cut), "weight gradient")
    if bias:
        cut = chunk(expected.bias.grad, ring.size, ring.rank)
        assert_same(local(module.bias.grad), cut, tolerance * scale_of(expected.bias.grad, cut), "bias gradient")


def scale_of(whole: torch.Tensor, part: torch.Tensor) -> float:
    """How much larger the largest value of the whole is than that of the part that is compared."""
    if part.numel() == 0 or not part.any():
        return 1.0
    return (whole.abs().max() / part.abs().max()).item()


def _passes(rank, ranks, transport):
    cases = Cases()
    for route in ("ring", "direct"):
        with rtp_ext.Ring(transport=transport, route=route, timeout=TIMEOUT) as ring:
            assert ring.transport == (transport if ranks > 1 else "emulated") and ring.route == route
            # the two shard dimensions are two operations
            for shard_dim, case in product((0, 1), pairs(SIZES, DTYPES, (True, False), (False, True), forms=FORMS)):
                size, dtype, bias, in_place, form = case
                plain = make_linear(size, bias, dtype)
                module = RotatedLinear.from_module(plain, ring, shard_dim=shard_dim, in_place=in_place)
                with cases.case(f"{route} shard_dim={shard_dim} {case}"):
                    check_pass(module, form, dtype, shard_dim)
    cases.finish()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_one_pass(ranks, transport):
    run_ranks(_passes, ranks, transport)


def _controls(rank, ranks):
    """Each tolerance fails where one rank's contribution is missing, or gradients are summed instead of averaged."""
    with rtp_ext.Ring(transport="shm", timeout=TIMEOUT) as ring:
        for dtype, shard_dim in product(DTYPES, (0, 1)):
            plain = make_linear((16, 17), True, dtype)
            expected, lacking = double_copy(plain), double_copy(plain)
            inputs = [make_input("2d", 16, other, dtype) for other in range(ranks)]
            outputs, gradients = reference_pass(expected, inputs, loss)
            reference_pass(lacking, inputs, lambda y, other: loss(y, other) * (other != (rank + 1) % ranks))

            module = RotatedLinear.from_module(plain, ring, shard_dim=shard_dim)
            x = inputs[rank].detach().requires_grad_()
            y = module(x)
            loss(y, rank).backward()
            for actual, whole, wrong, dim in (
                (module.weight.grad, expected.weight.grad, lacking.weight.grad, shard_dim),
                (module.bias.grad, expected.bias.grad, lacking.bias.grad, 0),
            ):
                right = chunk(whole, ranks, rank, dim)
                tolerance = TOLERANCE[dtype] * scale_of(whole, right)
                assert not differs(local(actual), right, tolerance)
                assert differs(local(actual), right * ranks, tolerance)
                assert differs(local(actual), chunk(wrong, ranks, rank, dim), tolerance)
            owner = (rank + 1) % ranks  # one shard not added to outputs and input gradients
            if shard_dim == 0:
                chunk(outputs[rank], ranks, owner, 1).zero_()
                part = chunk(output_weights(y, rank), ranks, owner, 1) @ chunk(plain.weight, ranks, owner)
                gradients[rank] -= part.double()
            else:
                part = chunk(inputs[rank], ranks, owner, 1) @ chunk(plain.weight, ranks, owner, 1).t()
                outputs[rank] -= part.double()
                chunk(gradients[rank], ranks, owner, 1).zero_()
            assert differs(y, outputs[rank], TOLERANCE[dtype])
            assert differs(x.grad, gradients[rank], TOLERANCE[dtype])


def test_tolerances_fail_on_wrong_results():
    run_ranks(_controls, 2)
    run_ranks(_controls, 4)


def training_loss(y: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Depends on the parameters through the output, except in bfloat16, where roundings would feed back."""
    value = loss(y, rank, 100 * step)
    return value if y.dtype == torch.bfloat16 else value + 0.5 * y.square().sum()


@functools.cache
def train_reference(size: tuple[int, int], ranks: int, dtype: torch.dtype, skipped: int = -1) -> nn.Linear:
    """`skipped`: a rank whose gradients are left out, for controls."""
    module = double_copy(make_linear(size, True, dtype))
    optimizer = adamw(module.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(ranks):
            y = module(make_input("2d", size[0], rank, dtype, 100 * step).double())
            value = loss(y, rank, 100 * step)
            value = value if dtype == torch.bfloat16 else value + 0.5 * y.square().sum()
            total = total + value * (rank != skipped)
        (total / ranks).backward()
        optimizer.step()
    return module


def _training(rank, ranks, transport):
    cases = Cases()
    for route in ("ring", "direct"):
        with rtp_ext.Ring(transport=transport, route=route, timeout=TIMEOUT) as ring:
            dtypes = DTYPES if route == "ring" else DTYPES[:1]
            for shard_dim, (size, dtype, in_place) in product((0, 1), pairs(SIZES, dtypes, (False, True))):
                plain = make_linear(size, True, dtype)
                expected = train_reference(size, ranks, dtype)
                lacking = train_reference(size, ranks, dtype, skipped=(rank + 1) % ranks)
                module = RotatedLinear.from_module(plain, ring, shard_dim=shard_dim, in_place=in_place)
                optimizer = adamw(module.parameters())
                for step in range(STEPS):
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                    y = module(make_input("2d", size[0], rank, dtype, 100 * step))
                    training_loss(y, rank, step).backward()
                    optimizer.step()
                weight, bias = full(module.weight), full(module.bias)
                with cases.case(f"{route} {size} {dtype} shard_dim={shard_dim} in_place={in_place}"):
                    for actual, name in ((weight, "weight"), (bias, "bias")):
                        right = getattr(expected, name)
                        tolerance = trained_tolerance(dtype, right.abs().max().item())
                        assert_same(actual, right, tolerance, name)
                    if ranks > 1:
                        tolerance = trained_tolerance(dtype, lacking.weight.abs().max().item())
                        assert differs(weight, lacking.weight, tolerance), "the control passes"
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport"), [(1, "shm"), (2, "c10d"), (3, "shm"), (4, "c10d")])
def test_parameters_after_adamw_steps(ranks, transport):
    run_ranks(_training, ranks, transport)


def _needs(rank, ranks):
    """Only what is needed travels, and only what is wanted gets a gradient."""
    with rtp_ext.Ring(transport="shm", timeout=TIMEOUT) as ring:
        for shard_dim, needs in product((0, 1), product((True, False), repeat=3)):
            if not any(needs):
                continue
            needs_x, needs_weight, needs_bias = needs
            plain = make_linear((16, 17), True, torch.float64)
            expected = double_copy(plain)
            inputs = [make_input("2d", 16, other, torch.float64) for other in range(ranks)]
            _, gradients = reference_pass(expected, inputs, loss)
            module = RotatedLinear.from_module(plain, ring, shard_dim=shard_dim)
            module.weight.requires_grad_(needs_weight)
            module.bias.requires_grad_(needs_bias)
            x = inputs[rank].detach().requires_grad_(needs_x)
            y = module(x)
            before = ring.hops("weight"), ring.hops("gradient")
            loss(y, rank).backward()
            sent = ring.hops("weight") - before[0], ring.hops("gradient") - before[1]
            assert sent == ((ranks - 1) * needs_x, (ranks - 1) * (needs_weight or needs_bias)), (needs, sent)
            assert_same(x.grad, gradients[rank] if needs_x else None, 1e-10, "input gradient")
            for name, wanted, dim in (("weight", needs_weight, shard_dim), ("bias", needs_bias, 0)):
                gradient = getattr(module, name).grad
                right = chunk(getattr(expected, name).grad, ranks, rank, dim) if wanted else None
                assert_same(local(gradient) if wanted else gradient, right, 1e-10, name)
        # Nothing wanted: no graph, and no saved input.
        module = RotatedLinear.from_module(make_linear((16, 17), True, torch.float64), ring).requires_grad_(False)
        assert not module(inputs[rank]).requires_grad


@pytest.mark.parametrize("ranks", [1, 3])
def test_only_wanted_gradients_are_computed(ranks):
    run_ranks(_needs, ranks)


def _functional(rank, ranks):
    cases = Cases()
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for size, shard_dim, in_place, kind in product(((5, 7), (12, 24)), (0, 1), (False, True), ("plain", "DTensor")):
            if in_place and kind == "plain" and size == (5, 7):
                continue  # a plain uneven shard has no room for a larger one: see the test of errors
            plain = make_linear(size, True, torch.float64)
            expected = double_copy(plain)
            inputs = [make_input("3d", size[0], other, torch.float64) for other in range(ranks)]
            outputs, gradients = reference_pass(expected, inputs, loss)
            if kind == "plain":
                weight = chunk(plain.weight, ranks, rank, shard_dim).detach().clone().requires_grad_()
                bias = chunk(plain.bias, ranks, rank).detach().clone().requires_grad_()
            else:
                module = RotatedLinear.from_module(plain, ring, shard_dim=shard_dim, in_place=in_place)
                weight, bias = module.weight, module.bias
            x = inputs[rank].detach().requires_grad_()
            y = rotated_linear(x, weight, bias, ring=ring, shard_dim=shard_dim, in_place=in_place)
            loss(y, rank).backward()
            with cases.case(f"{size} shard_dim={shard_dim} in_place={in_place} {kind}"):
                assert type(weight.grad) is type(weight.data), "a gradient is of its parameter's type"
                assert_same(y, outputs[rank], 1e-10, "output")
                assert_same(x.grad, gradients[rank], 1e-10, "input gradient")
                right = chunk(expected.weight.grad, ranks, rank, shard_dim)
                assert_same(local(weight.grad), right, 1e-9, "weight gradient")
                assert_same(local(bias.grad), chunk(expected.bias.grad, ranks, rank), 1e-9, "bias gradient")
    cases.finish()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_functional_takes_plain_and_dtensor_shards(ranks):
    run_ranks(_functional, ranks)


def _autocast(rank, ranks):
    """Float32 parameters under autocast: bfloat16 travels, gradients come back in float32."""
    cases = Cases()
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for shard_dim, in_place in product((0, 1), (False, True)):
            plain = make_linear((16, 17), True, torch.bfloat16).float()
            expected = double_copy(plain)
            inputs = [make_input("2d", 16, other, torch.bfloat16).float() for other in range(ranks)]
            outputs, gradients = reference_pass(expected, inputs, loss)
            module = RotatedLinear.from_module(plain, ring, shard_dim=shard_dim, in_place=in_place)
            x = inputs[rank].detach().requires_grad_()
            ring_bytes = ring.bytes_sent("weight")
            with torch.autocast("cpu", torch.bfloat16):
                y = module(x)
            ring_bytes = ring.bytes_sent("weight") - ring_bytes
            loss(y, rank).backward()
            with cases.case(f"shard_dim={shard_dim} in_place={in_place}"):
                assert y.dtype == torch.bfloat16 and x.grad.dtype == module.weight.grad.dtype == torch.float32
                assert ring_bytes < 2 * (16 * 17 + 17) + 1, "float32 travelled"
                assert_same(y, outputs[rank], 2.0**-7, "output")
                assert_same(x.grad, gradients[rank], 2.0**-7, "input gradient")
                right = chunk(expected.weight.grad, ranks, rank, shard_dim)
                assert_same(local(module.weight.grad), right, 2.0**-7, "weight gradient")
                # Float32 sums of exact products: much better than bfloat16 could be.
                assert_same(local(module.weight.grad), right, 1e-5, "weight gradient in float32")
    cases.finish()


@pytest.mark.parametrize("ranks", [2, 3])
def test_autocast(ranks):
    run_ranks(_autocast, ranks)


@pytest.mark.parametrize("shard_dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_emulated_ring_is_a_layer_of_repeated_shards(ranks, shard_dim):
    for rank in {0, ranks - 1}:
        ring = rtp_ext.Ring.emulated(ranks, rank=rank)
        shape = (4, 6)
        weight = random(*shape, dtype=torch.float64, seed=1).requires_grad_()
        # The bias is cut along the output features in both cases.
        bias = random(4, dtype=torch.float64, seed=2).requires_grad_()
        repeats = (ranks, 1) if shard_dim == 0 else (1, ranks)
        whole_bias_rows = 4 * ranks
        if shard_dim == 1:
            weight = random(4 * ranks, 6, dtype=torch.float64, seed=1).requires_grad_()
        plain_weight = weight.detach().clone().requires_grad_()
        plain_bias = bias.detach().clone().requires_grad_()
        features = 6 if shard_dim == 0 else 6 * ranks
        x = random(5, features, dtype=torch.float64, seed=3).requires_grad_()
        plain_x = x.detach().clone().requires_grad_()

        y = rotated_linear(x, weight, bias, ring=ring, shard_dim=shard_dim)
        expected = nn.functional.linear(plain_x, plain_weight.repeat(*repeats), plain_bias.repeat(ranks))
        assert y.shape == (5, whole_bias_rows)
        loss(y, 0).backward()
        loss(expected, 0).backward()
        assert_same(y, expected, 1e-12, "output")
        assert_same(x.grad, plain_x.grad, 1e-12, "input gradient")
        assert_same(weight.grad, plain_weight.grad / ranks, 1e-12, "weight gradient")
        assert_same(bias.grad, plain_bias.grad / ranks, 1e-12, "bias gradient")
        if ranks > 1:
            assert differs(weight.grad, plain_weight.grad, 1e-12)


def _construct(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        module = RotatedLinear(10, 7, ring=ring, dtype=torch.float64)
        assert isinstance(module, nn.Linear)
        assert (module.in_features, module.out_features) == (10, 7)
        assert list(module.state_dict()) == ["weight", "bias"]
        assert module.weight.shape == (7, 10) and module.bias.shape == (7,)
        assert local(module.weight).shape == chunk(torch.empty(7, 10), ranks, rank).shape
        assert RotatedLinear(10, 7, bias=False, ring=ring).bias is None
        whole = full(module.weight)
        bound = 10**-0.5
        assert whole.abs().max() <= bound and whole.unique().numel() == whole.numel(), "nn.Linear's initial values"
        meta = RotatedLinear(10, 7, ring=ring, device="meta")
        assert meta.weight.is_meta
        twin = copy.deepcopy(make_linear((10, 7), True, torch.float32))
        shards = RotatedLinear.from_module(twin, ring)
        assert_same(full(shards.weight), twin.weight, 0.0, "weight")
        assert not shards.train(False).training
        return whole.tolist()


def test_constructor_is_that_of_nn_linear():
    values = run_ranks(_construct, 3)
    assert values[0] == values[1] == values[2]
