"""Predicts the time of a rotated linear layer on eight H100 from counted calls and published constants.

    python benchmarks/gpu/gpu_on_paper.py          # the tables of docs/gpu.md
    python benchmarks/gpu/gpu_on_paper.py --json   # a JSON line for each shape and number of tokens
    python benchmarks/gpu/gpu_on_paper.py --check  # check that docs/gpu.md has these tables

No number here was measured on a GPU. The time of a forward and a backward is the maximum of the GPU's time and the time
of the host to enqueue them. rtp_ext/ring/routes/route_planner.py models the GPU's time. The host's time is a number of
calls for each hop and each compute, or for a pass that is a graph, as `benchmarks/gpu/driver_calls.py` last counted
them (results/cpu-2core/driver_calls.jsonl), times the time of a call, plus torch's overhead for a product. Rates and
times are those of the planner (rtp_ext/planner/constants.json, with sources).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rtp_ext.planner import Cluster
from rtp_ext.planner.constants import TimeConstants, host_constant
from rtp_ext.ring.routes.route_planner import Device, LayerSize, Link, predict

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import RESULTS, last_command

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
CALLS = RESULTS / "cpu-2core" / "driver_calls.jsonl"
BEGIN, END = "<!-- made by benchmarks/gpu/gpu_on_paper.py -->\n", "<!-- end -->\n"

RANKS = 8
SHAPES = {  # outputs, inputs
    "Llama-7B": (11008, 4096),
    "Llama-3-8B": (14336, 4096),
    "Llama-3-70B": (28672, 8192),
    "Llama-3-405B": (53248, 16384),
    "GPT-3": (49152, 12288),
}
TOKENS = (1024, 2048, 4096, 8192)

H100, TIME = Cluster.preset("h100-80gb"), TimeConstants.default()
LINK = Link(H100.nccl_ring_bytes_per_s, TIME.nccl_base_s + TIME.nccl_intra_step_s, "NVLink 4")
GPU = Device(
    H100.bf16_achievable_flops_per_s * TIME.gemm_fraction,
    H100.streaming_multiprocessors,
    TIME.engine_launch_s,
    H100.name,
    H100.hbm_bytes_per_s * TIME.hbm_fraction,
)


@dataclass(frozen=True)
class Host:
    """Microseconds of the host for a hop, for a compute, and for a pass besides these."""

    hop: float
    compute: float
    replay: float
    source: str

    def step(self, hops: int, computes: int) -> float:
        """A forward and a backward."""
        return hops * self.hop + computes * self.compute + 2 * self.replay


def hosts() -> dict[str, Host]:
    counted = {}
    for row in last_command([json.loads(line) for line in CALLS.read_text().splitlines()]):
        counted[row["transport"], row["mode"]] = row
    call, product = (each * 1e6 for each in (TIME.driver_call_s, TIME.engine_product_s))
    replay, group = (host_constant(name) * 1e6 for name in ("replay_s", "nccl_thread_s"))

    def steps(transport: str, modes: tuple[str, ...], thread: float, source: str) -> Host:
        hop, compute = (
            max(counted[transport, mode][key] for mode in modes) for key in ("calls_per_hop", "calls_per_compute")
        )
        return Host(hop * call + thread, compute * call + product, 0.0, f"{hop:g} and {compute:g} calls{source}")

    pass_ = counted["ce", "replayed"]["calls_per_pass"]
    return {
        "before": Host(20.0, 15.0, 0.0, "a reviewer's estimate of an older engine"),
        "after": steps("ce", ("push", "pull", "mixed"), 0.0, ""),
        "graphs": Host(0.0, 0.0, pass_ * call + replay, f"{pass_:g} calls a pass, and the lookup of the graph"),
        "nccl": steps("nccl", ("registered",), group, ", and a thread for each hop"),
        "blocking": steps("nccl", ("registered, blocking",), 0.0, ", without the calls of NCCL itself"),
    }


@dataclass(frozen=True)
class Row:
    """The times of a forward and a backward of one layer, in microseconds; `prediction`: whether they are predicted."""

    shape: str
    tokens: int
    compute: float
    gpu: float
    before: float
    after: float
    graphs: float
    nccl: float
    blocking: float
    prediction: bool = True


def rows() -> list[Row]:
    made, takes = [], hosts()
    computes, hops = 3 * RANKS, 3 * (RANKS - 1)  # forward: R and R - 1; backward: twice as many
    for shape, (outputs, inputs) in SHAPES.items():
        for tokens in TOKENS:
            layer = LayerSize(outputs, inputs, 2, 4)
            gpu = predict(RANKS, tokens, layer, LINK, GPU)["rotate"] * 1e6
            alone = predict(RANKS, tokens, layer, Link(1e18, 0.0, "none"), GPU)["rotate"] * 1e6
            times = {name: max(gpu, each.step(hops, computes)) for name, each in takes.items()}
            made.append(Row(shape, tokens, alone, gpu, **times))
    return made


def tables() -> str:
    lines = [
        "| layer | tokens | products alone | with hops | `ce`, before | `ce` | `ce`, graphs | `nccl` | blocking |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        times = (row.compute, row.gpu, row.before, row.after, row.graphs, row.nccl, row.blocking)
        lines.append(f"| {row.shape} | {row.tokens} | " + " | ".join(f"{time:.0f}" for time in times) + " |")
    lines += ["", "| time of the host, us | a hop | a compute | a pass in addition | source |", "|---|---|---|---|---|"]
    names = {"before": "`ce`, before", "after": "`ce`", "graphs": "`ce`, graphs", "nccl": "`nccl`"}
    lines += [
        f"| {names.get(name, '`nccl`, blocking')} | {each.hop:.1f} | {each.compute:.1f} | {each.replay:.1f} | "
        f"{each.source} |"
        for name, each in hosts().items()
    ]
    return "\n".join(lines) + "\n"


def written() -> str:
    """The tables that the page has."""
    text = PAGE.read_text()
    start = text.index(BEGIN) + len(BEGIN)
    return text[start : text.index(END, start)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        sys.exit("docs/gpu.md has other tables: run benchmarks/gpu/gpu_on_paper.py" if written() != tables() else 0)
    if options.json:
        for row in rows():
            print(json.dumps(asdict(row)))
    else:
        print(tables(), end="")


if __name__ == "__main__":
    main()
