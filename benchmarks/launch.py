"""Starts the ranks of a benchmark: under torchrun, or as plain `python`, which then starts the local ranks itself."""

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Place:
    """Where one rank runs. `mesh` is one-dimensional and spans all ranks."""

    rank: int
    ranks: int
    device: torch.device
    mesh: DeviceMesh


Worker = Callable[[Place, argparse.Namespace], None]


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(worker: Worker, args: argparse.Namespace, ranks: int) -> None:
    """Runs `worker(place, args)` on every rank and returns when all of them have ended.

    Args:
        worker: a function at module level, since local ranks are started by spawning.
        args: reads `device` (auto, cpu, cuda) and `threads` (per rank, on CPU; 0 divides the cores among the ranks).
        ranks: number of processes. Under torchrun it must equal the world size.

    Raises:
        ValueError: the number of ranks does not fit torchrun's world size or the GPUs of this machine.
        torch.multiprocessing.ProcessRaisedException: a rank failed; its traceback is the message.
    """
    if under_torchrun():
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size != ranks:
            raise ValueError(f"this run needs {ranks} processes, torchrun started {world_size}")
        local_rank = int(os.environ["LOCAL_RANK"])
        _run(int(os.environ["RANK"]), local_rank, worker, args, ranks, "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        if ranks == 1:
            _run(0, 0, worker, args, 1, rendezvous)
        else:
            mp.spawn(_run_spawned, (worker, args, ranks, rendezvous), nprocs=ranks)


def _run_spawned(rank: int, worker: Worker, args: argparse.Namespace, ranks: int, rendezvous: str) -> None:
    _run(rank, rank, worker, args, ranks, rendezvous)


def _run(rank: int, local_rank: int, worker: Worker, args: argparse.Namespace, ranks: int, rendezvous: str) -> None:
    device = _device(args.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(args.threads or max(1, cores() // ranks))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("rtp",))
        worker(Place(rank, ranks, device, mesh), args)
    finally:
        dist.destroy_process_group()


def _device(kind: str, local_rank: int) -> torch.device:
    gpus = torch.cuda.device_count()
    if kind == "cpu" or (kind == "auto" and gpus == 0):
        return torch.device("cpu")
    if local_rank >= gpus:
        raise ValueError(f"local rank {local_rank} has no GPU: this machine has {gpus} (use --device cpu)")
    return torch.device("cuda", local_rank)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads per rank (0: the cores divided among the ranks)"
    )


def gather(value: float | list[float] | list[int], place: Place) -> torch.Tensor:
    """Values of all ranks, float64, [ranks, *shape of value], on the CPU."""
    mine = torch.tensor(value, dtype=torch.float64, device=place.device)
    everyone = [torch.empty_like(mine) for _ in range(place.ranks)]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).cpu()
