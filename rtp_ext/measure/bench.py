"""A short benchmark of this machine: hidden and exposed communication, and the time of a training step.

It times one linear layer, forward and backward, at several numbers of tokens, as in `measure.metrics`. With real ranks
it then trains a small MLP by rotation, `fully_shard` and DDP in turns. Ranks are GPUs if there are two or more; one GPU
emulates a ring of four, whose hops are copies within it; without GPUs there are two processes over shared memory.
Every result is compared with the plain layer before it is timed, and the losses of all strategies with each other.
"""

from __future__ import annotations

import itertools
import os
import pickle
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from rtp_ext._native import RotationError
from rtp_ext.convert import fully_rotate, ring_of
from rtp_ext.host import cores, cpu_name
from rtp_ext.measure.layer import TimedLayer, layer_times, together
from rtp_ext.measure.overlap_metrics import Times, metrics
from rtp_ext.measure.timing import settle_memory, timed
from rtp_ext.options import check_gradients, check_travel
from rtp_ext.ring import Ring

__all__ = ["Plan", "choose", "run", "verdict"]

FREE = 1.05  # rotation counts as free if it takes less than this times one whole GEMM
MOST_RANKS_PER_CORE = 16
NOISE = 3  # hops must take more than this times the noise for a measure of hidden communication
LOSS_TOLERANCES = {"float32": 1e-4, "bfloat16": 2.0**-6, "int8": 2.0**-4}
STRATEGIES = ("rtp", "fully_shard", "DDP")
TRAIN_STEPS, TRAIN_WARMUP = 6, 2
WAIT = timedelta(minutes=2)
FAILURES = (RotationError, mp.ProcessRaisedException, mp.ProcessExitedException)


@dataclass(frozen=True)
class Plan:
    """Settings of the benchmark. `rows` and `columns` belong to the weight; `width`, `inner`, `batch` to the MLP."""

    device: str
    ranks: int
    emulated: bool
    tokens: tuple[int, ...]
    seconds: float  # minimal time for each quantity
    rows: int
    columns: int
    dtype: torch.dtype
    width: int
    inner: int
    batch: int
    travel: str | None = None
    gradient_route: str | None = None  # None: the ring's default
    gradient_travel: str | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def ways(self) -> dict[str, Any]:
        """Keyword arguments of the ring besides its ranks."""
        requested = {name: getattr(self, name) for name in ("travel", "gradient_route", "gradient_travel")}
        return {name: value for name, value in requested.items() if value is not None}

    @property
    def tolerance(self) -> float:
        """Relative tolerance of losses, given by the narrowest dtype that travels."""
        if "int8" in (self.travel, self.gradient_travel):
            return LOSS_TOLERANCES["int8"]
        narrow = self.travel or (self.reduce_dtype is not None and self.reduce_dtype.itemsize < 4)
        return LOSS_TOLERANCES["bfloat16" if narrow else "float32"]

    def describe(self) -> str:
        what = f"{self.ranks} ranks on {'GPUs' if self.device == 'cuda' else 'CPU'}"
        if self.emulated:
            what = f"one {'GPU' if self.device == 'cuda' else 'process'} stands for a ring of {self.ranks}"
        if self.device == "cpu" and not self.emulated and self.ranks > cores():
            what += f", which TAKE TURNS on {cores()} cores"
        what += f"; linear layer {self.columns} -> {self.rows}, {str(self.dtype)[6:]}, forward and backward"
        if self.travel:
            what += f"; weights travel in {self.travel}"
        if self.gradient_travel or self.reduce_dtype:
            what += f"; gradients in {self.gradient_travel or str(self.reduce_dtype)[6:]}"
        return what + (f", route {self.gradient_route}" if self.gradient_route else "")


def choose(
    *,
    ranks: int | None = None,
    tokens: Sequence[int] | None = None,
    seconds: float | None = None,
    device: str | None = None,
    gpus: int | None = None,
    travel: str | None = None,
    gradient_route: str | None = None,
    gradient_travel: str | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Plan:
    """Returns the plan for this machine.

    gpus: their number (default: torch.cuda.device_count()). travel, gradient_route, gradient_travel: arguments of Ring.
    reduce_dtype: argument of a mixed-precision policy. Raises ValueError for settings that this machine cannot measure.
    """
    found = gpus if gpus is not None else torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = device or ("cuda" if found else "cpu")
    if kind == "cuda" and not found:
        raise ValueError("bench: expected a GPU for device cuda, found none")
    emulated = kind == "cuda" and found == 1
    rows, columns = (14336, 4096) if kind == "cuda" else (4096, 1024)
    most = next(size for size in range(found, 0, -1) if rows % size == 0) if kind == "cuda" else 2
    size = ranks if ranks is not None else 4 if emulated else most
    chosen = tuple(tokens or ((512, 1024, 2048, 4096, 8192) if kind == "cuda" else (32, 256, 1024)))
    least = seconds if seconds is not None else 1.0 if kind == "cpu" else 0.2
    if size < 2 or rows % size:
        raise ValueError(f"bench: expected at least 2 ranks, which divide {rows} rows, got {size}")
    if kind == "cuda" and not emulated and size > found:
        raise ValueError(f"bench: {size} ranks need as many GPUs, this machine has {found}")
    if min(chosen) < 1 or not 0 <= least <= 10:
        raise ValueError(f"bench: expected tokens of at least 1 and 0 to 10 seconds, got {chosen}, {least}")
    if kind == "cpu" and size > MOST_RANKS_PER_CORE * cores():
        raise ValueError(f"bench: expected at most {MOST_RANKS_PER_CORE} ranks for each of {cores()} cores, got {size}")
    check_travel(travel, "auto")
    check_gradients("Ring", gradient_route or "auto", gradient_travel, "auto", None)
    if gradient_travel is not None or (emulated and gradient_route == "auto"):
        gradient_route = "direct" if gradient_travel is not None else None
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    width, inner, batch = (4096, 14336, 2048) if kind == "cuda" else (512, 2048, 256)
    ways = (travel, gradient_route, gradient_travel, reduce_dtype)
    return Plan(kind, size, emulated, tuple(sorted(chosen)), least, rows, columns, dtype, width, inner, batch, *ways)


# -- a model -----------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x)


def _converted(strategy: str, mesh: Any, plan: Plan) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(_Block(plan.width, plan.inner) for _ in range(2))).to(plan.device)
    if strategy == "rtp":
        return fully_rotate(
            model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=plan.reduce_dtype), **plan.ways
        )
    if strategy == "DDP":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _kept_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of parameters, gradients and optimizer state on this rank."""
    tensors = [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]
    tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _train(ring: Ring, mesh: Any, plan: Plan) -> dict[str, dict[str, float]]:
    """Returns median milliseconds of a step and kept bytes by strategy. Raises RotationError if losses disagree."""
    generator = torch.Generator().manual_seed(ring.rank)
    x, target = (torch.randn(plan.batch, plan.width, generator=generator).to(plan.device) for _ in range(2))
    models = {name: _converted(name, mesh, plan) for name in STRATEGIES}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}
    taken: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    losses: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    ranks = together(ring)
    orders = list(itertools.permutations(STRATEGIES))  # each strategy follows each other one equally often
    for number in range(TRAIN_WARMUP + TRAIN_STEPS):
        for name in orders[number % len(orders)]:

            def step(name: str = name) -> None:
                optimizers[name].zero_grad()
                loss = mse_loss(models[name](x), target)
                loss.backward()
                optimizers[name].step()
                losses[name].append(loss.item())

            (microseconds,) = timed(step, ranks)
            if number >= TRAIN_WARMUP:
                taken[name].append(microseconds)
    found = {}
    for name in STRATEGIES:
        slowest = map(max, zip(*ring.exchange(taken[name]), strict=True))
        kept = max(ring.exchange(_kept_bytes(models[name], optimizers[name])))
        found[name] = {"step_ms": statistics.median(slowest) / 1e3, "kept_bytes": kept}
    check_losses(losses, plan.tolerance)
    ring_of(models["rtp"]).close()
    return found


def check_losses(losses: dict[str, list[float]], tolerance: float = LOSS_TOLERANCES["float32"]) -> None:
    """Raises RotationError if the losses of two strategies differ at any step."""
    for step, values in enumerate(zip(*losses.values(), strict=True)):
        if not all(abs(value - values[0]) <= tolerance * abs(values[0]) for value in values):  # NaN is not
            found_text = ", ".join(f"{name} {value:.6f}" for name, value in zip(losses, values, strict=True))
            raise RotationError(f"bench: expected equal losses at step {step}, got {found_text}")


# -- ranks -------------------------------------------------------------------------------------------------------------


def measure(plan: Plan, mesh: Any) -> dict[str, Any]:
    """Measures on one rank; `mesh` is None for an emulated ring. See `run`. Collective."""
    if mesh is None:
        ring = Ring.emulated(plan.ranks, device=plan.device, prefetch=False, **plan.ways)
    else:
        ring = Ring(mesh, prefetch=False, **plan.ways)
    ring.slot_cap = 0
    ring.gate.link = None  # measures rotation itself: without a link the RoutePlanner chooses no other route
    try:
        measured = {tokens: layer_times(_layer(ring, plan, tokens), plan.seconds) for tokens in plan.tokens}
        return {
            "transport": ring.link or ring.transport,
            "backend": None if mesh is None else dist.get_backend(),
            "layers": {tokens: times for tokens, (times, _) in measured.items()},
            "noise": {tokens: noise for tokens, (_, noise) in measured.items()},
            "training": None if mesh is None else _train(ring, mesh, plan),
        }
    finally:
        ring.close()


def _layer(ring: Ring, plan: Plan, tokens: int) -> TimedLayer:
    return TimedLayer(ring, plan.rows, plan.columns, tokens, plan.dtype, reduce_dtype=plan.reduce_dtype)


def _rank(rank: int, plan: Plan, folder: str) -> None:
    if plan.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        available = sorted(os.sched_getaffinity(0))
        each = max(1, len(available) // plan.ranks)
        os.sched_setaffinity(0, [available[(rank * each + core) % len(available)] for core in range(each)])
        torch.set_num_threads(each)
        settle_memory()
    backend = "nccl" if plan.device == "cuda" else "gloo"
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=plan.ranks, timeout=WAIT)
    try:
        found = measure(plan, init_device_mesh(plan.device, (plan.ranks,)))
        if rank == 0:
            Path(folder, "found").write_bytes(pickle.dumps(found))
    finally:
        dist.destroy_process_group()
    os._exit(0)  # Gloo's threads may still free tensors and need the interpreter: its shutdown would abort


def run(plan: Plan) -> dict[str, Any]:
    """Starts the ranks and returns the results.

    Keys: `transport`; `backend`; `layers` (Times by tokens); `noise` (microseconds by tokens, between the 20th and 80th
    percentile); `training` (`step_ms` and `kept_bytes` by strategy, None for an emulated ring).

    Raises one of FAILURES for a wrong result or a failed rank.
    """
    if plan.emulated:
        return measure(plan, None)
    with tempfile.TemporaryDirectory(prefix="rtp_bench_") as folder:
        mp.spawn(_rank, (plan, folder), nprocs=plan.ranks)
        return pickle.loads(Path(folder, "found").read_bytes())


# -- report ------------------------------------------------------------------------------------------------------------


def machine(device: str) -> str:
    """Returns the hardware of this process, the version of torch and the date."""
    name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if device == "cuda" else cpu_name()
    return f"{name}, {cores()} cores, torch {torch.__version__}, {datetime.now():%Y-%m-%d}"


def table(plan: Plan, found: dict[str, Any]) -> str:
    names = ("tokens", "one GEMM", "shard GEMMs", "hops", "rotated", "fetch first", "hidden", "exposed", "of one GEMM")
    lines = [
        machine(plan.device),
        plan.describe(),
        f"over {found['transport']}; milliseconds, medians of the slowest rank",
        "",
    ]
    lines.append("".join(f"{name:>13}" for name in names))
    for tokens, times in found["layers"].items():
        said = metrics(times, one_stream=False)
        e_hide = _hidden(times, found["noise"][tokens])
        hidden = "-" if said["e_hide"] is None else "cannot tell" if e_hide is None else f"{e_hide:.0%}"
        microseconds = (times.t_g1, times.t_gr, times.t_c, times.t_ov, times.t_base)
        cells = [str(tokens), *(f"{value / 1e3:.3f}" for value in microseconds), hidden]
        lines.append("".join(f"{cell:>13}" for cell in [*cells, f"{_exposed(times):.3f}", f"{_cost(times):.2f}"]))
    if found["training"] is not None:
        lines += [
            "",
            f"training 2 blocks of {plan.width} -> {plan.inner} -> {plan.width}, {plan.batch} tokens per rank, "
            f"float32; rtp over {found['transport']}, the others over {found['backend']}",
        ]
        for name, found_text in found["training"].items():
            lines.append(
                f"{name:>13}{found_text['step_ms']:>10.1f} ms a step{found_text['kept_bytes'] / 2**20:>10.1f} MiB kept"
            )
    return "\n".join(lines)


def to_dict(plan: Plan, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings, the results of `run` and the verdict as values for JSON; times in microseconds."""
    settings = {
        name: str(value)[6:] if isinstance(value, torch.dtype) else value for name, value in asdict(plan).items()
    }
    layers = {tokens: asdict(times) for tokens, times in found["layers"].items()}
    return {
        "machine": machine(plan.device),
        "settings": settings,
        **found,
        "layers": layers,
        "verdict": verdict(plan, found),
    }


def _exposed(times: Times) -> float:
    return (times.t_ov - times.t_gr) / 1e3


def _cost(times: Times) -> float:
    return times.t_ov / times.t_g1


def _distinguishable(times: Times, noise: float) -> bool:
    """Returns whether times with a noise of `noise` microseconds decide if rotation is free."""
    return noise <= abs(times.t_ov - FREE * times.t_g1)


def _hidden(times: Times, noise: float) -> float | None:
    """Returns the hidden share of the hops, at most 1; None where a noise of `noise` microseconds exceeds it: the
    smaller of products and hops is not well above the noise, or more seems hidden than there is."""
    e_hide = metrics(times, one_stream=False)["e_hide"]
    if e_hide is None or NOISE * noise >= min(times.t_c, times.t_gr) or e_hide > 1 + 1 / NOISE:
        return None
    return min(e_hide, 1.0)


def free_from(layers: dict[int, Times], noise: dict[int, float]) -> int | None:
    """Returns the smallest measured number of tokens from which on rotation is free; None if it never is."""
    first = None
    for tokens in sorted(layers, reverse=True):
        if _cost(layers[tokens]) > FREE or not _distinguishable(layers[tokens], noise[tokens]):
            break
        first = tokens
    return first


def verdict(plan: Plan, found: dict[str, Any]) -> str:
    """Returns one paragraph: hidden and exposed communication, and the number of tokens from which rotation is free."""
    most = max(found["layers"])
    times = found["layers"][most]
    e_hide = _hidden(times, found["noise"][most])
    noise, rotated = found["noise"][most] / 1e3, times.t_ov / 1e3
    text = f"verdict: at {most} tokens "
    if e_hide is None:
        text += f"the hops alone take {times.t_c / 1e3:.2f} ms and a rotation {rotated:.2f} ms, but times varied by "
        text += f"{noise:.2f} ms: the hidden share cannot be told. "
    else:
        hidden = f"{e_hide:.0%} of what can be hidden of the" if e_hide > 0 else "no"
        exposed = max(0.0, _exposed(times))
        text += f"{hidden} communication is hidden; {exposed:.2f} ms of {rotated:.2f} ms are exposed. "
    first = free_from(found["layers"], found["noise"])
    if not _distinguishable(times, found["noise"][most]):
        text += f"Whether rotation is free (within {FREE - 1:.0%} of one whole GEMM) cannot be told: it took "
        text += f"{_cost(times):.2f} times one, and times varied by {noise:.2f} ms."
    elif first is None:
        text += (
            f"Rotation is not free here up to {most} tokens: it takes {_cost(times):.2f} times one whole GEMM there."
        )
    else:
        text += f"Rotation is free here (within {FREE - 1:.0%} of one whole GEMM) from {first} tokens on."
    if found["training"] is None:
        return f"{text} One {plan.device} stood for the ring: nothing crossed a link, and nothing was trained."
    steps = {name: found_text["step_ms"] for name, found_text in found["training"].items()}
    ratios = " and ".join(f"{steps['rtp'] / steps[name]:.2f} of {name}'s" for name in ("fully_shard", "DDP"))
    others = "" if found["backend"] == found["transport"] else f", which go over {found['backend']}"
    return f"{text} A training step over {found['transport']} takes {ratios}{others}."
