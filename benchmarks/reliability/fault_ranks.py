"""The program of the ranks of a cell of the fault matrix: it trains a small model, and one rank fails in the middle."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext.outer import replicas

VICTIM = 1
STEPS, FAULT_STEP = 5, 3
WIDTH, HIDDEN, CLASSES = 12, 20, 8
LATE = 0.6  # of the timeout
BIG = 4_000  # how often a batch is repeated for which memory runs out: of its activations, each takes more than a PIECE
PIECE = 2 << 20  # bytes


@dataclass(frozen=True)
class Cell:
    """One fault at one place on one kind of ring. `timeout`, `pause`: seconds, of the ring and of a rank that stops."""

    fault: str
    place: str
    transport: str
    ranks: int
    timeout: float = 2.0
    pause: float = 10.0

    @property
    def processes(self) -> int:
        return self.ranks * (2 if self.place == "outer reduction" else 1)

    @property
    def name(self) -> str:
        return f"{self.fault} in {self.place}, {self.transport}, R = {self.ranks}"


class PlantedError(RuntimeError):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """Two blocks, a norm that is gathered, a head. `at(place, value)` is called on the way, and may change a value."""

    def __init__(self, at: Callable[[str, Tensor], Tensor] = lambda place, value: value) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = Block(), Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.at, self.skips = at, False
        self.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.at("prefetch", self.first(self.at("first", x)))
        x = self.at("forward", x)
        if not self.skips:
            x = self.second(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.at("backward", gradient))
        return self.head(self.norm(x))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (6,), generator=generator)


def reference(ranks: int, left_out: int | None = None) -> list[float]:
    """The mean loss of each step in one process. `left_out`: a step without an update, and without a loss."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [loss_of(model, *batch(rank, step)) for rank in range(ranks)]
        if step != left_out:
            total = torch.stack(each).mean()
            total.backward()
            optimizer.step()
            losses.append(total.item())
    return losses


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), target)


class Rank:
    """Runs one rank of a cell and writes its result to a file in the folder."""

    def __init__(self, rank: int, cell: Cell, folder: Path) -> None:
        self.rank, self.cell, self.folder = rank, cell, folder
        self.step, self.acted = -1, False
        self.told: dict[str, Any] = {"losses": []}
        self.hoard: list[Tensor] = []  # all memory but for little pieces, where it runs out

    # -- the fault ---------------------------------------------------------------------------------------------------

    def at(self, place: str, value: Any = None) -> Any:
        cell = self.cell
        if self.step != FAULT_STEP or self.acted:
            return value
        if cell.fault == "out of memory" and (place, cell.place) == ("first", "backward") and self.rank == VICTIM:
            return value.repeat(BIG, 1)
        wanted = "first" if (cell.fault, cell.place) == ("full shared memory", "forward") else cell.place
        if place != wanted or (place == "prefetch" and not self.under_way()):
            return value
        if self.rank != VICTIM and cell.fault != "exception on all":
            return value
        self.acted = self.told["acted"] = True
        self.told["fault"] = time.monotonic()
        (self.folder / f"fault{self.rank}").write_text(str(time.monotonic()))
        return getattr(self, "do_" + cell.fault.replace(" ", "_"))(value)

    def under_way(self) -> bool:
        sent, used = self.ring.prefetched()
        return sent > used

    def do_kill(self, value: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_stop(self, value: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return value

    do_stop_for_good = do_stop

    def do_exception(self, value: Any) -> Any:
        raise PlantedError("planted")

    do_exception_on_all = do_exception

    def do_late_rank(self, value: Any) -> Any:
        time.sleep(LATE * self.cell.timeout)
        return value

    def do_NaN(self, value: Any) -> Any:
        return value * float("nan")

    def do_wrong_shape(self, value: Any) -> Any:
        return value[..., :-1]

    def do_skipped_layer(self, value: Any) -> Any:
        self.model.skips = True
        return value

    def do_full_shared_memory(self, value: Any) -> Any:
        self.limit(resource.RLIMIT_FSIZE, 0)
        return value

    def do_out_of_memory(self, value: Any) -> Any:
        value = value if self.cell.place == "backward" else value.repeat(BIG, 1)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self.limit(resource.RLIMIT_AS, pages * resource.getpagesize() + 2 * PIECE)
        refused = 0
        while refused < 5:  # in a row, since memory that other threads free meanwhile could serve the next allocation
            try:
                self.hoard.append(torch.empty(PIECE, dtype=torch.uint8))
                refused = 0
            except RuntimeError:
                refused += 1
                time.sleep(0.02)
        return value

    def do_lost_socket(self, value: Any) -> Any:
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.getpeername():
                    each.shutdown(socket.SHUT_RDWR)
        return value

    def do_lost_host(self, value: Any) -> Any:
        time.sleep(60)  # until the host is killed

    @staticmethod
    def limit(kind: int, soft: int) -> None:
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))

    # -- training ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        cell = self.cell
        self.saving = dist.new_group(timeout=timedelta(seconds=cell.timeout)) if cell.place == "save" else None
        options: dict[str, Any] = {"timeout": cell.timeout}
        options |= {"route": "two-level"} if cell.transport == "two-level" else {"transport": cell.transport}
        if cell.processes > cell.ranks:
            mesh = init_device_mesh("cpu", (2, cell.ranks), mesh_dim_names=("replicas", "ring"))
            options |= {"dims": rtp_ext.RotationDims(ring="ring", replicate="replicas")}
        else:
            mesh = init_device_mesh("cpu", (cell.ranks,))
        self.train(mesh, {**options, "timeout": 60.0}, STEPS, quiet=True)  # creates the state that a process keeps
        before = len(os.listdir("/proc/self/fd"))
        dist.barrier()
        try:
            self.train(mesh, options, STEPS, quiet=False)
            self.told["ended"] = "done"
        except PlantedError:
            raise
        except (Exception, dcp.api.CheckpointException) as error:
            self.told |= {"ended": "error", "at": time.monotonic(), "kind": type(error).__name__, "text": str(error)}
            for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
                self.limit(kind, resource.getrlimit(kind)[1])
            self.hoard.clear()
            self.told["trace"] = traceback.format_exc()[-3000:]
            error.__traceback__ = None
        # Autograd keeps the nodes that were ready in a failed backward, and they the ring, until its next one here.
        torch.ones((), requires_grad=True).backward()
        gc.collect()
        self.told["descriptors"] = len(os.listdir("/proc/self/fd")) - before
        self.told["threads"] = len(os.listdir("/proc/self/task"))

    def train(self, mesh: Any, options: dict[str, Any], steps: int, quiet: bool) -> None:
        self.step = -1
        self.model = rtp_ext.fully_rotate(Net(self.at), mesh=mesh, **options)
        self.ring = rtp_ext.ring_of(self.model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))
        original = replicas.Replicas.begin_sum

        def begin_sum(replica: Any, values: Tensor) -> Any:
            self.at("outer reduction", values)
            return original(replica, values)

        replicas.Replicas.begin_sum = begin_sum  # type: ignore[method-assign]
        try:
            for step in range(steps):
                self.one_step(optimizer, -1 if quiet else step, step)
            if not quiet:
                self.told["fits"] = self.ring.transport
            self.ring.close()
        finally:
            replicas.Replicas.begin_sum = original  # type: ignore[method-assign]
            del self.model, self.ring

    def one_step(self, optimizer: torch.optim.Optimizer, step: int, seed: int) -> None:
        self.step = step
        loss = None
        try:
            self.at("between steps")
            optimizer.zero_grad()
            if step == FAULT_STEP and self.cell.fault == "full shared memory":
                self.ring.clear_slots()
            x, target = batch(self.rank, seed)
            y = self.model(x)
            loss = nn.functional.cross_entropy(y, target.repeat(len(y) // len(target)))
            loss.backward()
            finite = all(bool(torch.isfinite(p.grad.to_local()).all()) for p in self.model.parameters())
            if not finite:
                self.told["left out"] = step
                return
            optimizer.step()
            if step == FAULT_STEP and self.cell.place == "save":
                self.save()
        except PlantedError:
            if self.cell.fault != "exception on all":
                raise
            self.told["left out"] = step
            return
        finally:
            self.model.skips = False
        if step >= 0:
            self.told["losses"].append(loss.item())

    def save(self) -> None:
        rank = self

        class Writer(dcp.FileSystemWriter):
            def write_data(self, *arguments: Any) -> Any:
                rank.at("save")
                return super().write_data(*arguments)

        writer = Writer(self.folder / "checkpoint")
        try:
            dcp.save(self.model.state_dict(), storage_writer=writer, process_group=self.saving)
        except dcp.api.CheckpointException as error:
            planted = [each for each, _ in error.failures.values() if isinstance(each, PlantedError)]
            if planted and len(error.failures) == self.cell.processes:
                raise planted[0] from error
            raise


def entry(rank: int, cell: Cell, folder: Path, method: str | None = None) -> None:
    """The process of one rank. `method`: how its process group meets; None: by a file in the folder."""
    os.setpgrp()
    os.environ |= {"RTP_RECORD_DIR": str(folder), "GLOO_LOG_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if cell.transport == "two-level" and method is None:
        os.environ["RTP_DEBUG_HOST"] = f"host {rank // 2}"
    sys.stderr = (folder / f"stderr{rank}").open("w")  # until the process ends
    faulthandler.register(signal.SIGUSR2)  # where it stands: for ranks that hang
    gc.freeze()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=method or f"file://{folder}/rendezvous",
        rank=rank,
        world_size=cell.processes,
        timeout=timedelta(seconds=60),
    )
    work = Rank(rank, cell, folder)
    try:
        work.run()
    finally:
        (folder / f"new{rank}").write_text(json.dumps(work.told))
        os.replace(folder / f"new{rank}", folder / f"rank{rank}.json")
    if method is not None:
        os._exit(0)


if __name__ == "__main__":
    told = json.loads((Path(sys.argv[1]) / "cell").read_text())
    entry(int(os.environ["RANK"]), Cell(**told), Path(sys.argv[1]), "env://")
