"""Each rotated operation gives the results of the plain one in one process: outputs, gradients, steps of AdamW, frozen
parameters, checkpointing, precisions; on rings of 1 to 4 ranks, in place and not.

operations/described.py has the cases of each operation, operation_checks.py the comparisons. Tests that only one
operation needs are in separate files.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from grids import few, pairs
from harness import Cases, on_ranks, run_ranks
from operation_checks import (
    ROUNDING,
    Operation,
    assert_result,
    check_checkpointing,
    check_controls,
    check_frozen,
    check_pass,
    check_sharded,
    check_writes,
    loss,
    plain_results,
    rotated_result,
    saved_tensors,
    scale_of,
    train,
)
from operations.bundles import ACTIVATIONS, make_experts, make_mlp
from operations.described import BFLOAT16, DESCRIBED, FLOAT32, FLOAT64, Described, Options
from reference import assert_same, chunk, differs

import rtp_ext
from rtp_ext.functional._operation import OPERATIONS

TIMEOUT = 30.0


@on_ranks()
@pytest.mark.parametrize(
    ("name", "ranks", "transport"), [(name, *ring) for name, each in DESCRIBED.items() for ring in each.rings]
)
def test_outputs_and_gradients(ranks, cases, name, transport):
    """Over c10d the shards themselves travel, where they are asked to."""
    described, in_place = DESCRIBED[name], transport == "c10d"
    for route in ("ring",) if in_place else ("ring", "direct"):
        with rtp_ext.Ring(transport=transport, route=route, in_place=in_place, timeout=TIMEOUT) as ring:
            assert ring.transport == (transport if ranks > 1 else "emulated") and ring.route == route
            every = route == "ring" and not in_place
            for options in described.variants if every else described.few:
                if "routing" in options:
                    options = {**options, "ranks": ranks}
                with cases.case(f"{route} {options}"):
                    tolerances = described.tolerances[options.get("dtype", FLOAT64)]
                    check_pass(described.make(**options), ring, tolerances=tolerances)
            dtypes, moving = (described.tolerances, (False, True)) if route == "ring" else ((FLOAT64,), (False,))
            for grid in described.grids:
                rows = pairs(described.sizes, dtypes, grid, moving, forms=described.forms)
                for size, dtype, options, moves, form in rows:
                    with cases.case(f"{route} {size} {dtype} {options} in_place={moves} {form}"):
                        operation = described.make(size, dtype=dtype, **options)
                        ring.in_place = moves
                        check_pass(operation, ring, form, described.tolerances[dtype])


def test_every_operation_has_its_cases():
    """But for virtual copies of modules: python_tests/nn/test_flyweight.py."""
    bundles = {operation.label: operation.kind.bundle for operation in OPERATIONS.values()}
    assert set(DESCRIBED) == set(bundles) - {"flyweight"}
    for name, described in DESCRIBED.items():
        made = described.make(described.sizes[0], **described.grids[0][0])
        assert made.weights_return(False) == bundles[name], name


@on_ranks(few([2], [2, 4]))
def test_tolerances_refuse_wrong_results(rank, ranks, ring):
    for described in DESCRIBED.values():
        for options, (dtype, tolerances) in product(described.controls, described.tolerances.items()):
            check_controls(described.make(**options, dtype=dtype), ring, tolerances)
        for options, without in described.matters:
            operation = described.make(**options)
            actual = check_pass(operation, ring)
            other = plain_results(replace(operation, plain=described.make(**without).plain), ranks, "2d", 10)[rank]
            seen = differs(actual.output, other.output, 1e-3) or any(
                differs(gradient, chunk(other.gradients[name], ranks, rank, operation.cuts[name]), 1e-3)
                for name, gradient in actual.gradients.items()
            )
            assert any(ring.exchange(seen)), f"control: {options} make no difference"


def _behaviours(rank, ranks, names, transport):
    """Training with evaluations and doubled forwards, frozen parameters, checkpointing, writes, DTensors, modules."""
    cases = Cases()
    with rtp_ext.Ring(transport=transport, in_place=transport == "c10d", timeout=TIMEOUT) as ring:
        for described in map(DESCRIBED.get, names):
            _behaves(cases, described, ring)
    cases.finish()


def _behaves(cases, described, ring):
    for options in described.trained:
        for dtype in described.trained_in:
            with cases.case(f"training {dtype} {options}"):
                evaluate = dtype == FLOAT64
                operation = described.make(**options, dtype=dtype)
                train(operation, ring.rank, ring.size, evaluate, dtype, ring=ring)
        check_checkpointing(cases, described.make(**options), ring)
        check_writes(cases, described.make(**options), ring)
        with cases.case(f"DTensors {options}"):
            check_sharded(described.make(**options), ring)
    for options in described.frozen:
        check_frozen(cases, described.make(**options), ring)


@pytest.mark.parametrize(("ranks", "transport"), few([(3, "shm"), (2, "c10d")], [(3, "shm"), (2, "c10d"), (4, "c10d")]))
@pytest.mark.parametrize("name", DESCRIBED)
def test_training_freezing_and_checkpointing(name, ranks, transport):
    run_ranks(_behaviours, ranks, [name], transport)


def test_a_ring_of_one():
    run_ranks(_behaviours, 1, list(DESCRIBED), "shm")


def widened(operation: Operation) -> Operation:
    """The same numbers, exact in bfloat16, in float32."""

    def inputs(form, rank, seed):
        return [x.float() if x.is_floating_point() else x for x in operation.inputs(form, rank, seed)]

    return replace(operation, parameters={n: p.float() for n, p in operation.parameters.items()}, inputs=inputs)


def check_mixed(cases: Cases, described: Described, options: Options, ring: rtp_ext.Ring) -> None:
    """Float32 parameters: autocast to bfloat16, and a compute and a reduce dtype of their own."""
    narrow = described.make(**options, dtype=BFLOAT16)
    wide = widened(narrow)
    expected = plain_results(narrow, ring.size, "2d", 10)[ring.rank]
    forward, backward = described.tolerances[BFLOAT16]
    sent = {}

    def result(operation: Operation, kind: Any, **more: Any) -> Any:
        before = ring.bytes_sent("weight"), ring.bytes_sent("gradient")
        shards = wide.shards(ring.rank, ring.size)
        actual = rotated_result(operation, ring, "2d", 10, shards, **more)
        sent[kind] = ring.bytes_sent("weight") - before[0], ring.bytes_sent("gradient") - before[1]
        return actual

    def autocast(shards: Any, inputs: Any, **more: Any) -> torch.Tensor:
        with torch.autocast("cpu", BFLOAT16):
            return wide.rotated(shards, inputs, **more)

    result(wide, "float32")
    for kind in ("autocast", FLOAT32, BFLOAT16) if described.autocasts else (FLOAT32, BFLOAT16):
        with cases.case(f"{kind} {options} in_place={ring.in_place}"):
            if kind == "autocast":
                actual = result(wide, kind, call=autocast)
            else:
                actual = result(narrow, kind, compute_dtype=BFLOAT16, reduce_dtype=kind if kind == BFLOAT16 else None)
            assert actual.output.dtype == narrow.output_dtype()
            assert all(gradient.dtype == FLOAT32 for gradient in actual.gradients.values())
            given = (wide if kind == "autocast" else narrow).inputs("2d", ring.rank, 10)
            for x, gradient in zip(given, actual.input_gradients, strict=True):
                assert gradient is None or gradient.dtype == x.dtype
            roundings = described.roundings(ring.size, options) if kind == BFLOAT16 else 0
            assert_result(actual, expected, ring, wide.cuts, forward, backward + roundings * ROUNDING)
            if described.exact_sums and kind != BFLOAT16:  # float32 sums of exact products
                for name, whole in expected.gradients.items():
                    part = chunk(whole, ring.size, ring.rank, wide.cuts[name])
                    assert_same(actual.gradients[name], part, 1e-5 * scale_of(whole, part), name)
    with cases.case(f"bytes {options} in_place={ring.in_place}"):
        weights, gradients = sent["float32"]
        travelled = {kind: (2 * w, g) for kind, (w, g) in sent.items() if kind not in ("float32", BFLOAT16)}
        assert set(travelled.values()) == {(weights, gradients)}, f"float32 travelled: {sent}"
        assert (2 * sent[BFLOAT16][0], 2 * sent[BFLOAT16][1]) == (weights, gradients), sent


@on_ranks([2, 3])
def test_autocast_and_mixed_precision(ring, cases):
    for name, described in DESCRIBED.items():
        for number, options in enumerate(described.mixed):
            ring.in_place = number % 2 == 1
            check_mixed(cases, described, options, ring)
        with cases.case(f"{name}: autocast leaves float64 alone"), torch.autocast("cpu", BFLOAT16):
            check_pass(described.make(**described.mixed[0]), ring)


@pytest.mark.parametrize("name", DESCRIBED)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_an_emulated_ring_repeats_its_shards(name, ranks):
    described = DESCRIBED[name]
    for options, rank in product(described.repeated(ranks), {0, ranks - 1}):
        operation = described.make(**options)
        shards = operation.shards(0, ranks)
        repeats = {n: [ranks if d == operation.cuts[n] else 1 for d in range(p.dim())] for n, p in shards.items()}
        repeated = {n: p.detach().clone().requires_grad_() for n, p in shards.items()}
        inputs = operation.inputs("2d", 0, 3)
        y = operation.rotated(shards, inputs, ring=rtp_ext.Ring.emulated(ranks, rank=rank))
        expected = operation.plain({n: p.repeat(*repeats[n]) for n, p in repeated.items()}, inputs)
        loss(y, 0).backward()
        loss(expected, 0).backward()
        assert_same(y, expected, 1e-12, "output")
        for n, shard in shards.items():
            assert_same(shard.grad, repeated[n].grad / ranks, 1e-12, n)
            assert ranks == 1 or differs(shard.grad, repeated[n].grad, 1e-12)


# Hidden values of a token that a forward saves: as many as the first layer has rows.
HIDDEN = {
    "mlp": lambda options: make_mlp((5, 64, 7), **options),
    "experts": lambda options: make_experts((6, 5, 64), routing="sentinel", **options),
}


@on_ranks(3)
def test_recomputed_hidden_values(rank, ranks, ring):
    """Recomputed hidden values give the same, take no hop more, and are not kept."""
    for name, activation, dtype in product(HIDDEN, ("swiglu", "gelu"), (FLOAT64, BFLOAT16)):
        operation = HIDDEN[name]({"activation": activation, "dtype": dtype})
        inputs = operation.inputs("2d", rank, 10)
        results, hops, kept = [], [], []
        for recompute in (False, True):
            shards = operation.shards(rank, ranks)
            before = ring.hops("weight") + ring.hops("gradient")
            results.append(rotated_result(operation, ring, "2d", 10, shards, recompute=recompute))
            hops.append(ring.hops("weight") + ring.hops("gradient") - before)
            saved = saved_tensors(lambda: operation.rotated(shards, inputs, ring=ring, recompute=recompute))  # noqa: B023
            local_shards = {shard.data_ptr() for shard in shards.values()}
            kept.append(sum(t.numel() for t in saved if t.is_floating_point() and t.data_ptr() not in local_shards))
        first, second = results
        tolerance = 1e-14 if dtype == FLOAT64 else 0.0
        assert_same(second.output, first.output, tolerance, "output")
        for mine, right in zip(second.input_gradients, first.input_gradients, strict=True):
            assert_same(mine, right, tolerance, "input gradient")
        for parameter, gradient in first.gradients.items():
            if gradient.any():
                assert_same(second.gradients[parameter], gradient, tolerance, parameter)
        assert hops == [3 * (ranks - 1)] * 2
        given = sum(x.numel() for x in inputs if x.is_floating_point())
        tokens = len(inputs[0]) if name == "mlp" else int(inputs[1].lt(6).sum())
        assert kept == [given + tokens * 64 * (1 + ACTIVATIONS[activation][1]), given], (name, kept)
