"""How many functions of the CUDA runtime and driver, and of NCCL, the host calls for a hop and for a compute.

    python benchmarks/gpu/driver_calls.py [--ranks 4]
    python benchmarks/gpu/driver_calls.py --output benchmarks/results/cpu-2core/driver_calls.jsonl

The calls are counted, not timed, and without a GPU: the transports' own sources run on a simulated CUDA runtime and
NCCL (python_tests/simulators). There is one line for each transport and mode, for forwards and backwards of a linear
layer in steady state on one rank of a ring:

    calls_per_pass           of the runtime and the driver; nccl_calls_per_pass of NCCL's interface
    calls_per_hop            waits of the channel, the copies and flags of the hop, its events, waits for its ends
    calls_per_compute        all other calls of a pass, including its beginning and its end
    nccl_calls_per_hop       of NCCL's interface; calls that NCCL makes itself are not simulated
    events_created_per_pass  and destroyed: those are taken from a pool
    captures_asked_per_pass  queries of a pass whether a graph is being captured

In the mode `replayed` passes are graphs (`Ring(graphs="on")`), which contain the hops and computes.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext.ring.graphs import PassGraphs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/
sys.path.append(str(Path(__file__).resolve().parents[2] / "python_tests" / "simulators"))

from shared.card import append_line, command_line, environment_card, result_line
from shared.table import Table, last_command, number, told

TIMEOUT = timedelta(seconds=60)
# pull weights, pull gradients
CE_MODES = {"push": (False, False), "pull": (True, True), "mixed": (True, False)}
CASES = [
    *(("ce", mode) for mode in CE_MODES),
    ("ce", "replayed"),
    ("nccl", "registered"),
    ("nccl", "unregistered"),
    ("nccl", "registered, blocking"),
]
COMMUNICATORS = {"ce": 1, "nccl": 2}
COUNTED, ROUNDS = 4, 40  # steps that are counted; how often at most, until they make no event
OUTPUTS, INPUTS, TOKENS = 24, 8, 5
TABLE = Table(
    "driver_calls",
    {
        "transport": told("transport", "`{}`"),
        "mode": told("mode"),
        "calls a hop": number("calls_per_hop", "g"),
        "calls a compute": number("calls_per_compute", "g"),
        "calls a pass": number("calls_per_pass", "g"),
        "NCCL calls a hop": number("nccl_calls_per_hop", "g"),
        "NCCL calls a pass": number("nccl_calls_per_pass", "g"),
        "events made a pass": number("events_created_per_pass", "g"),
    },
    lambda lines, _: last_command(lines),
    lambda rows: (
        f" Counted in the simulation, not timed: rank 0 of {rows[0]['ranks']}, forward and backward of a linear layer."
    ),
    empty=None,
)


def connect(sim: Any, transport: str, mode: str, ids: list[bytes], rank: int, ranks: int) -> Any:
    if transport == "ce":
        made = sim.ce(ids[0], rank, ranks, TIMEOUT, None)
        sim.set_ce_modes(made, *CE_MODES.get(mode, CE_MODES["mixed"]))
        return made
    blocking = mode.endswith("blocking")
    return sim.nccl(ids, rank, ranks, TIMEOUT, None, registered=mode.startswith("registered"), blocking=blocking)


class FixedPlaces(PassGraphs):
    """Results lie where they lay the last time, as torch's allocator has it on a GPU where shapes are fixed."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor, "counted", on=True, device=torch.device("cpu"))
        self._fixed: dict[Any, list[torch.Tensor]] = {}

    def _places_for(self, results: Any) -> list[torch.Tensor]:
        key = tuple(results)
        if key not in self._fixed:
            self._fixed[key] = super()._places_for(results)
        return self._fixed[key]


def count(sim: Any, transport: str, mode: str, ranks: int) -> dict[str, Any]:
    """The counts of rank 0 in a ring of threads. Route direct for ce, ring for the others: what `auto` takes."""
    import simulated_cuda

    ids = [sim.unique_id() for _ in range(COMMUNICATORS[transport])]
    barrier, steady = threading.Barrier(ranks), [False]
    route = "direct" if transport == "ce" else "ring"

    def work(rank: int) -> dict[str, Any]:
        tally = sim.Tally()
        executor = _native.Executor(
            sim.counted(connect(sim, transport, mode, ids, rank, ranks), tally), rank, ranks, torch.device("cpu")
        )
        executor.prefetch(False)
        options = _native.RotationOptions(
            route=route, in_place=False, compute_dtype=torch.float32, reduce_dtype=torch.float32, slot_cap=0,
            halves=False, name="linear",
        )  # fmt: skip
        bundle = _native.LinearBundle(
            [_native.LinearShape(OUTPUTS, INPUTS, by_outputs=True, transposed=False)], [False]
        )
        projections = [_native.Projection(0, 0, 0, OUTPUTS)]
        home = torch.ones(_native.shard_sizes(OUTPUTS, ranks)[rank], INPUTS)
        x, dy = torch.ones(TOKENS, INPUTS), torch.ones(TOKENS, OUTPUTS)

        graphs = FixedPlaces(executor) if mode == "replayed" else None
        if graphs is not None:  # the host's own stream cannot be captured; the products are made at once all the same
            sim.set_compute(True)

        def step() -> None:
            forward: Any = (_native.linear_forward, [[x], [home], bundle, projections, options])
            backward: Any = (
                _native.linear_backward,
                [[dy], [x], [home], bundle, projections, [True], [True], options],
            )
            for function, arguments in (forward, backward):
                if graphs is None:
                    function(executor, *arguments)
                else:
                    graphs.run("linear", function, arguments)
                    sim.synchronize()

        # The pool of events grows to what the hops between two looks of the watchdog take.
        for _ in range(ROUNDS):
            before, hops, cuda, nccl = Counter(sim.calls()), tally.hops, tally.cuda, tally.nccl
            for _ in range(COUNTED):
                step()
            calls = Counter(sim.calls())
            calls.subtract(before)
            hops, cuda, nccl = tally.hops - hops, tally.cuda - cuda, tally.nccl - nccl
            if rank == 0:
                steady.append(calls["cudaEventCreateWithFlags"] == calls["cudaStreamBeginCapture"] == 0)
            barrier.wait()
            if steady[-1]:
                break
            barrier.wait()
        executor.close()
        sim.set_compute(False)
        every = sum(number for name, number in calls.items() if name.startswith("cu"))
        computes, passes = COUNTED * 3 * ranks, COUNTED * 2
        asked = sum(number for name, number in calls.items() if name.startswith("nccl"))
        steps = graphs is None
        return {
            "transport": transport,
            "mode": mode,
            "calls_per_pass": every / passes,
            "calls_per_hop": round(cuda / hops, 2) if steps else None,
            "calls_per_compute": round((every - cuda) / computes, 2) if steps else None,
            "nccl_calls_per_pass": asked / passes,
            "nccl_calls_per_hop": round(nccl / hops, 2) if steps else None,
            "events_created_per_pass": calls["cudaEventCreateWithFlags"] / passes,
            "events_destroyed_per_pass": calls["cudaEventDestroy"] / passes,
            "captures_asked_per_pass": calls["cudaStreamGetCaptureInfo"] / passes,
            "ranks": ranks,
            "calls": {name: number / passes for name, number in sorted(calls.items()) if number},
        }

    return simulated_cuda.values(simulated_cuda.run_threads(work, ranks, timeout=120.0))[0]


def rows(ranks: int) -> list[dict[str, Any]]:
    import simulated_cuda

    with simulated_cuda.simulation() as sim:
        return [count(sim, transport, mode, ranks) for transport, mode in CASES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="append the results to this file")
    options = parser.parse_args()
    card = environment_card(torch.device("cpu"), command_line())
    for row in rows(options.ranks):
        case = f"{row['transport']}, {row['mode']}"
        append_line(options.output, result_line(card, benchmark="driver_calls", case=case, dtype="float32", **row))
        print(*(f"{key} {value}" for key, value in row.items() if key != "calls"), sep="  ")


if __name__ == "__main__":
    main()
