"""Starts the ranks of a benchmark: under torchrun, or as plain `python`, which then starts the local ranks itself."""

import argparse
import atexit
import importlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rtp_ext.host import cores
from rtp_ext.measure.timing import Together, settle_memory
from shared.hosts import Hosts, dies_with_us

TIMEOUT = timedelta(minutes=30)  # one rank may train a model alone while the others wait


@dataclass(frozen=True)
class Place:
    """The place of one rank. `mesh` is one-dimensional and spans all ranks."""

    rank: int
    ranks: int
    device: torch.device
    mesh: DeviceMesh


Worker = Callable[[Place, argparse.Namespace], Any]


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first() -> bool:
    """Whether this process reports: rank 0 under torchrun, and otherwise the starting process."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def launch(worker: Worker, args: argparse.Namespace, ranks: int) -> Any:
    """Runs `worker(place, args)` on every rank and returns what rank 0 returned (under torchrun, what this rank did).

    Each call starts processes of its own, except under torchrun, whose processes and process group serve all calls.

    Args:
        worker: a function at module level, since local ranks are started by spawning.
        args: reads `device` (auto, cpu, cuda) and `threads` (per rank, on CPU; 0 divides the cores among the ranks);
            where it has a `network`, hosts are made, and the ranks run on them.
        ranks: number of processes. Under torchrun it must equal the world size.

    Raises:
        ValueError: the number of ranks does not fit torchrun's world size or the GPUs of this machine.
        torch.multiprocessing.ProcessRaisedException: a rank failed; its traceback is the message.
    """
    if getattr(args, "network", None) is not None:
        return launch_on_hosts(worker, args)
    if under_torchrun():
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size != ranks:
            raise ValueError(f"this run needs {ranks} processes, torchrun started {world_size}")
        local_rank = int(os.environ["LOCAL_RANK"])
        return _run(int(os.environ["RANK"]), local_rank, worker, args, ranks, "env://")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mp.spawn(_run_spawned, (worker, args, ranks, folder), nprocs=ranks)
        return pickle.loads((folder / "returned").read_bytes())


def launch_on_hosts(
    worker: Worker, args: argparse.Namespace, meanwhile: Callable[[Hosts], None] = lambda hosts: None
) -> Any:
    """The same for ranks on made hosts, described by `args.network`. Calls `meanwhile` once.

    Raises:
        NoHosts: hosts cannot be made here.
        ChildProcessError: a rank failed; its traceback is on stderr.
    """
    module = worker.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        module = main.__spec__.name if main.__spec__ else Path(str(main.__file__)).stem
    with tempfile.TemporaryDirectory() as name, Hosts(args.network) as hosts:
        folder = Path(name)
        (folder / "work").write_bytes(pickle.dumps((module, worker.__name__, args)))
        path = os.pathsep.join(dict.fromkeys(os.path.abspath(part) for part in (Path(__file__).parents[1], *sys.path)))
        started = hosts.start_ranks(["-m", "shared.launch", name], {"PYTHONPATH": path})
        meanwhile(hosts)
        if (status := hosts.wait(started)) != 0:
            raise ChildProcessError(f"a rank on a made host failed with status {status}")
        return pickle.loads((folder / "returned").read_bytes())


def run_on_host(folder: Path) -> NoReturn:
    """Runs one rank of `launch_on_hosts`, in its process."""
    module, name, args = pickle.loads((folder / "work").read_bytes())
    rank, local_rank, ranks = (int(os.environ[key]) for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    worker = getattr(importlib.import_module(module), name)
    _finish(rank, _run(rank, local_rank, worker, args, ranks, "env://"), folder)


def _run_spawned(rank: int, worker: Worker, args: argparse.Namespace, ranks: int, folder: Path) -> None:
    dies_with_us()
    _finish(rank, _run(rank, rank, worker, args, ranks, f"file://{folder}/rendezvous"), folder)


def _finish(rank: int, returned: Any, folder: Path) -> NoReturn:
    dist.destroy_process_group()
    if rank == 0:
        (folder / "returned").write_bytes(pickle.dumps(returned))
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo's threads may still drop tensors, for which they need an interpreter: its end would abort the process.
    os._exit(0)


def _run(rank: int, local_rank: int, worker: Worker, args: argparse.Namespace, ranks: int, rendezvous: str) -> Any:
    device = _device(args.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(args.threads or max(1, cores() // ranks))
        settle_memory()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks, timeout=TIMEOUT)
        atexit.register(dist.destroy_process_group)
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("rtp",))
    return worker(Place(rank, ranks, device, mesh), args)


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
        "--threads", type=_thread_count, default=0, help="CPU threads per rank (0: the cores divided among the ranks)"
    )


def _thread_count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected at least 0, got {number}")
    return number


def repetition(options: Mapping[str, Sequence[Any] | None]) -> str | None:
    """Returns an error text if a list, given by the name of its option, has duplicates; otherwise None."""
    for option, values in options.items():
        if values is not None and len(set(values)) < len(values):
            return f"{option}: expected each once, got {values}"
    return None


def together(place: Place) -> Together:
    """Returns the ranks of a benchmark as a `Place` of `rtp_ext.measure.timing`; one rank needs no process group."""
    barrier = dist.barrier if place.ranks > 1 else lambda: None
    return Together(place.device, barrier, lambda values: everyones(values, place))


def everyones(values: list[float], place: Place) -> torch.Tensor:
    """The values of all ranks, float64 [ranks, len(values)]. Collective."""
    return torch.tensor([values], dtype=torch.float64) if place.ranks == 1 else gather(values, place)


def gather(value: float | list[float] | list[int] | list[list[float]], place: Place) -> torch.Tensor:
    """Values of all ranks, float64, [ranks, *shape of value], on the CPU."""
    mine = torch.tensor(value, dtype=torch.float64, device=place.device)
    parts = [torch.empty_like(mine) for _ in range(place.ranks)]
    dist.all_gather(parts, mine)
    return torch.stack(parts).cpu()


if __name__ == "__main__":  # on a made host; classes are those of the module that workers import
    importlib.import_module("shared.launch").run_on_host(Path(sys.argv[1]))
