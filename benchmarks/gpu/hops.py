"""The first times to take on a machine with GPUs: the host's time of a hop, then push against pull over `ce`.

    python benchmarks/gpu/hops.py                          # a ring of all GPUs of this machine
    python benchmarks/gpu/hops.py --device cpu --ranks 2   # over shared memory: whether the script runs

Times are those of the slowest rank. A line of JSON for each transport, mode and route has

    host_us_per_hop    microseconds of the host for a hop of `Ring.rotate`, with Python's generator; of a small shard,
                       so that the GPU is not the limit
    host_us_per_pass   microseconds of the host for the forward of a small rotated linear layer: R - 1 hops, R products
    expected_us        what benchmarks/gpu/expected.py predicts for the two: [least, most] of each; GPUs only
    pass_ms            milliseconds until all shards of `--mib` MiB have visited every rank, nothing computed meanwhile
    gigabytes_per_s    bytes that a rank receives, over that time

Nothing is enqueued beside the hops: benchmarks/overlap.py times hops beside products. A transport that does not work
here is a line with the reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import append_line, command_line, environment_card, result_line
from shared.launch import Place, add_launch_options, everyones, launch

import rtp_ext
from gpu.expected import hosts

CASES = {  # transport, mode of ce, route
    "cuda": (
        ("ce", "push", "ring"),
        ("ce", "push", "direct"),
        ("ce", "pull", "direct"),
        ("nccl", "auto", "ring"),
        ("nccl", "auto", "direct"),
    ),
    "cpu": (("shm", "auto", "ring"), ("shm", "auto", "direct")),
}
REPEATED, PASSES = 20, 3  # measurements; passes of each: few, since the host waits where the GPU's queue is full
FEATURES, TOKENS = 64, 16  # of the small layer


def measure(place: Place, args: argparse.Namespace) -> list[dict[str, Any]]:
    return [_case(place, args, *case) for case in CASES[place.device.type]]


def _case(place: Place, args: argparse.Namespace, transport: str, mode: str, route: str) -> dict[str, Any]:
    named = {"transport": transport, "ce_mode": mode, "route": route, "ranks": place.ranks}
    options = {"ce_mode": mode} if transport == "ce" else None
    try:
        ring = rtp_ext.Ring(place.mesh, transport=transport, route=route, transport_options=options, timeout=60)
    except rtp_ext.RotationError as error:
        if "cannot be used" not in str(error):  # that is the same on every rank
            raise
        return {**named, "refused": str(error)}
    torch.manual_seed(0)
    small = torch.ones(256, device=place.device)
    large = torch.ones(args.mib << 20, dtype=torch.uint8, device=place.device)
    layer = rtp_ext.fully_rotate(torch.nn.Linear(FEATURES, FEATURES * place.ranks, device=place.device), mesh=ring)
    x = torch.ones(TOKENS, FEATURES, device=place.device)

    def rotate(shard: torch.Tensor) -> None:
        for _ in ring.rotate(shard):
            pass

    with torch.no_grad():
        hop = min(seconds_of(place, lambda: rotate(small), PASSES, waits=False)) / (place.ranks - 1)
        forward = min(seconds_of(place, lambda: layer(x), PASSES, waits=False))
        whole = statistics.median(seconds_of(place, lambda: rotate(large), 1, waits=True))
    ring.close()
    return {
        **named,
        "host_us_per_hop": round(1e6 * hop, 2),
        "host_us_per_pass": round(1e6 * forward, 2),
        "expected_us": _expected(place, transport),
        "pass_ms": round(1e3 * whole, 4),
        "gigabytes_per_s": round((place.ranks - 1) * large.numel() / whole / 1e9, 2),
    }


def seconds_of(place: Place, work: Any, passes: int, *, waits: bool) -> list[float]:
    """Returns the seconds of the slowest rank for a pass. `waits`: with the time of the GPU. Collective."""
    found = []
    for _ in range(REPEATED + 2):
        _synchronize(place)
        everyones([0.0], place)
        _synchronize(place)
        started = time.perf_counter()
        for _ in range(passes):
            work()
        if waits:
            _synchronize(place)
        found.append(everyones([(time.perf_counter() - started) / passes], place).max().item())
    return found[2:]


def _synchronize(place: Place) -> None:
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)


def _expected(place: Place, transport: str) -> list[list[float]] | None:
    if place.device.type != "cuda":
        return None
    host = hosts()["ce" if transport == "ce" else "blocking"]
    hop, compute, _ = host.parts()
    hops = place.ranks - 1
    return [
        [round(hop.least, 2), round(hop.most, 2)],
        [round(hops * a + place.ranks * b, 2) for a, b in ((hop.least, compute.least), (hop.most, compute.most))],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_launch_options(parser)
    parser.add_argument("--ranks", type=int, help="default: the GPUs of this machine; 2 on CPUs")
    parser.add_argument("--mib", type=int, default=14, help="of a shard; 14: of 14336 x 4096 in 16 bits on 8 ranks")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="append the results to this file")
    args = parser.parse_args()
    on_gpus = args.device != "cpu" and torch.cuda.is_available()
    ranks = args.ranks or (torch.cuda.device_count() if on_gpus else 2)
    if ranks < 2:
        sys.exit("hops.py: expected at least 2 ranks, and a GPU for each, got 1")
    card = environment_card(torch.device("cuda", 0) if on_gpus else torch.device("cpu"), command_line())
    for row in launch(measure, args, ranks):
        case = " ".join(str(row[key]) for key in ("transport", "ce_mode", "route"))
        append_line(args.output, result_line(card, benchmark="hops", case=case, **row))
        print(json.dumps(row))


if __name__ == "__main__":
    main()
