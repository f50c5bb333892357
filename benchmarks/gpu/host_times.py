"""The host's time of a hop, a product and a pass on one GPU, which all predictions of the host's time take.

    python benchmarks/gpu/host_times.py --output results.jsonl [--ranks 8] [--device cpu]

hops.py needs a GPU for each rank; here the ring is emulated: its hops have the events, waits and copies of real ones,
but no flags of `ce`. The line of a link has

    host_us_per_hop, host_us_forward, host_us_step   microseconds of the host alone, which awaits nothing; passes of a
                            small rotated linear layer
    gpu_us_per_hop          until a small shard has gone around, over its hops: the latency of a hop
    gigabytes_per_s         of a hop of --mib MiB, nothing computed meanwhile (each byte is read and written)
    graph_us_forward, graph_us_step, replayed        the same passes as CUDA graphs (Ring(graphs="on"))
    plain_us                of the host for one torch.mm of this size
    expected_us             what benchmarks/gpu/expected.py predicts for a hop over `ce` or NCCL: [least, most]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import append_line, command_line, environment_card, result_line
from shared.launch import Place

import rtp_ext
from gpu.expected import hop_us
from gpu.hops import FEATURES, TOKENS, seconds_of

LINKS = ("ce-local", "ce-local:4", "sm-local", "nccl-self", "pcie")


def best(place: Place, work: Callable[[], object], passes: int = 3) -> float:
    """Microseconds of the host."""
    return 1e6 * min(seconds_of(place, work, passes, waits=False))


def layer_on(ring: rtp_ext.Ring, place: Place, ranks: int) -> torch.nn.Module:
    torch.manual_seed(0)
    plain = torch.nn.Linear(FEATURES, FEATURES * ranks, bias=False, device=place.device)
    return rtp_ext.fully_rotate(plain, mesh=ring)


def passes_of(layer: torch.nn.Module, x: torch.Tensor, place: Place) -> tuple[float, float]:
    """Microseconds of the host for a forward, and for a forward and a backward."""

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def step() -> None:
        layer(x).sum().backward()

    for _ in range(6):  # graphs are captured where addresses come again
        forward()
        step()
    return best(place, forward), best(place, step)


def measure(place: Place, link: str, ranks: int, mib: int) -> dict[str, Any]:
    on_gpu = place.device.type == "cuda"
    ring = rtp_ext.Ring.emulated(ranks, device=place.device, link=link if on_gpu else None, prefetch=0)
    small = torch.ones(256, device=place.device)
    large = torch.ones(mib << 20, dtype=torch.uint8, device=place.device)
    x = torch.ones(TOKENS, FEATURES, device=place.device)

    def rotate(shard: torch.Tensor) -> None:
        for _ in ring.rotate(shard):
            pass

    row: dict[str, float] = {"host_us_per_hop": best(place, lambda: rotate(small)) / (ranks - 1)}
    row["gpu_us_per_hop"] = (
        1e6 * statistics.median(seconds_of(place, lambda: rotate(small), 1, waits=True)) / (ranks - 1)
    )
    whole = statistics.median(seconds_of(place, lambda: rotate(large), 1, waits=True))
    row["gigabytes_per_s"] = (ranks - 1) * large.numel() / whole / 1e9
    row["host_us_forward"], row["host_us_step"] = passes_of(layer_on(ring, place, ranks), x, place)
    a, b = torch.ones(TOKENS, FEATURES, device=place.device), torch.ones(FEATURES, FEATURES, device=place.device)
    out = a @ b
    row["plain_us"] = best(place, lambda: torch.mm(a, b, out=out), 50)
    ring.close()
    if on_gpu:
        graphs = rtp_ext.Ring.emulated(ranks, device=place.device, link=link, graphs="on")
        row["graph_us_forward"], row["graph_us_step"] = passes_of(layer_on(graphs, place, ranks), x, place)
        row["replayed"] = graphs.graphs.replayed
        graphs.close()
    expected = hop_us(link)
    return {name: round(value, 2) for name, value in row.items()} | {"expected_us": [expected.least, expected.most]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="append the results to this file")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--mib", type=int, default=14, help="of the large shard")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--links", type=lambda text: text.split(","), default=LINKS)
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    place = Place(0, 1, device, None)
    card = environment_card(device, command_line())
    for link in args.links:
        try:
            row = measure(place, link, args.ranks, args.mib)
        except RuntimeError as error:
            row = {"refused": str(error)[:500]}
        line = result_line(
            card, benchmark="host_times", case=link, link=link, ranks=args.ranks, transport="emulated", **row
        )
        append_line(args.output, line)
        print(link, row, flush=True)


if __name__ == "__main__":
    main()
