"""Products of a rotated layer in 16 and in 8 bits, and what it takes to make their operands.

    python benchmarks/gpu/products8.py --output results.jsonl

y = x W^T of --tokens rows with a weight [outputs, inputs], whole or a shard: the line of a recipe and a shape has

    t_us            microseconds of torch._scaled_mm to bfloat16 (of torch.mm for bfloat16)
    t_exact_us      the same without fast accumulation
    t_float32_us    the same to float32
    tflops          1e12 floating-point operations per second in t_us
    t_tokens_us     of quantizing x (largest magnitudes and codes)
    t_weight_us     of quantizing the weight for forward
    t_turn_us       of transposing its codes, as a receiver does for recipes of one plane
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rtp_ext.measure.timing import samples
from rtp_ext.recipes import empty, quantize, quantize_into, recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import append_line, command_line, environment_card, gpu_state, result_line
from shared.launch import Place, together

RECIPES = ("bfloat16", "float8_tensorwise", "float8_rowwise")
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((14336, 4096), (1792, 4096), (4096, 14336), (512, 4096))  # gate or up whole, its shard of 8, down, q's shard


def actions_of(name: str, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], Any]]:
    outs = {dtype: torch.empty(x.size(0), weight.size(0), device=x.device, dtype=dtype) for dtype in DTYPES}
    if name == "bfloat16":
        return {"t_us": lambda: torch.mm(x, weight.t(), out=outs[torch.bfloat16])}
    chosen = recipe(name)
    tokens, codes = quantize(chosen.tokens, x, gpu=True), quantize(chosen.forward, weight, gpu=True)

    def product(dtype: torch.dtype, fast: bool) -> None:
        torch._scaled_mm(
            tokens.codes, codes.codes.t(), tokens.scales, codes.scales.t(),
            out_dtype=dtype, out=outs[dtype], use_fast_accum=fast,
        )  # fmt: skip

    again = empty(chosen.tokens, *x.shape, x.device, gpu=True), empty(chosen.forward, *weight.shape, x.device, gpu=True)
    turned = torch.empty(weight.size(1), weight.size(0), dtype=torch.uint8, device=x.device)
    return {
        "t_us": lambda: product(torch.bfloat16, True),
        "t_exact_us": lambda: product(torch.bfloat16, False),
        "t_float32_us": lambda: product(torch.float32, True),
        "t_tokens_us": lambda: quantize_into(again[0], x),
        "t_weight_us": lambda: quantize_into(again[1], weight),
        "t_turn_us": lambda: turned.copy_(codes.codes.view(torch.uint8).t()),
    }


def measure(name: str, tokens: int, shape: tuple[int, int], place: Place, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(tokens, shape[1], device=place.device, dtype=torch.bfloat16)
    weight = torch.randn(*shape, device=place.device, dtype=torch.bfloat16)
    actions, row = {}, {}
    for what, action in actions_of(name, x, weight).items():
        try:
            action()
        except (RuntimeError, ValueError) as problem:  # a torch or a device without it
            row[what] = None
            print(f"{name}, {what}: {str(problem)[:200]}", flush=True)
        else:
            actions[what] = action
    taken = samples(actions, together(place), seconds=args.seconds, iterations=args.iterations)
    row |= {what: sample.median for what, sample in taken.items()}
    if row["t_us"] is not None:
        row["tflops"] = 2.0 * tokens * shape[0] * shape[1] / row["t_us"] / 1e6
    return row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE.jsonl", help="append the results to this file")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[8192, 2048])
    add("--shapes", type=int, default=len(SHAPES), help="how many")
    add("--seconds", type=float, default=0.05, help="of each quantity, at least")
    add("--iterations", type=int, default=10, help="of each quantity, at least")
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    card, place = environment_card(device, command_line()), Place(0, 1, device, None)
    for shape in SHAPES[: args.shapes]:
        for tokens in args.tokens:
            for name in RECIPES:
                row = measure(name, tokens, shape, place, args)
                told = {
                    "recipe": name,
                    "shape": f"{shape[0]}x{shape[1]}",
                    "n": shape[0],
                    "k": shape[1],
                    "tokens": tokens,
                }
                state = gpu_state() if device.type == "cuda" else {}
                case = f"{name}, {told['shape']}, {tokens} tokens"
                append_line(args.output, result_line(card, benchmark="products8", case=case, **told, **row, **state))
                shown = {key: value if value is None else round(value, 1) for key, value in row.items()}
                print(case, shown, flush=True)


if __name__ == "__main__":
    main()
