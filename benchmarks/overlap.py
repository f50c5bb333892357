"""How much of the communication of a rotated linear layer is hidden under its GEMMs, and where the rest goes.

    python benchmarks/overlap.py                                     # GPU: emulated ring; CPU: two ranks over shm
    python benchmarks/overlap.py --link ce-local --budget 500
    python benchmarks/overlap.py --link nccl-self:1,nccl-self:4,nccl-self:16 --shapes llama3-8b
    python benchmarks/overlap.py --device cpu --transport c10d --tokens 128
    torchrun --nproc-per-node 8 benchmarks/overlap.py --ring real --ranks 8
    python benchmarks/overlap.py --hosts 2 --rate 2gbit --shapes cpu-4k --tokens 512

Definitions of the quantities: rtp_ext/measure/layer.py; formulas: rtp_ext/measure/overlap_metrics.py; shapes and order:
and options: shared/overlap_options.py.

On one GPU the ring is *emulated*: one process runs the exact timeline of one rank with real copies over `--link`, and
each owner's shard is a separate tensor. No data crosses NVLink. With `--ring real` every rank is a process; on a CPU
each is pinned to its own cores, which its communication threads share with its GEMMs: a rank with one core can hide
only copies that need no core. (`cores_per_rank` is the number of cores.) With `--hosts` the ranks run on made hosts
on this machine (shared/hosts.py; needs root), where a hop needs little of a core; `sent_bytes` is the kernel's count of
the bytes that leave a host in a pass, and `closed_form_bytes` the expected count.

Results are checked against float64 before anything is timed; a wrong one ends the run. `--graph` times replays of CUDA
graphs instead of single launches. A case that the results file holds already for this commit and link is skipped,
unless --again. Every case is printed as median (p20-p80) over the iterations of the slowest rank, appended to
results/<machine>/overlap.jsonl as one JSON line, and the last line of stdout is JSON.

Keys `model_*` of a GPU's line are no measurement: the timeline of the schedule at 370 GB/s with the measured GEMMs.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from shared.card import append_line, environment_card, gpu_state, result_line
from shared.launch import Place, everyones, is_first, launch, together
from shared.overlap_options import PASSES, Case, identity, measured, parse_arguments
from shared.recording import record
from shared.strategies import DTYPES
from shared.wire import Counter

import rtp_ext
from rtp_ext.measure.layer import TimedLayer
from rtp_ext.measure.overlap_metrics import Times, metrics, model
from rtp_ext.measure.timing import Sample, samples

PLAIN = "sm-local"  # what an emulated ring on a GPU is without a choice
QUANTITIES = ("g1", "gr", "c", "ov", "base")
STEADY = 1.2  # p80 over p20 of any quantity, above which differences of times say little
PIECES_TIMED = 5  # passes that are timed GEMM by GEMM
PARTS = {"forward": 1, "backward": 2}  # what travels: the weight, and its gradient


class Bench:
    """The cases of one link (emulated ring) or one number of NCCL's CTAs (real ring) on one rank.

    `g1`: the GEMM times measured so far, by shape, tokens and direction: on a GPU each is measured once.
    """

    def __init__(
        self,
        place: Place,
        args: argparse.Namespace,
        card: dict[str, Any],
        variant: Any,
        g1: dict[tuple[str, int, str], Sample],
    ) -> None:
        self.place, self.args, self.card, self._g1 = place, args, card, g1
        self.link = variant if args.ring == "emulated" else None
        self.max_ctas = variant if args.ring == "real" else None
        self.first = place.rank == 0
        self.rows: list[dict[str, Any]] = []
        self.left: list[str] = []
        self._ring: rtp_ext.Ring | None = None
        self._layer: tuple[tuple, TimedLayer] | None = None
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
            if self.args.trace:
                self.trace(case, ring, row)
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
            # nothing is prefetched: there is no layer before, under which the first hop could hide
            self._ring = rtp_ext.Ring.emulated(ranks, device=self.place.device, link=self.link, prefetch=0)
        else:
            more = {} if self.max_ctas is None else {"transport_options": {"max_ctas": self.max_ctas}}
            self._ring = rtp_ext.Ring(self.place.mesh, transport=self.args.transport, route=self.args.route, **more)
            if self._ring.transport != "shm":
                self._group = dist.new_group()
        if self.args.slot_cap is not None:
            self._ring.slot_cap = self.args.slot_cap
        return self._ring

    def layer(self, case: Case, ring: rtp_ext.Ring) -> TimedLayer:
        if self._layer is None or self._layer[0] != case.layer:
            self._layer = None  # frees the last one first
            ring.clear_slots()
            if self.place.device.type == "cuda":
                torch.cuda.empty_cache()
            self._layer = case.layer, TimedLayer(ring, case.n, case.k, case.tokens, DTYPES[self.args.dtype])
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
        taken = self.quantities(case, layer)
        state = gpu_state() if self.place.device.type == "cuda" else {}
        gemms = self.gemms(layer, passes)
        times = Times(*(taken[name].median for name in QUANTITIES), sum(gemms.values()))
        two_lanes = any(layer.two_lanes(pass_) for pass_ in passes)
        row = self.line(case, ring) | metrics(times, one_stream=not two_lanes)
        row |= {"two_lanes": two_lanes, "gradient_halves": layer.halves}
        for name, each in taken.items():
            row |= {f"t_{name}_us": each.median, f"t_{name}_p20_us": each.p20, f"t_{name}_p80_us": each.p80}
        row |= {"spread": max(each.p80 / each.p20 for each in taken.values())}
        ov = taken["ov"]
        row |= {"t_gemm_ov_us": times.t_gemm_ov, "iterations": ov.count, "seconds": self.args.seconds}
        row |= {"base": "hops" if self._group is None else "all_gather", "pieces": len(layer.chunks())}
        if case.direction == "step":
            row |= {"step_ms": ov.median / 1e3}
        shard = layer.shard.numel()
        bytes_ = shard * layer.dtype.itemsize, shard * layer.gradient_dtype.itemsize
        row |= {"weight_hop_bytes": bytes_[0], "gradient_hop_bytes": bytes_[1]}
        row |= {"slot_bytes": sum(ring.slot_count(channel).peak_bytes for channel in ("weight", "gradient"))}
        row |= {"tflops": self.tflops(case, taken["g1"].median), "threads": torch.get_num_threads()}
        row |= {"cores_per_rank": self.args.cores_per_rank, "cores_shared": self.args.cores_shared}
        row |= state
        row |= {"closed_form_bytes": (case.ranks - 1) * sum(sum(bytes_[: PARTS[pass_]]) for pass_ in passes)}
        if self.args.network is not None:
            row |= {"sent_bytes": self.sent(case, layer)}
        if self.place.device.type == "cuda":
            row |= model(case.ranks, self.products(layer, passes), times.t_g1, *bytes_)
        return row

    def sent(self, case: Case, layer: TimedLayer) -> float:
        """Bytes that leave a host in one pass or step, of the host that sends most."""
        action, counts = self.action("ov", case.direction, layer), []
        for _ in range(PIECES_TIMED):
            dist.barrier()
            counter = Counter()
            counter.start()
            action()
            counts += counter.stop()
        return Sample.of(everyones(counts, self.place)).median

    def trace(self, case: Case, ring: rtp_ext.Ring, row: dict[str, Any]) -> None:
        layer = self.layer(case, ring)
        action = self.action("ov", case.direction, layer)
        action()
        several = len(self.args.all_cases) * len(self.args.links or self.args.max_ctas or [None]) > 1
        variant = self.link if self.max_ctas is None else f"{self.max_ctas} CTAs"
        name = f"{case.name} {variant or ''}" if several else ""
        record(ring, action, self.args.trace, name, f"{case.name}, {ring.transport} {row['link'] or ''}")

    @staticmethod
    def tflops(case: Case, t_g1: float) -> float:
        products = sum({"forward": 1, "backward": 2}[pass_] for pass_ in PASSES[case.direction])
        return 2 * products * case.n * case.k * case.tokens / t_g1 / 1e6

    def quantities(self, case: Case, layer: TimedLayer) -> dict[str, Sample]:
        key = case.shape, case.tokens, case.direction
        known = {"g1": self._g1[key]} if key in self._g1 and self.place.device.type == "cuda" else {}
        actions = {name: self.action(name, case.direction, layer) for name in QUANTITIES if name not in known}
        taken = (
            samples(actions, together(self.place), seconds=self.args.seconds, iterations=self.args.iterations) | known
        )
        self._g1[key] = taken["g1"]
        return {name: taken[name] for name in QUANTITIES}

    def action(self, name: str, direction: str, layer: TimedLayer) -> Callable[[], object]:
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

    def gemms(self, layer: TimedLayer, passes: tuple[str, ...]) -> dict[str, float]:
        """Median time of all GEMMs of each kind while hops are under way, of the slowest rank."""
        runs = [[layer.timed_pass(pass_) for pass_ in passes] for _ in range(PIECES_TIMED + 1)][1:]
        flat = [{kind: taken for part in run for kind, taken in part.items()} for run in runs]
        return {kind: Sample.of(everyones([run[kind] for run in flat], self.place)).median for kind in flat[0]}

    def products(self, layer: TimedLayer, passes: tuple[str, ...]) -> dict[str, dict[str, float]]:
        """The time of one shard GEMM of each kind, without hops: what the model is made of."""
        kinds = {"forward": ("forward",), "backward": ("dgrad", "wgrad")}
        actions = {
            f"{pass_} {kind}": lambda p=pass_, k=kind: layer.gr(p, k) for pass_ in passes for kind in kinds[pass_]
        }
        short = {"seconds": self.args.seconds / 3, "iterations": max(1, self.args.iterations // 2)}
        taken = samples(actions, together(self.place), **short)
        return {
            pass_: {kind: taken[f"{pass_} {kind}"].median / layer.ring.size for kind in kinds[pass_]}
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
    """Runs one rank's part of all cases of one ring size."""
    card = environment_card(place.device, args.command)
    if place.rank == 0:
        told = {key: card.get(key) for key in ("device", "gpus", "cores", "driver", "cuda", "torch", "nccl", "commit")}
        print(", ".join(f"{key} {value}" for key, value in told.items() if value is not None), flush=True)
    if place.device.type == "cpu" and place.ranks > 1:
        pin(place, args)
    rows, left, g1 = [], [], {}
    for variant in args.links or args.max_ctas or [None]:
        bench = Bench(place, args, card, variant, g1)
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
    if args.cores_per_rank and args.network is None:  # a made host has its own already
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
    lost = {name: row[f"loss_{name}_us"] for name in ("split", "interference", "exposed")}
    losses = ", ".join(f"{name} {value:.0f}" for name, value in lost.items() if value is not None)
    unsteady = f"  UNSTEADY: p80 is {row['spread']:.1f} times p20" if row["spread"] > STEADY else ""
    streams = " two streams" if row["two_lanes"] else ""
    print(
        f"{row['case']} {link}{ctas}{' graph' if row['graph'] else ''}{streams}\n"
        f"    us: {'  '.join(spread(name) for name in QUANTITIES)}\n"
        f"    {ratio('e_hide')}  {ratio('roofline')}  {ratio('e_ect')}  {row['ceiling_percent']:.0f} % of ceiling  "
        f"loss us: {losses}  {row['tflops']:.3g} TFLOP/s in g1{unsteady}",
        flush=True,
    )
    if "model_t_ov_us" in row:
        print(
            f"    model, no measurement, {row['model_link_gbps']:.0f} GB/s: ov {row['model_t_ov_us']:.0f} to "
            f"{row['model_t_ov_shared_us']:.0f} us, {ratio('model_roofline')}",
            flush=True,
        )


def main() -> None:
    args = parse_arguments()
    results: dict[str, Any] = {"rows": [], "left": []}
    if is_first():
        print(f"{args.ring} ring, {args.dtype}, at least {args.seconds} s and {args.iterations} iterations a quantity")
    if args.ring == "emulated":
        device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
        results = run_cases(Place(0, 1, device, None), args)
    else:
        sizes = sorted({case.ranks for case in args.all_cases}, reverse=True)
        for ranks, network in itertools.product(sizes, args.networks or [None]):
            args.cases, args.network = [case for case in args.all_cases if case.ranks == ranks], network
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
