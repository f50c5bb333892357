"""How many functions of the CUDA runtime and driver, and of NCCL, the host calls for a hop and for a compute.

    python benchmarks/driver_calls.py [--json] [--ranks 4]

Counted, not timed, and without a GPU: the transports' own sources run on a simulated CUDA runtime and NCCL
(python_tests/simulators). One line for each transport and mode, of forwards and backwards of a linear layer in steady
state on one rank of a ring:

    calls_per_hop            waits of the channel, the copies and flags of the hop, its marks, waits for its ends
    calls_per_compute        everything else that a pass calls, its beginning and its end among it
    nccl_calls_per_hop       of NCCL's interface; what NCCL calls in turn is not simulated
    events_created_per_pass  and destroyed: those are taken from a pool
    captures_asked_per_pass  how often a pass asks whether a graph is being captured
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "python_tests" / "simulators"))

from rtp_ext import _native

TIMEOUT = timedelta(seconds=60)
# pull weights, pull gradients
CE_MODES = {"push": (False, False), "pull": (True, True), "mixed": (True, False)}
CASES = [
    *(("ce", mode) for mode in CE_MODES),
    ("nccl", "registered"),
    ("nccl", "unregistered"),
    ("nccl-put", "push"),
]
COMMUNICATORS = {"ce": 1, "nccl": 2, "nccl-put": 4}
COUNTED, ROUNDS = 4, 40  # steps that are counted; how often at most, until they make no event
OUTPUTS, INPUTS, TOKENS = 24, 8, 5


def connect(sim: Any, transport: str, mode: str, ids: list[bytes], rank: int, ranks: int) -> Any:
    if transport == "ce":
        made = sim.ce(ids[0], rank, ranks, TIMEOUT, None)
        sim.set_ce_modes(made, *CE_MODES[mode])
        return made
    if transport == "nccl":
        return sim.nccl(ids, rank, ranks, TIMEOUT, None, registered=mode == "registered")
    return sim.nccl_put(ids, rank, ranks, TIMEOUT, None)


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

        def step() -> None:
            _native.linear_forward(executor, [x], [home], bundle, projections, options)
            _native.linear_backward(executor, [dy], [x], [home], bundle, projections, [True], [True], options)

        # The pool of events grows to what the hops between two looks of the watchdog take.
        for _ in range(ROUNDS):
            before, hops, cuda, nccl = Counter(sim.calls()), tally.hops, tally.cuda, tally.nccl
            for _ in range(COUNTED):
                step()
            calls = Counter(sim.calls())
            calls.subtract(before)
            hops, cuda, nccl = tally.hops - hops, tally.cuda - cuda, tally.nccl - nccl
            if rank == 0:
                steady.append(calls["cudaEventCreateWithFlags"] == 0)
            barrier.wait()
            if steady[-1]:
                break
            barrier.wait()
        executor.close()
        every = sum(number for name, number in calls.items() if name.startswith("cu"))
        computes, passes = COUNTED * 3 * ranks, COUNTED * 2
        return {
            "transport": transport,
            "mode": mode,
            "calls_per_hop": round(cuda / hops, 2),
            "calls_per_compute": round((every - cuda) / computes, 2),
            "nccl_calls_per_hop": round(nccl / hops, 2),
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
    parser.add_argument("--json", action="store_true", help="a JSON line for each transport and mode")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    for row in rows(options.ranks):
        if options.json:
            print(json.dumps(row))
        else:
            print(*(f"{key} {value}" for key, value in row.items() if key != "calls"), sep="  ")


if __name__ == "__main__":
    main()
