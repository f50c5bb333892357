"""What a rotated linear layer should take on eight H100, from counted calls and constants of others: predictions.

    python benchmarks/gpu_on_paper.py            # the tables of docs/gpu.md
    python benchmarks/gpu_on_paper.py --json     # a JSON line for each shape and number of tokens
    python benchmarks/gpu_on_paper.py --check    # whether docs/gpu.md has these tables

Nothing here was measured on a GPU. A forward and a backward take what the GPU takes or what the host takes to enqueue
them, whichever is longer. The GPU's part is the gate's model (rtp_ext/ring/gate.py) over NVLink 4; the host's is a
number of calls for each hop and each compute (`benchmarks/driver_calls.py` counts them) times the time of a call, and
what torch takes for a product.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rtp_ext.ring.gate import Device, LayerSize, Link, predict

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- made by benchmarks/gpu_on_paper.py -->\n", "<!-- end -->\n"

RANKS = 8
SHAPES = {  # outputs, inputs
    "Llama-7B": (11008, 4096),
    "Llama-3-8B": (14336, 4096),
    "Llama-3-70B": (28672, 8192),
    "Llama-3-405B": (53248, 16384),
    "GPT-3": (49152, 12288),
}
TOKENS = (1024, 2048, 4096, 8192)

# 380 of nominally 450 GB/s were measured on H100 (NVIDIA/nccl issue 1264); a round of a ring costs about 6 us of
# synchronisation (JAX, collective matmul on 8 H100).
LINK = Link(370e9, 6e-6, "NVLink 4, as others measured it")
# 65 % of the data sheet's 989 TFLOP/s for large products, 132 SMs, 85 % of 3.35 TB/s.
GPU = Device(989e12 * 0.65, 132, 4e-6, "H100 SXM", 3.35e12 * 0.85)
CALL_US = 20 / 30  # of the driver or the runtime: a reviewer's estimate of 20 us for 30 calls
THREAD_US = 71.0  # that NCCL starts and joins for a group of a non-blocking communicator: 54 to 88 us on a CPU server
PRODUCT_US = 5.0  # of the host: an operator of torch and a launch of cuBLAS; assumed


@dataclass(frozen=True)
class Host:
    """Microseconds of the host for a hop and for a compute."""

    hop: float
    compute: float
    source: str


HOSTS = {
    "before": Host(20.0, 15.0, "the same reviewer's estimate of the engine as it was"),
    "after": Host(10.67 * CALL_US, 3.75 * CALL_US + PRODUCT_US, "10.67 and 3.75 calls, counted"),
    "nccl": Host(4.44 * CALL_US + THREAD_US, 3.75 * CALL_US + PRODUCT_US, "counted, and a thread for each hop"),
}


@dataclass(frozen=True)
class Row:
    """A forward and a backward of one layer, in microseconds; `prediction` says what it is."""

    shape: str
    tokens: int
    compute: float
    gpu: float
    before: float
    after: float
    nccl: float
    prediction: bool = True


def rows() -> list[Row]:
    made = []
    computes, hops = 3 * RANKS, 3 * (RANKS - 1)  # forward: R and R - 1; backward: twice as many
    for shape, (outputs, inputs) in SHAPES.items():
        for tokens in TOKENS:
            layer = LayerSize(outputs, inputs, 2, 4)
            gpu = predict(RANKS, tokens, layer, LINK, GPU)["rotate"] * 1e6
            alone = predict(RANKS, tokens, layer, Link(1e18, 0.0, "none"), GPU)["rotate"] * 1e6
            host = {name: hops * each.hop + computes * each.compute for name, each in HOSTS.items()}
            before, after, nccl = (max(gpu, host[name]) for name in ("before", "after", "nccl"))
            made.append(Row(shape, tokens, alone, gpu, before, after, nccl))
    return made


def tables() -> str:
    lines = [
        "| layer | tokens | products alone | with hops | `ce`, before | `ce` | `nccl` |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        times = (row.compute, row.gpu, row.before, row.after, row.nccl)
        lines.append(f"| {row.shape} | {row.tokens} | " + " | ".join(f"{time:.0f}" for time in times) + " |")
    lines += ["", "| what the host takes, us | a hop | a compute | from |", "|---|---|---|---|"]
    names = {"before": "`ce`, before", "after": "`ce`", "nccl": "`nccl`"}
    lines += [
        f"| {names[name]} | {each.hop:.1f} | {each.compute:.1f} | {each.source} |" for name, each in HOSTS.items()
    ]
    return "\n".join(lines) + "\n"


def written() -> str:
    """The tables that the page has."""
    text = PAGE.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        sys.exit("docs/gpu.md has other tables: run benchmarks/gpu_on_paper.py" if written() != tables() else 0)
    if options.json:
        for row in rows():
            print(json.dumps(asdict(row)))
    else:
        print(tables(), end="")


if __name__ == "__main__":
    main()
