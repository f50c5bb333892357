"""Costs of rtp and of `fully_shard` over layers, ranks and parameters: nothing may grow faster than the model.

    python benchmarks/growth/growth.py --sweep layers       # 10, 100 and 400 blocks on 2 ranks
    python benchmarks/growth/growth.py --sweep ranks        # 2, 4 and 8 ranks, 10 blocks
    python benchmarks/growth/growth.py --sweep parameters   # 1e8 and 1e9 parameters on the meta device, 24 blocks
    python benchmarks/growth/growth.py --check              # only reads the last recorded sweeps

The blocks of the first two sweeps are MLPs so small that what is counted for each layer, call and tensor is all that
there is. Conversion, the first step, a later step (the median of five), and saving and loading a checkpoint of model
and optimizer (torch.distributed.checkpoint) are timed: seconds of the slowest rank, and processor seconds, the mean of
all ranks, which other work on the machine and ranks that take turns on its cores disturb least. The last sweep converts
models that have no memory yet. `peak_bytes` is by how much the conversion raised the resident memory of a rank.

The growth of a cost between two points of a sweep is the exponent log(cost ratio) / log(size ratio), of processor
seconds; of ranks, of those per rank: a rank sends R - 1 hops in a pass, so that linear is right. Exit status 1 if an
exponent of rtp is above 1.2, where the larger cost is above 50 ms. One line for each case is appended to
results/<machine>/growth.jsonl; the last line of stdout is JSON.
"""

import argparse
import json
import math
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared.card import add_output_options, append_line, complete_output, environment_card, result_line
from shared.launch import Place, gather, launch
from shared.memory import status_bytes
from shared.models import MLPStack, random_vectors
from shared.strategies import STRATEGIES, Trainer
from shared.table import Cell, Columns, Row, Table, mebibytes, named, number, read_lines, told
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

STRATEGIES_COMPARED = ("rtp", "fsdp2")
SMALL = {"width": 32, "inner": 64}
META_BLOCKS = 24
META_WIDTHS = {10**8: (1024, 2048), 10**9: (2048, 10240)}  # of each number of parameters: width, inner width
LATER_STEPS = 5
TOKENS = 8
MOST, LEAST = 1.2, 0.05  # the largest exponent; processor seconds below which a cost is noise

COSTS = {"convert": "conversion", "first_step": "first step", "step": "later step", "save": "save", "load": "load"}
SIZES = {"layers": "layers", "ranks": "ranks", "parameters": "parameters"}  # by sweep, the key that grows

Case = dict[str, Any]

SWEEPS: dict[str, list[Case]] = {
    "layers": [{"ranks": 2, "layers": layers, **SMALL} for layers in (10, 100, 400)],
    "ranks": [{"ranks": ranks, "layers": 10, **SMALL} for ranks in (2, 4, 8)],
    "parameters": [
        {"ranks": 2, "layers": META_BLOCKS, "width": width, "inner": inner} for width, inner in META_WIDTHS.values()
    ],
}


class Clock:
    """Wall and processor seconds of named pieces of work, each after a barrier."""

    def __init__(self) -> None:
        self.taken: dict[str, list[tuple[float, float]]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        yield
        taken = time.perf_counter() - wall, time.process_time() - processor
        self.taken.setdefault(name, []).append(taken)

    def medians(self, place: Place) -> dict[str, float]:
        """Returns `NAME_s` of the slowest rank and `NAME_processor_s`, the mean of all ranks. Collective."""
        found = {}
        for name, times in self.taken.items():
            every = gather([list(pair) for pair in times], place)  # [ranks, times, 2]
            found[f"{name}_s"] = statistics.median(every[..., 0].amax(0).tolist())
            found[f"{name}_processor_s"] = statistics.median(every[..., 1].mean(0).tolist())
        return found


def trained(place: Place, args: argparse.Namespace) -> Case:
    """One case of a sweep, of a model that is converted, trained, saved and loaded."""
    clock, case = Clock(), args.case
    batch = random_vectors(TOKENS, torch.Generator().manual_seed(place.rank), width=case["width"])
    torch.manual_seed(0)
    tried, plain = _model({**case, "layers": 1}), _model(case)
    first = _trainer(args.strategy, STRATEGIES[args.strategy].convert(tried, place.mesh, None))
    first.step(*batch)  # what is imported and set up once
    first.close()
    with clock("convert"):
        model = STRATEGIES[args.strategy].convert(plain, place.mesh, None)
    trainer = _trainer(args.strategy, model)
    with clock("first_step"):
        trainer.step(*batch)
    for _ in range(LATER_STEPS):
        with clock("step"):
            trainer.step(*batch)
    folder = [tempfile.mkdtemp() if place.rank == 0 else ""]  # removed below
    dist.broadcast_object_list(folder)
    with clock("save"):
        dcp.save(_state(trainer), checkpoint_id=folder[0], no_dist=False)
    with clock("load"):
        state = _state(trainer)
        dcp.load(state, checkpoint_id=folder[0])
        set_state_dict(
            trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    if place.rank == 0:
        shutil.rmtree(folder[0])
    loss = trainer.step(*batch)
    if not math.isfinite(gather(float(loss), place).mean().item()):
        raise RuntimeError(f"{args.strategy}: the loss after a checkpoint is no number")
    trainer.close()
    return {**clock.medians(place), "peak_bytes": None}


def on_meta(place: Place, args: argparse.Namespace) -> Case:
    """One case of a sweep, of a model without memory that is converted."""
    clock = Clock()
    with torch.device("meta"):
        tried, plain = _model({**args.case, "layers": 1}), _model(args.case)
    STRATEGIES[args.strategy].convert(tried, place.mesh, None)  # what is imported and compiled once
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = status_bytes("VmRSS")
    with clock("convert"):
        model = STRATEGIES[args.strategy].convert(plain, place.mesh, None)
    risen = status_bytes("VmHWM") - before
    if {parameter.device.type for parameter in model.parameters()} != {"meta"}:
        raise RuntimeError(f"{args.strategy}: expected parameters on the meta device after the conversion")
    return {**clock.medians(place), "peak_bytes": round(gather(float(risen), place).max().item())}


def _trainer(strategy: str, model: torch.nn.Module) -> Trainer:
    return Trainer.around(strategy, model, torch.device("cpu"), lr=1e-4, autocast=None)


def _model(case: Case) -> MLPStack:
    return MLPStack(blocks=case["layers"], width=case["width"], inner=case["inner"])


def _state(trainer: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optimizer": optimizer}


def measure(sweep: str, args: argparse.Namespace) -> list[Case]:
    """Returns the lines of a sweep, one for each case and strategy."""
    worker: Callable[[Place, argparse.Namespace], Case] = on_meta if sweep == "parameters" else trained
    lines = []
    for case in SWEEPS[sweep]:
        for strategy in STRATEGIES_COMPARED:
            args.case, args.strategy = case, strategy
            line = result_line(
                environment_card(torch.device("cpu"), args.command),
                benchmark="growth",
                case=f"{sweep}/{strategy}",
                sweep=sweep,
                strategy=strategy,
                shape=f"{case['layers']} x (LayerNorm, Linear {case['width']}->{case['inner']}, GELU, Linear back)",
                dtype="float32",
                direction="step",
                tokens=TOKENS,
                threads=1,
                parameters=case["layers"] * (2 * case["width"] * case["inner"] + 3 * case["width"] + case["inner"]),
                **{key: case[key] for key in ("ranks", "layers")},
                **launch(worker, args, case["ranks"]),
            )
            told = ", ".join(f"{cost} {line[f'{cost}_s']:.3f} s" for cost in COSTS if line.get(f"{cost}_s") is not None)
            print(f"{strategy:<6} {case['layers']} layers, {case['ranks']} ranks: {told}", flush=True)
            lines.append(line)
    return lines


# -- tables ------------------------------------------------------------------------------------------------------------


def last_sweeps(lines: list[Row], words: list[str]) -> list[Row]:
    """Returns the lines of the last run of each sweep, or of the sweep that `words` name; none where there is none."""
    found = []
    for sweep in words or SIZES:
        mine = [line for line in lines if line["sweep"] == sweep]
        cases = {(line["ranks"], line["layers"], line["parameters"], line["strategy"]): line for line in mine}
        found += cases.values()
    return found


def growths(lines: list[Row]) -> Iterator[tuple[Row, str, float, float]]:
    """Yields (line, cost, exponent, processor seconds) of each cost and each case but the smallest of its sweep."""
    before: dict[tuple[str, str], Row] = {}
    for line in lines:
        key = line["sweep"], line["strategy"]
        smaller, before[key] = before.get(key), line
        if smaller is None:
            continue
        size = SIZES[line["sweep"]]
        for cost in COSTS:
            name = f"{cost}_processor_s"
            if line.get(name) is not None:
                ratio = line[name] / smaller[name]
                yield line, cost, math.log(ratio) / math.log(line[size] / smaller[size]), line[name]


def _cost(name: str) -> Cell:
    def cell(row: Row) -> str | None:
        if row.get(f"{name}_s") is None:
            return None
        exponent = row.get("exponents", {}).get(name)
        grown = "" if exponent is None else f", {exponent:.2f}"
        return f"{row[f'{name}_s']:.3f} ({row[f'{name}_processor_s']:.3f}{grown})"

    return cell


GROWTH: Columns = {
    "layers": told("layers"),
    "ranks": told("ranks"),
    "parameters": number("parameters", ".2g"),
    "strategy": named,
    **{f"{heading}, s (processor, exponent)": _cost(name) for name, heading in COSTS.items()},
    "peak of the conversion, MiB": mebibytes("peak_bytes", digits=1),
}


def growth_rows(lines: list[Row], words: list[str]) -> list[Row]:
    """Returns `last_sweeps` with the exponents of each line."""
    rows = last_sweeps(lines, words)
    for row, cost, exponent, _ in growths(rows):
        row.setdefault("exponents", {})[cost] = exponent
    return rows


def _note(rows: list[Row]) -> str:
    """Returns the text below a command."""
    layers = " and ".join(dict.fromkeys(row["shape"].split(" x ")[1] for row in rows))
    return f" Layers: {layers}; {rows[0]['tokens']} tokens per rank, one thread a rank."


TABLE = Table("growth", GROWTH, growth_rows, _note, range(2))


def verdict(lines: list[Case]) -> tuple[dict[str, float], list[str]]:
    """Returns the exponents of all costs, and what is wrong with those of rtp."""
    found, wrong = {}, []
    for line, cost, exponent, processor in growths(lines):
        name = f"{line['case']} {cost} to {line['layers']} layers, {line['ranks']} ranks"
        found[name] = round(exponent, 2)
        if line["strategy"] == "rtp" and exponent > MOST and processor > LEAST:
            wrong.append(f"{name}: exponent {exponent:.2f}, at most {MOST} is expected")
    return found, wrong


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Growth over layers, ranks and parameters. See the top of the file.")
    parser.add_argument("--sweep", choices=SWEEPS, action="append", help="default: all")
    parser.add_argument("--check", action="store_true", help="measure nothing: judge the recorded sweeps")
    add_output_options(parser)
    parser.set_defaults(device="cpu", threads=1)
    args = parser.parse_args(argv)
    complete_output(args, "growth", parser.error)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, most), most))
    if args.check:
        lines = last_sweeps(read_lines(args.output), [])
    else:
        lines = [line for sweep in args.sweep or SWEEPS for line in measure(sweep, args)]
        for line in lines:
            append_line(args.output, line)
    exponents, wrong = verdict(lines)
    print(json.dumps({"exponents": exponents, "superlinear": wrong}), flush=True)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
