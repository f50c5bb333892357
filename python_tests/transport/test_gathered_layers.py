"""Route gather, hop by hop and by collectives, over every transport between GPUs, in layers so small that of the
gathered shards less than 64 bytes lie between the two parts of one, which are other owners': numbers are those of one
process, though nothing is computed before its stream gets there."""

from datetime import timedelta

import pytest
import simulated_cuda
import torch
from grids import few
from native_options import rotation_options
from reference import assert_same, chunk, differs, random
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from simulated_cuda.late import late
from simulated_cuda.mutants import ALL, GATHER_MUTANTS
from test_cuda_transports import TIMEOUT, TRANSPORTS, unique_ids
from test_transport_ce import MODES

from rtp_ext import RotationError, _native

skip_without_headers()

DTYPE, EXACT = torch.float64, 1e-12
OUTS, INPUTS, TOKENS, STEPS = [4, 8], 2, 3, 3
COLLECTIVE = ", by collectives"
KINDS = [*TRANSPORTS, *(f"{kind}{COLLECTIVE}" for kind in TRANSPORTS), *(f"ce, {mode}" for mode in MODES)]


def transport(sim, kind, ids, rank, ranks, mutant=None, timeout=TIMEOUT):
    if not kind.startswith("ce"):
        return sim.nccl(ids, rank, ranks, timeout, None, **TRANSPORTS[kind.removesuffix(COLLECTIVE)])
    made = sim.ce(ids[0], rank, ranks, timeout, None, -1 if mutant is None else list(ALL).index(mutant))
    sim.set_ce_modes(made, *MODES[kind.removeprefix("ce, ")])
    return made


def work(rank, sim, kind, ids, ranks, *planted):
    executor = _native.Executor(
        sim.counted(transport(sim, kind, ids, rank, ranks, *planted), sim.Tally()), rank, ranks, torch.device("cpu")
    )
    if planted and rank == 0:
        executor.set_delay(timedelta(milliseconds=20))  # at most, of its own copies
    shapes = [_native.LinearShape(out, INPUTS, by_outputs=True, transposed=False) for out in OUTS]
    bundle = _native.LinearBundle(shapes, [True] * len(OUTS))
    projections = [_native.Projection(0, layer, 0, out) for layer, out in enumerate(OUTS)]
    collective = kind.endswith(COLLECTIVE)
    told = rotation_options("gather", "small", DTYPE, collective=collective)
    before = None
    with one_of_ranks(sim, rank, executor):
        sim.set_compute(True)
        for step in range(STEPS):  # into slots that hold the numbers of the step before
            wholes = [
                part
                for layer, out in enumerate(OUTS)
                for part in (
                    random(out, INPUTS, dtype=DTYPE, seed=10 * step + layer),
                    random(out, dtype=DTYPE, seed=1000 + 10 * step + layer),
                )
            ]
            xs = [random(TOKENS, INPUTS, dtype=DTYPE, seed=100 * step + other) for other in range(ranks)]
            dys = [
                [random(TOKENS, out, dtype=DTYPE, seed=2000 + 100 * step + 10 * layer + r) for r in range(ranks)]
                for layer, out in enumerate(OUTS)
            ]
            local = [chunk(whole, ranks, rank).clone() for whole in wholes]
            x, dy = xs[rank], [each[rank] for each in dys]
            with late(sim) as operators:
                ys = _native.linear_forward(executor, [x], local, bundle, projections, told)
                dx, *gradients = _native.linear_backward(
                    executor, dy, [x], local, bundle, projections, [True], [True] * len(local), told
                )
            assert operators.enqueued > 0, "control: nothing was late"
            sim.synchronize()
            where = f"{kind}, step {step}, rank {rank} of {ranks}"
            expected = [x @ weight.t() + bias for weight, bias in zip(wholes[::2], wholes[1::2], strict=True)]
            for layer, (y, other) in enumerate(zip(ys, expected, strict=True)):
                assert_same(y, other, EXACT, f"{where}: y of layer {layer}")
            assert_same(dx, sum(d @ w for d, w in zip(dy, wholes[::2], strict=True)), EXACT, f"{where}: dx")
            for layer, of_ranks in enumerate(dys):
                weight = sum(d.t() @ other for d, other in zip(of_ranks, xs, strict=True)) / ranks
                bias = sum(d.sum(0) for d in of_ranks) / ranks
                for found, whole in ((gradients[2 * layer], weight), (gradients[2 * layer + 1], bias)):
                    assert_same(found, chunk(whole, ranks, rank), EXACT, f"{where}: gradient of layer {layer}")
            assert before is None or differs(wholes[1], before, 1e-3), "control: steps are alike"
            before = wholes[1]
        hops = executor.hops("weight"), executor.hops("gradient")
        assert hops == ((2 * STEPS, STEPS) if collective else (2 * STEPS * (ranks - 1), STEPS * (ranks - 1)))
        executor.close()


@pytest.mark.parametrize("ranks", few([2, 3], [2, 3, 4]))
def test_parts_between_others(sim, ranks):
    for number, kind in enumerate(KINDS):
        sim.controls.delay_us = 200 * (number % 2)
        ids = [sim.unique_id()] if kind.startswith("ce") else unique_ids(sim)
        values(run_threads(work, ranks, sim, kind, ids, ranks, timeout=60.0))
        assert sim.mistakes() == [], kind


@pytest.mark.parametrize("mutant", GATHER_MUTANTS)
def test_flags_that_shards_of_one_slot_share_are_caught(sim, mutant):
    """A rank sends several gradient shards from one slot to one neighbour, each as soon as it is complete. The control
    is the same slow neighbour without a mutant."""
    values(run_threads(work, 3, sim, "ce, pull", [sim.unique_id()], 3, None, TIMEOUT, timeout=60.0))
    for seed in range(5):
        sim.reset(seed)
        arguments = (sim, "ce, pull", [sim.unique_id()], 3, mutant, timedelta(seconds=1))
        results = run_threads(work, 3, *arguments, timeout=60.0)
        if any(isinstance(result, (AssertionError, RotationError)) for result in results):
            return
        assert simulated_cuda.settled(sim)
    raise AssertionError(f"not noticed: {mutant}")
