"""R virtual copies of a module give what the whole module gives in one process."""

import copy
import functools
from itertools import product

import pytest
import torch
from flyweight_modules import (
    FEATURES,
    KINDS,
    MLP_CUT,
    as_leaves,
    check_gradients,
    leaves_of,
    make_call,
    make_module,
    reference,
    reference_pass,
    tolerance_of,
)
from grids import RINGS
from harness import on_ranks
from operation_checks import loss
from reference import STEPS, adamw, assert_same, chunk, differs, double_copy, full, random, trained_tolerance

import rtp_ext
from rtp_ext.nn import Flyweight

TIMEOUT = 30.0
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def check_pass(module: Flyweight, kind: str, dtype: torch.dtype) -> None:
    calls, outputs, gradients, expected = reference(kind, dtype, module.ring.size)
    rank, tolerance = module.ring.rank, tolerance_of(dtype)
    args, kwargs = call = as_leaves(calls[rank], dtype)
    module.zero_grad()
    y = module(*args, **kwargs)
    loss(y, rank).backward()
    assert y.dtype == dtype, f"output dtype: expected {dtype}, got {y.dtype}"
    assert_same(y, outputs[rank], tolerance, "output")
    for x, right in zip(leaves_of(call), gradients[rank], strict=True):
        assert_same(x.grad, right, tolerance, "input gradient")
    if kind == "attention":
        assert args[1]["unused"].grad is None
    check_gradients(module, expected, tolerance)


@on_ranks()
@pytest.mark.parametrize(("ranks", "transport"), RINGS)
def test_one_pass(cases, transport):
    for route in ("ring", "direct"):
        with rtp_ext.Ring(transport=transport, route=route, timeout=TIMEOUT) as ring:
            for kind, dtype, in_place in product(KINDS, DTYPES, (False, True)):
                if dtype != torch.float64 and (in_place or route == "direct" or transport == "c10d"):
                    continue
                if in_place and route == "direct":
                    continue  # in place every hop goes to the neighbour
                ring.in_place = in_place
                module = Flyweight(make_module(kind, dtype), ring, **KINDS[kind][1])
                for time in ("first", "second"):
                    with cases.case(f"{route} {kind} {dtype} in_place={in_place} {time} pass"):
                        check_pass(module, kind, dtype)


@on_ranks(3)
def test_tolerances_fail_on_wrong_results(rank, ranks, ring):
    """Each tolerance fails if a contribution is missing, gradients are summed, or a bias is added R times."""
    for dtype in DTYPES:
        plain = make_module("mlp", dtype)
        lacking = double_copy(plain)
        calls, outputs, gradients, expected = reference("mlp", dtype, ranks)
        reference_pass(lacking, calls, lambda y, other: loss(y, other) * (other != (rank + 1) % ranks))
        module = Flyweight(copy.deepcopy(plain), ring, **MLP_CUT)
        (x,), _ = as_leaves(calls[rank], dtype)
        y = module(x)
        loss(y, rank).backward()
        tolerance = tolerance_of(dtype)
        for (name, whole), (_, wrong) in zip(expected.named_parameters(), lacking.named_parameters(), strict=True):
            actual = full(module.module.get_parameter(name).grad)
            assert not differs(actual, whole.grad, tolerance)
            assert differs(actual, whole.grad * ranks, tolerance)
            assert differs(actual, wrong.grad, tolerance)
        assert not differs(y, outputs[rank], tolerance)
        assert differs(y, outputs[rank] + (ranks - 1) * plain.down.bias.double(), tolerance)
        without = double_copy(plain)  # copy of the next rank
        with torch.no_grad():
            chunk(without.down.weight, ranks, (rank + 1) % ranks, 1).zero_()
        (leaf,), _ = as_leaves(calls[rank], torch.float64)
        missing = without(leaf)
        loss(missing, rank).backward()
        assert differs(y, missing, tolerance)
        assert differs(x.grad, leaf.grad, tolerance) and not differs(x.grad, gradients[rank][0], tolerance)


TRAININGS = [
    ("mlp", torch.float64),
    ("attention", torch.float64),
    ("convolution", torch.float32),
    ("mlp", torch.float32),
    ("linear", torch.bfloat16),
]


@on_ranks()
@pytest.mark.parametrize(("ranks", "transport"), [(2, "c10d"), (3, "shm")])
def test_parameters_after_adamw_steps(rank, ranks, ring, cases, transport):
    """Five steps of AdamW, with an evaluation before each."""
    for (kind, dtype), in_place in product(TRAININGS, (False, True)):
        plain = make_module(kind, dtype)
        expected, lacking = double_copy(plain), double_copy(plain)
        ring.in_place = in_place
        module = Flyweight(plain, ring, **KINDS[kind][1])
        ours, theirs, less = (adamw(m.parameters()) for m in (module, expected, lacking))
        for step in range(STEPS):
            for optimizer in (ours, theirs, less):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            calls = [make_call(kind, other, dtype, 100 * step) for other in range(ranks)]
            value = functools.partial(loss, seed=100 * step)
            outputs, _ = reference_pass(expected, calls, value)
            reference_pass(lacking, calls, lambda y, other, f=value: f(y, other) * (other != (rank + 1) % ranks))
            args, kwargs = calls[rank]
            with torch.no_grad():
                evaluated = module(*args, **kwargs)
            value(module(*args, **kwargs), rank).backward()
            for optimizer in (ours, theirs, less):
                optimizer.step()
        with cases.case(f"{kind} {dtype} in_place={in_place}"):
            if dtype == torch.float64:
                assert_same(evaluated, outputs[rank], 1e-9, "last evaluation")
            for name, parameter in module.module.named_parameters():
                right = expected.get_parameter(name)
                tolerance = trained_tolerance(dtype, right.abs().max().item())
                assert_same(full(parameter), right, tolerance, name)
                if ranks > 1 and parameter.dim() > 1:
                    assert differs(full(parameter), lacking.get_parameter(name), tolerance), "the control passes"


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_emulated_ring_repeats_this_rank(ranks):
    x = random(4, FEATURES, dtype=torch.float64, seed=3)
    plain = make_module("mlp without bias", torch.float64)
    module = Flyweight(copy.deepcopy(plain), rtp_ext.Ring.emulated(1), **KINDS["mlp without bias"][1])
    module.ring = rtp_ext.Ring.emulated(ranks)  # the whole is this rank's shard
    y = module(x)
    loss(y, 0).backward()
    expected = ranks * plain(x)
    loss(expected, 0).backward()
    assert_same(y, expected, 1e-12, "output")
    assert_same(module.module.up.weight.grad, plain.up.weight.grad / ranks, 1e-12, "weight gradient")
