"""How much of the communication of a rotated linear layer is hidden under its GEMMs, and where the rest goes.

    python benchmarks/overlap.py                                     # GPU: emulated ring; CPU: two ranks over shm
    python benchmarks/overlap.py --link ce-local --budget 500
    python benchmarks/overlap.py --link nccl-self:1,nccl-self:4,nccl-self:16 --shapes llama3-8b
    python benchmarks/overlap.py --device cpu --transport c10d --tokens 128
    torchrun --nproc-per-node 8 benchmarks/overlap.py --ring real --ranks 8

What each quantity is: overlap_layer.py; formulas: overlap_metrics.py; shapes and order: overlap_cases.py.

On one GPU the ring is *emulated*: one process runs one rank's exact timeline with real copies over `--link`, and every
owner's shard is its own. Nothing crosses NVLink. With `--ring real` every rank is a process; on a CPU each is pinned to
its own cores, which its communication threads share with its GEMMs: where a rank has one core, only copies that need
no core can be hidden. (`cores_per_rank` says how many it had.)

Results are checked against float64 before anything is timed; a wrong one ends the run. `--graph` times replays of CUDA
graphs instead of single launches. A case that the results file holds already for this commit and link is skipped,
unless --again. Every case is printed as median (p20-p80) over the iterations of the slowest rank, appended to
results/<machine>/overlap.jsonl as one JSON line, and the last line of stdout is JSON.

Keys `model_*` of a GPU's line are no measurement: the timeline of the schedule at 370 GB/s with the measured GEMMs.
"""

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from card import RESULTS, append_line, command_line, environment_card, machine_name, result_line
from launch import Place, add_launch_options, cores, is_first, launch, under_torchrun
from overlap_cases import DIRECTIONS, PASSES, SHAPES, Case, cpu_cases, gpu_cases, grid, identity, measured
from overlap_layer import Layer, make_emulated
from overlap_metrics import Times, metrics, model
from strategies import DTYPES
from timing import Sample, everyones, gpu_state, sample

import rtp_ext

LINKS = r"ce-local(:[124])?|sm-local|nccl-self(:[1-9]\d*)?|pcie"  # a number: of streams, of CTAs
PLAIN = "sm-local"  # what an emulated ring on a GPU is without a choice
QUANTITIES = ("g1", "gr", "c", "ov", "base")
PIECES_TIMED = 5  # passes that are timed GEMM by GEMM


class Bench:
    """The cases of one link (emulated ring) or one number of NCCL's CTAs (real ring) on one rank."""

    def __init__(self, place: Place, args: argparse.Namespace, card: dict[str, Any], variant: Any) -> None:
        self.place, self.args, self.card = place, args, card
        self.link = variant if args.ring == "emulated" else None
        self.max_ctas = variant if args.ring == "real" else None
        self.first = place.rank == 0
        self.rows: list[dict[str, Any]] = []
        self.left: list[str] = []
        self._g1: dict[tuple[str, int, str], Sample] = {}
        self._ring: rtp_ext.Ring | None = None
        self._layer: tuple[tuple, Layer] | None = None
        self._group: dist.ProcessGroup | None = None

    def run(self, cases: list[Case]) -> None:
        done = set() if self.args.again else measured(self.args.output)
        longest = 0.0
        for number, case in enumerate(cases):
            ring = self.ring(case.ranks)
            if identity(self.line(case, ring)) in done:
                self.say(f"{case.name}: measured already at this commit (--again measures it anew)")
                continue
            started = time.monotonic()
            left = self.args.deadline - started
            if everyones([left], self.place).min().item() < longest:
                self.left = [case.name for case in cases[number:]]
                break
            row = self.measure(case, ring)
            self.rows.append(row)
            if self.first:
                append_line(self.args.output, row)
                print_row(row)
            longest = max(longest, time.monotonic() - started)

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)

    def close(self) -> None:
        self._layer = None
        if self._ring is not None:
            self._ring.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def ring(self, ranks: int) -> rtp_ext.Ring:
        if self._ring is not None and self._ring.size == ranks:
            return self._ring
        self._layer = None
        if self._ring is not None:
            self._ring.close()
        if self.args.ring == "emulated":
            self._ring = make_emulated(ranks, self.place.device, self.link)
        else:
            more = {} if self.max_ctas is None else {"transport_options": {"max_ctas": self.max_ctas}}
            self._ring = rtp_ext.Ring(self.place.mesh, transport=self.args.transport, route=self.args.route, **more)
            if self._ring.transport != "shm":
                self._group = dist.new_group()
        if self.args.slot_cap is not None:
            self._ring.slot_cap = self.args.slot_cap
        return self._ring

    def layer(self, case: Case, ring: rtp_ext.Ring) -> Layer:
        if self._layer is None or self._layer[0] != case.layer:
            self._layer = None  # frees the last one first
            ring.clear_slots()
            if self.place.device.type == "cuda":
                torch.cuda.empty_cache()
            self._layer = case.layer, Layer(ring, case.n, case.k, case.tokens, DTYPES[self.args.dtype])
        return self._layer[1]

    def line(self, case: Case, ring: rtp_ext.Ring) -> dict[str, Any]:
        """The line of a case as far as it is known before."""
        return result_line(
            self.card,
            benchmark="overlap",
            case=case.name,
            shape=case.shape,
            n=case.n,
            k=case.k,
            tokens=case.tokens,
            ranks=case.ranks,
            direction=case.direction,
            strategy="rtp",
            transport=ring.transport,
            link=self.link or (PLAIN if self.args.ring == "emulated" and self.args.device == "cuda" else None),
            route=ring.route,
            dtype=self.args.dtype,
            graph=self.args.graph,
            max_ctas=self.max_ctas,
            slot_cap=ring.slot_cap,
        )

    def measure(self, case: Case, ring: rtp_ext.Ring) -> dict[str, Any]:
        layer = self.layer(case, ring)
        passes = PASSES[case.direction]
        layer.check(case.direction)
        layer.check_hops(passes)
        samples = {name: self.quantity(name, case, layer) for name in QUANTITIES}
        state = gpu_state() if self.place.device.type == "cuda" else {}
        gemms = self.gemms(layer, passes)
        times = Times(*(samples[name].median for name in QUANTITIES), sum(gemms.values()))
        row = self.line(case, ring) | metrics(times)
        for name, taken in samples.items():
            row |= {f"t_{name}_us": taken.median, f"t_{name}_p20_us": taken.p20, f"t_{name}_p80_us": taken.p80}
        ov = samples["ov"]
        row |= {"t_gemm_ov_us": times.t_gemm_ov, "iterations": ov.count, "seconds": self.args.seconds}
        row |= {"base": "hops" if self._group is None else "all_gather", "pieces": len(layer.pieces())}
        if case.direction == "step":
            row |= {"step_ms": ov.median / 1e3}
        shard = layer.shard.numel()
        bytes_ = shard * layer.dtype.itemsize, shard * layer.gradient_dtype.itemsize
        row |= {"weight_hop_bytes": bytes_[0], "gradient_hop_bytes": bytes_[1]}
        row |= {"slot_bytes": sum(ring.slot_count(channel).peak_bytes for channel in ("weight", "gradient"))}
        row |= {"tflops": self.tflops(case, samples["g1"].median), "threads": torch.get_num_threads()}
        row |= {"cores_per_rank": self.args.cores_per_rank, "cores_shared": self.args.cores_shared}
        row |= state
        if self.place.device.type == "cuda":
            row |= model(case.ranks, self.products(layer, passes), times.t_g1, *bytes_)
        return row

    @staticmethod
    def tflops(case: Case, t_g1: float) -> float:
        products = sum({"forward": 1, "backward": 2}[pass_] for pass_ in PASSES[case.direction])
        return 2 * products * case.n * case.k * case.tokens / t_g1 / 1e6

    def quantity(self, name: str, case: Case, layer: Layer) -> Sample:
        key = case.shape, case.tokens, case.direction
        if name == "g1" and key in self._g1:
            return self._g1[key]
        action = self.action(name, case.direction, layer)
        taken = sample(action, self.place, seconds=self.args.seconds, iterations=self.args.iterations)
        if name == "g1":
            self._g1[key] = taken
        return taken

    def action(self, name: str, direction: str, layer: Layer) -> Callable[[], object]:
        if name == "ov" and direction == "step":
            action: Callable[[], object] = layer.step
        else:
            one = getattr(layer, name)
            if name == "base" and self._group is not None:

                def one(pass_: str) -> None:
                    layer.base_by_collectives(pass_, self._group)

            def action() -> None:
                for pass_ in PASSES[direction]:
                    one(pass_)

        return captured(action) if self.args.graph else action

    def gemms(self, layer: Layer, passes: tuple[str, ...]) -> dict[str, float]:
        """Median time of all GEMMs of each kind while hops are under way, of the slowest rank."""
        runs = [[layer.timed_pass(pass_) for pass_ in passes] for _ in range(PIECES_TIMED + 1)][1:]
        flat = [{kind: taken for part in run for kind, taken in part.items()} for run in runs]
        return {kind: Sample.of(everyones([run[kind] for run in flat], self.place)).median for kind in flat[0]}

    def products(self, layer: Layer, passes: tuple[str, ...]) -> dict[str, dict[str, float]]:
        """The time of one shard GEMM of each kind, without hops: what the model is made of."""
        kinds = {"forward": ("forward",), "backward": ("dgrad", "wgrad")}
        short = {"seconds": self.args.seconds / 3, "iterations": max(1, self.args.iterations // 2)}
        return {
            pass_: {
                kind: sample(lambda p=pass_, k=kind: layer.gr(p, k), self.place, **short).median / layer.ring.size
                for kind in kinds[pass_]
            }
            for pass_ in passes
        }


def captured(action: Callable[[], object]) -> Callable[[], object]:
    """The action as a CUDA graph to replay, captured on the current stream."""
    for _ in range(3):
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        action()
    return graph.replay


def run_cases(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    """One rank's part of all cases of one ring size."""
    card = environment_card(place.device, args.command)
    if place.rank == 0:
        told = {key: card.get(key) for key in ("device", "gpus", "cores", "driver", "cuda", "torch", "nccl", "commit")}
        print(", ".join(f"{key} {value}" for key, value in told.items() if value is not None), flush=True)
    if place.device.type == "cpu" and place.ranks > 1:
        pin(place, args)
    rows, left = [], []
    for variant in args.links or args.max_ctas or [None]:
        bench = Bench(place, args, card, variant)
        if place.device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream(place.device)):
                bench.run(args.cases)
        else:
            bench.run(args.cases)
        bench.close()
        rows += bench.rows
        left += [name if variant is None else f"{name} {variant}" for name in bench.left]
    return {"rows": rows, "left": left}


def pin(place: Place, args: argparse.Namespace) -> None:
    """Gives this rank cores of its own, as many as every other one."""
    available = sorted(os.sched_getaffinity(0))
    if args.cores_per_rank:
        mine = available[place.rank * args.cores_per_rank :][: args.cores_per_rank]
        os.sched_setaffinity(0, mine)


def print_row(row: dict[str, Any]) -> None:
    def spread(name: str) -> str:
        low, high = row[f"t_{name}_p20_us"], row[f"t_{name}_p80_us"]
        return f"{name} {row[f't_{name}_us']:.0f} ({low:.0f}-{high:.0f})"

    def ratio(key: str) -> str:
        return f"{key} {'-' if row[key] is None else f'{row[key]:.2f}'}"

    link = row["link"] or row["transport"]
    ctas = "" if row["max_ctas"] is None else f" {row['max_ctas']} CTAs"
    losses = ", ".join(f"{name} {row[f'loss_{name}_us']:.0f}" for name in ("split", "interference", "exposed"))
    print(
        f"{row['case']} {link}{ctas}{' graph' if row['graph'] else ''}\n"
        f"    us: {'  '.join(spread(name) for name in QUANTITIES)}\n"
        f"    {ratio('e_hide')}  {ratio('roofline')}  {ratio('e_ect')}  {row['ceiling_percent']:.0f} % of ceiling  "
        f"loss us: {losses}  {row['tflops']:.3g} TFLOP/s in g1",
        flush=True,
    )
    if "model_t_ov_us" in row:
        print(
            f"    model, no measurement, {row['model_link_gbps']:.0f} GB/s: ov {row['model_t_ov_us']:.0f} to "
            f"{row['model_t_ov_shared_us']:.0f} us, {ratio('model_roofline')}",
            flush=True,
        )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark of overlap. See the top of the file.")
    add = parser.add_argument
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    names = {"type": lambda text: text.split(",")}
    add("--shapes", **names, help=f"some of {','.join(SHAPES)} (default: the standard cases)")
    add("--tokens", **numbers, help="local tokens")
    add("--ranks", **numbers, help="ring sizes")
    add("--directions", **names, default=list(DIRECTIONS))
    add("--ring", choices=("auto", "emulated", "real"), default="auto", help="auto: emulated on one GPU, real on CPU")
    add("--link", dest="links", **names, help=f"of the emulated ring on a GPU: {LINKS}; one run of all cases for each")
    add("--transport", default="auto", help="of the real ring")
    add("--route", default="auto", help="of the real ring")
    add("--max-ctas", **numbers, help="NCCL's CTAs in a real ring of GPUs, one run of all cases for each")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--slot-cap", type=int, help="bytes of a slot; 0: none (default: the ring's)")
    add("--graph", action="store_true", help="time replays of CUDA graphs")
    add("--seconds", type=float, default=0.3, help="of each quantity, at least")
    add("--iterations", type=int, default=10, help="of each quantity, at least")
    add("--budget", type=float, default=math.inf, metavar="SECONDS", help="start no case that would end later")
    add("--again", action="store_true", help="measure what the results file holds already")
    add("--share-cores", action="store_true", help="allow more CPU ranks than cores")
    add("--machine", help="folder under results/ (default: from the CPU or GPU)")
    add("--output", type=Path, metavar="FILE.jsonl", help="append the results here instead")
    add_launch_options(parser)
    args = parser.parse_args(argv)
    complete(args, parser.error)
    return args


def complete(args: argparse.Namespace, error: Callable[[str], Any]) -> None:
    """Fills in what depends on the machine; what cannot be measured is an error."""
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if args.device == "cuda" and not torch.cuda.is_available():
        error("--device cuda: no GPU is available")
    if args.ring == "auto":
        args.ring = "emulated" if on_gpu and not under_torchrun() else "real"
    for given, known, what in ((args.shapes, SHAPES, "shape"), (args.directions, DIRECTIONS, "direction")):
        for name in given or ():
            if name not in known:
                error(f"unknown {what} {name!r}, expected some of {', '.join(known)}")
    if args.iterations < 1 or not args.seconds >= 0 or not args.budget > 0:
        error("--iterations must be at least 1, --seconds at least 0 and --budget above 0")
    for name, least in (("tokens", 1), ("ranks", 2), ("max_ctas", 1)):
        if getattr(args, name) is not None and min(getattr(args, name)) < least:
            error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.links and (args.ring == "real" or not on_gpu):
        error("--link is of an emulated ring on a GPU")
    for link in args.links or ():
        if not re.fullmatch(LINKS, link):
            error(f"unknown link {link!r}, expected one of {LINKS}")
    if args.max_ctas and (args.ring == "emulated" or not on_gpu):
        error("--max-ctas is of a real ring of GPUs; an emulated one has links such as nccl-self:4")
    if args.graph and not on_gpu:
        error("--graph needs a GPU")
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    world = [int(os.environ["WORLD_SIZE"])] if under_torchrun() else None
    if args.shapes or args.tokens or args.ranks:
        defaults = (["llama3-8b"], [4096], world or [8]) if on_gpu else (["cpu-4k"], [128], world or [2])
        chosen = (
            given or default for given, default in zip((args.shapes, args.tokens, args.ranks), defaults, strict=True)
        )
        args.cases = grid(*chosen, args.directions)
    else:
        args.cases = gpu_cases(args.directions) if on_gpu else cpu_cases(args.directions)
        args.cases = [case for case in args.cases if world is None or case.ranks in world]
    if not args.cases:
        error(f"no standard case has {world[0]} ranks: choose with --shapes, --tokens")
    ranks = max(case.ranks for case in args.cases)
    for case in args.cases:
        if case.n % case.ranks:
            error(f"{case.ranks} ranks do not divide the {case.n} rows of {case.shape}")
    if args.ring == "real":
        if on_gpu and ranks > torch.cuda.device_count():
            error(f"{ranks} ranks need as many GPUs, this machine has {torch.cuda.device_count()}")
        if not on_gpu and ranks > cores() and not args.share_cores:
            error(f"{ranks} ranks would share {cores()} cores (--share-cores allows it)")
    per_rank = cores() // ranks if args.ring == "real" and not on_gpu else None
    args.cores_per_rank = per_rank
    args.cores_shared = None if per_rank is None else per_rank == 0
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    args.output = args.output or RESULTS / (args.machine or machine_name(device)) / "overlap.jsonl"
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.open("a").close()
    except OSError as problem:
        error(f"the results file cannot be written: {problem}")
    args.device = device.type
    args.command = command_line()
    args.deadline = time.monotonic() + args.budget


def main() -> None:
    args = parse_arguments()
    results: dict[str, Any] = {"rows": [], "left": []}
    if is_first():
        print(f"{args.ring} ring, {args.dtype}, at least {args.seconds} s and {args.iterations} iterations a quantity")
    if args.ring == "emulated":
        device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
        results = run_cases(Place(0, 1, device, None), args)
    else:
        all_cases = args.cases
        for ranks in sorted({case.ranks for case in all_cases}, reverse=True):
            args.cases = [case for case in all_cases if case.ranks == ranks]
            part = launch(run_cases, args, ranks)
            results = {key: results[key] + part[key] for key in results}
    if is_first():
        finish(results, args)


def finish(results: dict[str, Any], args: argparse.Namespace) -> None:
    keys = ("t_g1_us", "t_gr_us", "t_c_us", "t_ov_us", "t_base_us", "e_hide", "roofline", "e_ect", "ceiling_percent")
    cases = [{key: row[key] for key in ("case", "link", "max_ctas", *keys)} for row in results["rows"]]
    if results["left"]:
        print(f"the budget of {args.budget:.0f} s is spent; not measured: {', '.join(results['left'])}")
    print(json.dumps({"benchmark": "overlap", "measured": len(cases), "left": results["left"], "cases": cases}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
