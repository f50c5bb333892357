"""Float32 sums of products of 16 bits: what it costs to add to them (beta = 1) instead of writing them (beta = 0).

    python benchmarks/gpu/sums.py --output results.jsonl

The input gradient of a rotated layer is such a sum: each product with a shard, [8192, k] x [k, 4096], adds to it. The
planner assumes that the memory traffic of a sum hides under the main loop of the product. The line of a k has

    t_beta0_us, t_beta1_us      microseconds of this package's product (csrc/compute/gemm): written, added in place
    t_elsewhere_us              added to a sum in other memory, as cuBLASLt does
    t_torch_us, t_torch_add_us  of torch's products with a float32 result, written and added; None where torch has none
    t_16_bits_us                of torch's product with a 16-bit result
    tflops_beta0, tflops_beta1  1e12 floating-point operations per second
    ratio                       t_beta1_us / t_beta0_us
    extra_gb_per_s              1e9 bytes of the sum that beta = 1 reads, per second that it takes longer; None where
                                it takes no longer

Results are compared with float64 first; a wrong one ends the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rtp_ext._native import kernels
from rtp_ext.measure.timing import samples

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import append_line, command_line, environment_card, gpu_state, result_line
from shared.launch import Place, together

from gpu.expected import SUM_DEPTHS, SUM_SHAPE

RANKS = 8  # the operand on the left is a slice of a gradient of all outputs
ROWS_CHECKED = 32


def measure(place: Place, tokens: int, features: int, depth: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device, narrow = place.device, torch.bfloat16
    a = torch.randn(tokens, RANKS * depth, device=device, dtype=narrow)[:, depth : 2 * depth]
    b = torch.randn(depth, features, device=device, dtype=narrow)
    out, before = (torch.randn(tokens, features, device=device) for _ in range(2))
    rounded = torch.empty(tokens, features, device=device, dtype=narrow)
    actions: dict[str, Callable[[], Any]] = {
        "beta0": lambda: kernels.gemm(out, None, a, b),
        "beta1": lambda: kernels.gemm(out, out, a, b),
        "elsewhere": lambda: kernels.gemm(out, before, a, b),
        "16_bits": lambda: torch.mm(a, b, out=rounded),
    }
    check(actions, out, before, a, b)
    others: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.mm(a, b, out_dtype=torch.float32),
        "torch_add": lambda: torch.addmm(before, a, b, out_dtype=torch.float32),
    }
    for name, action in others.items():
        try:
            action()
        except (RuntimeError, TypeError) as problem:  # a torch or a device without it
            print(f"{name}: {str(problem)[:120]}", flush=True)
        else:
            actions[name] = action
    taken = samples(actions, together(place), seconds=args.seconds, iterations=args.iterations)
    times = {name: taken[name].median if name in taken else None for name in (*actions, *others)}
    flop = 2.0 * tokens * features * depth
    longer = times["beta1"] - times["beta0"]
    return {
        **{f"t_{name}_us": time for name, time in times.items()},
        "spread": max(each.p80 / each.p20 for each in taken.values()),
        "tflops_beta0": flop / times["beta0"] / 1e6,
        "tflops_beta1": flop / times["beta1"] / 1e6,
        "ratio": times["beta1"] / times["beta0"],
        "extra_gb_per_s": out.numel() * out.element_size() / longer / 1e3 if longer > 0 else None,
    }


def check(
    actions: dict[str, Callable[[], Any]], out: torch.Tensor, before: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> None:
    """Compares the first rows of each result with float64. Raises RuntimeError for a wrong one."""
    rows = slice(0, ROWS_CHECKED)
    product = a[rows].double() @ b.double()
    for name in ("beta0", "beta1", "elsewhere"):
        summands = {"beta0": torch.zeros_like(product), "beta1": out[rows].double(), "elsewhere": before[rows].double()}
        actions[name]()
        expected = product + summands[name]
        error = ((out[rows].double() - expected).abs().max() / expected.abs().max()).item()
        if not error < 1e-4:
            raise RuntimeError(f"sums: a product with {name} is wrong by {error:.1e} of its largest number")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    add("--output", type=Path, metavar="FILE.jsonl", help="append the results to this file")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--shape", **numbers, default=list(SUM_SHAPE), help="tokens and features of the sum")
    add("--depths", **numbers, default=list(SUM_DEPTHS), help="of the products")
    add("--seconds", type=float, default=0.1, help="of each quantity, at least")
    add("--iterations", type=int, default=10, help="of each quantity, at least")
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    card, (tokens, features) = environment_card(device, command_line()), args.shape
    for depth in args.depths:
        row = measure(Place(0, 1, device, None), tokens, features, depth, args)
        state = gpu_state() if device.type == "cuda" else {}
        line = result_line(
            card, benchmark="sums", case=f"{tokens}x{features}, k {depth}", shape=f"{tokens}x{features}", k=depth,
            tokens=tokens, dtype="bfloat16", **row, **state,
        )  # fmt: skip
        append_line(args.output, line)
        print(depth, {name: value if value is None else round(value, 3) for name, value in row.items()}, flush=True)


if __name__ == "__main__":
    main()
