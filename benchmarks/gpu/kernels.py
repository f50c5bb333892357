"""The kernels of our own against the rate at which this GPU copies memory.

    python benchmarks/gpu/kernels.py --check 1000

All of them are limited by memory: the lower bound of the time is the bytes that the kernel must read and write, divided
by the rate of a plain copy, which is measured first. A case is one launch on tensors of a real model's shard; the L2
cache is overwritten before every launch. Reported are the median of `--repeats` launches, and p20 and p80.

`fraction` is bytes / time, divided by the same quotient of the copy: 1 is the bound. For `add_rows` every addition
counts as one read and one write of its sum.

First, `--check` random cases of every kernel (dtypes, shapes, alignments, strides) and as many products are compared
with float64; a wrong result ends the run, and nothing is recorded.

The last line of stdout is JSON. One JSON line per case is appended to results/<machine>/kernels.jsonl. Without a GPU
the exit status is 2.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rtp_ext._native import kernels
from rtp_ext.recipes import RECIPES, empty, quantize_into, recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/
sys.path.append(str(Path(__file__).resolve().parents[2] / "python_tests" / "kernels"))  # kernel_checks and its imports
sys.path.append(str(Path(__file__).resolve().parents[2] / "python_tests" / "support"))

from shared.card import RESULTS, append_line, command_line, environment_card, result_line

COPY_BYTES = 1 << 30
FLUSH_BYTES = 1 << 28  # more than the L2 cache of any GPU
WARMUP = 3
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Sizes:
    """Returns the cases of one layer of Llama-3-8B, sharded over `ranks`."""

    tokens: int = 4096
    features: int = 4096
    hidden: int = 14336
    vocabulary: int = 128256
    ranks: int = 8
    logit_rows: int = 1024


@dataclass(frozen=True)
class Case:
    kernel: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int
    run: Callable[[], Any]


def moved(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def normal(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def hidden_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    slice_width = sizes.hidden // sizes.ranks
    for dtype in DTYPES:
        whole = [normal(sizes.tokens, sizes.hidden, dtype=dtype, device=device) for _ in range(2)]
        for layout in ("dense", "slice"):  # hidden values that were recomputed, and kept ones
            up, gate = (values[:, slice_width : 2 * slice_width] for values in whole)
            if layout == "dense":
                up, gate = up.contiguous(), gate.contiguous()
            d_value = normal(sizes.tokens, slice_width, dtype=dtype, device=device)
            shape = (sizes.tokens, slice_width)
            for activation, through in (("silu", gate), ("gelu", None)):
                name = f"{activation}{'' if through is None else ' gated'} {layout}"
                inputs = [up] if through is None else [up, through]
                yield Case(
                    "hidden_forward", name, dtype, shape, moved(up, *inputs),
                    lambda a=activation, u=up, g=through: kernels.hidden_forward(a, u, g),
                )  # fmt: skip
                yield Case(
                    "hidden_backward", name, dtype, shape, moved(d_value, *inputs, up, *inputs),
                    lambda a=activation, d=d_value, u=up, g=through: kernels.hidden_backward(a, d, u, g),
                )  # fmt: skip


def logit_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    rows, columns = sizes.logit_rows, sizes.vocabulary // sizes.ranks
    targets = torch.randint(sizes.vocabulary, (rows,), device=device)
    logits = normal(rows, columns, dtype=torch.float32, device=device)
    most, scaled, hit, total = (torch.zeros(rows, device=device) for _ in range(4))
    most.fill_(4)
    for soft_cap in (0.0, 30.0):
        chunk = kernels.LogitChunk(logits, targets, soft_cap=soft_cap)
        name = "soft cap" if soft_cap else "plain"
        yield Case(
            "logit_sums", name, torch.float32, (rows, columns), moved(logits),
            lambda c=chunk: kernels.add_logits(c, most, scaled, hit, total),
        )  # fmt: skip
        for dtype in DTYPES:
            out = moved(logits) * dtype.itemsize // 4
            # in float32 the gradient overwrites the logits; their values do not affect the time
            yield Case(
                "logit_gradient", name, dtype, (rows, columns), moved(logits) + out,
                lambda c=chunk, d=dtype: kernels.logit_gradient(
                    c, most, scaled, hit, label_smoothing=0.1, everywhere=1e-6, dtype=d
                ),
            )  # fmt: skip


def embedding_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    rows = sizes.vocabulary // sizes.ranks
    ids = torch.randint(rows, (sizes.tokens,), device=device)  # every token meets this shard
    for dtype in DTYPES:
        table = normal(rows, sizes.features, dtype=dtype, device=device)
        out = normal(sizes.tokens, sizes.features, dtype=dtype, device=device)
        yield Case(
            "gather_rows", "all tokens here", dtype, tuple(out.shape), 2 * moved(out),
            lambda t=table, o=out: kernels.gather_rows(ids, t, 0, o),
        )  # fmt: skip
        sums = torch.zeros(rows, sizes.features, device=device)
        yield Case(
            "add_rows", "all tokens here", dtype, tuple(out.shape), moved(out) + 2 * out.numel() * 4,
            lambda s=sums, o=out: kernels.add_rows(s, ids, o, 0, -1, 0.125),
        )  # fmt: skip


def pack_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    shapes = [(sizes.hidden // sizes.ranks, sizes.features)] * 2 + [(sizes.features, sizes.hidden // sizes.ranks)]
    source = [normal(*shape, dtype=torch.float32, device=device) for shape in shapes]
    for dtype in DTYPES:
        target = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        yield Case(
            "pack", "gate, up, down from float32", dtype, shapes[0], moved(*source, *target),
            lambda t=target: kernels.pack(source, t),
        )  # fmt: skip


def block_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Frozen weights in blocks: one shard of a layer, widened before a product."""
    shape = (sizes.hidden // sizes.ranks, sizes.features)
    for format in ("nf4", "mxfp4", "int8"):
        numbers, size = kernels.block_layout(format)
        blocks = torch.randint(64, (shape[0] * shape[1] // numbers * size,), dtype=torch.uint8, device=device)
        for dtype in DTYPES:
            out = torch.empty(shape, dtype=dtype, device=device)
            yield Case(
                "dequantize_blocks", format, dtype, shape, moved(blocks, out),
                lambda o=out, b=blocks, f=format: kernels.dequantize_blocks(o, b, f),
            )  # fmt: skip


def code_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """8-bit codes of a shard and of tokens. Bytes are those of reading each number twice, for the largest magnitudes
    and for the codes; most recipes read it once, and may exceed the rate of a copy."""
    for rows, columns in ((sizes.hidden // sizes.ranks, sizes.features), (sizes.tokens, sizes.features)):
        values = normal(rows, columns, dtype=torch.bfloat16, device=device)
        for name in RECIPES:
            out = empty(recipe(name).tokens, rows, columns, device, gpu=True)
            yield Case(
                "quantize_codes", name, values.dtype, (rows, columns), moved(values, values, out.codes, out.scales),
                lambda o=out, v=values: quantize_into(o, v),
            )  # fmt: skip


def all_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    for make in (hidden_cases, logit_cases, embedding_cases, pack_cases, block_cases, code_cases):
        yield from make(sizes, device)


class Stopwatch:
    """Times launches one by one, each after the L2 cache was overwritten. The work before it hides the host's part."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def microseconds(self, run: Callable[[], Any]) -> list[float]:
        marks = []
        for _ in range(WARMUP + self.repeats):
            self.flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        return sorted(begin.elapsed_time(end) * 1e3 for begin, end in marks[WARMUP:])


def copy_rate(watch: Stopwatch) -> float:
    """Bytes per second, read and written, of a copy that no cache holds."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * COPY_BYTES / (statistics.median(watch.microseconds(lambda: target.copy_(source))) * 1e-6)


def check(cases: int) -> None:
    from gemm_checks import run_gemm_checks
    from kernel_checks import run_checks
    from torch_kernels import Torch

    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        done = run_checks(Torch("cuda"), cases) + run_gemm_checks("cuda", cases)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    print(f"{done} random cases agree with float64", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time our kernels. See the top of the file.")
    add = parser.add_argument
    add("--check", type=int, default=100, metavar="N", help="random cases of each kernel to compare first (0: none)")
    add("--repeats", type=int, default=50, help="timed launches of each case")
    add("--kernels", type=lambda text: text.split(","), help="only these, separated by commas")
    add("--output", type=Path, metavar="FILE.jsonl", help="append the results here instead of results/<machine>/")
    args = parser.parse_args()
    if args.check < 0 or args.repeats < 1:
        parser.error("--repeats must be at least 1, --check at least 0")
    args.command = command_line()
    return args


def main() -> None:
    args = parse_arguments()
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False, and these kernels run on GPUs only", file=sys.stderr)
        raise SystemExit(2)
    if args.check:
        check(args.check)
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    card = environment_card(device, args.command)
    watch = Stopwatch(args.repeats)
    rate = copy_rate(watch)
    print(f"copy: {rate / 1e9:.0f} GB/s (read and written)\n")
    print(
        f"{'kernel':<16}{'case':<30}{'dtype':<10}{'shape':<16}{'us':>8}{'p20':>8}{'p80':>8}{'GB/s':>8}{'fraction':>10}"
    )
    rows = []
    output = args.output or RESULTS / card["machine"] / "kernels.jsonl"
    for case in all_cases(Sizes(), device):
        if args.kernels and case.kernel not in args.kernels:
            continue
        times = watch.microseconds(case.run)
        median = statistics.median(times)
        p20, p80 = times[len(times) // 5], times[-1 - len(times) // 5]
        speed = case.bytes / (median * 1e-6)
        dtype = str(case.dtype).removeprefix("torch.")
        shape = "x".join(map(str, case.shape))
        row = result_line(
            card, benchmark="kernels", case=case.name, shape=shape, dtype=dtype, tokens=case.shape[0],
            kernel=case.kernel, bytes=case.bytes, t_us=median, t_p20_us=p20, t_p80_us=p80,
            gb_per_s=speed / 1e9, copy_gb_per_s=rate / 1e9, fraction=speed / rate,
            repeats=args.repeats, checked=args.check,
        )  # fmt: skip
        rows.append(row)
        append_line(output, row)
        print(
            f"{case.kernel:<16}{case.name:<30}{dtype:<10}{shape:<16}{median:>8.1f}{p20:>8.1f}{p80:>8.1f}"
            f"{speed / 1e9:>8.0f}{speed / rate:>10.2f}",
            flush=True,
        )
    fractions = {f"{r['kernel']} {r['case']} {r['dtype']}": r["fraction"] for r in rows}
    print(json.dumps({"copy_gb_per_s": rate / 1e9, "fractions": fractions}), flush=True)


if __name__ == "__main__":
    main()
