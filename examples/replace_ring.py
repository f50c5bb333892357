"""Replicas of rings: if one ring dies, the others keep their state, and a new ring gets its shards from them.

    python examples/replace_ring.py --rings 2 --ring 2 --lose-at 12

A ring is the unit of failure: this script starts the ranks, and where one dies it ends the rest of its ring and starts
a new one. Ranks of the other rings detect this and form new groups under the next generation number. Each sends its
shards, parameters and optimizer state, to the rank at the same place of the new ring: 1/R of the model a rank, all at
once, and without a disk. When a ring dies, one rank may have finished a step that another has not. So each rank also
keeps the state of the step before, and all continue from the oldest step. Runs on CPUs.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import rtp_ext

TIMEOUT = 20.0


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """Returns this rank's part of every tensor of a state dict, in the order of its names."""
    if isinstance(state, dict):
        for name in sorted(state, key=str):
            yield from tensors_of(state[name])
    elif isinstance(state, DTensor):
        yield state.to_local()
    elif isinstance(state, torch.Tensor):
        yield state


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)
    return x, x.unflatten(1, (4, 4)).sum(2).argmax(1)


class Rank:
    """Runs one rank through all its generations. `kept`: its state by step, the newest and the one before."""

    def __init__(self, ring: int, place: int, options: argparse.Namespace, store: dist.Store) -> None:
        self.ring, self.place, self.options, self.store = ring, place, options, store
        self.kept: dict[int, list[torch.Tensor]] = {}
        self.received = 0

    def live(self) -> None:
        generation = int(self.store.get("generation"))
        while not self.train(generation):
            while int(self.store.get("generation")) == generation:
                time.sleep(0.02)
            generation = int(self.store.get("generation"))

    def train(self, generation: int) -> bool:
        """Trains until all steps are done (returns True) or a ring is lost."""
        options = self.options
        rank, ranks = self.ring * options.ring + self.place, options.rings * options.ring
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"generation {generation}", self.store),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=TIMEOUT),
        )
        try:
            mesh = init_device_mesh("cpu", (options.rings, options.ring), mesh_dim_names=("replicas", "ring"))
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4))
            model.double()
            dims = rtp_ext.RotationDims(ring="ring", replicate="replicas")
            rtp_ext.fully_rotate(model, mesh=mesh, dims=dims, timeout=TIMEOUT)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
            step = self.meet(model, optimizer, mesh)
            loss = torch.zeros(())
            while step < options.steps:
                if (self.ring, self.place, step, generation) == (options.rings - 1, 0, options.lose_at, 0):
                    os.kill(os.getpid(), signal.SIGKILL)
                x, target = batch(step, rank)
                loss = nn.functional.cross_entropy(model(x), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                self.keep(step, model, optimizer)
            loss = loss.detach()
            dist.all_reduce(loss)
            if rank == 0:
                self.store.set("loss", str(loss.item() / ranks))
            self.store.set(f"received {rank}", str(self.received))
            rtp_ext.ring_of(model).close()
            return True
        except (rtp_ext.RotationError, dist.DistError, RuntimeError) as error:
            print(f"rank {rank}, generation {generation}: {str(error).splitlines()[0][:150]}", flush=True)
            return False
        finally:
            dist.destroy_process_group()

    def keep(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = get_state_dict(model, optimizer)
        self.kept[step] = [tensor.clone() for tensor in tensors_of({"model": state[0], "optimizer": state[1]})]
        self.kept.pop(step - 2, None)

    def meet(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any) -> int:
        """Agrees on the step to continue from, gives every rank its state, and returns the step."""
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, sorted(self.kept))
        per_ring = [told[n * self.options.ring : (n + 1) * self.options.ring] for n in range(self.options.rings)]
        healthy = [number for number, ring in enumerate(per_ring) if all(ring)]
        if not healthy:
            return 0
        step = min(max(steps) for number in healthy for steps in per_ring[number])
        state = dict(zip(("model", "optimizer"), copy.deepcopy(get_state_dict(model, optimizer)), strict=True))
        mine = self.kept.get(step)
        column = mesh.get_group("replicas")
        source = dist.get_global_rank(column, healthy[0])
        with torch.no_grad():
            for number, tensor in enumerate(tensors_of(state)):
                if mine is not None:
                    tensor.copy_(mine[number])
                whole = tensor.contiguous().view(-1)
                if whole.numel():
                    dist.broadcast(whole, source, group=column)
                    tensor.copy_(whole.view(tensor.shape))
                self.received += 0 if mine is not None else tensor.nbytes
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.kept = {}
        self.keep(step, model, optimizer)
        return step


def run(ring: int, place: int, options: argparse.Namespace, file: str) -> None:
    torch.set_num_threads(1)
    Rank(ring, place, options, dist.FileStore(file)).live()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Returns the last loss, how many rings were replaced, and the bytes that each rank got from its replica."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rings", type=int, default=2)
    parser.add_argument("--ring", type=int, default=2, help="ranks of a ring")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lose-at", type=int, default=-1, help="the step in which the last ring dies; default: none")
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn" if arguments is None else "forkserver")
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "store")
        store = dist.FileStore(file)
        store.set("generation", "0")

        def start(ring: int) -> list[Any]:
            each = [context.Process(target=run, args=(ring, place, options, file)) for place in range(options.ring)]
            for process in each:
                process.start()
            return each

        rings, generation = {ring: start(ring) for ring in range(options.rings)}, 0
        while any(process.exitcode is None for ring in rings.values() for process in ring):
            for number, ring in rings.items():
                if any(process.exitcode not in (None, 0) for process in ring):
                    for process in ring:
                        process.kill()
                        process.join()
                    if generation == 3:
                        raise SystemExit("three rings were lost: something else is wrong")
                    generation += 1
                    store.set("generation", str(generation))
                    rings[number] = start(number)
            time.sleep(0.02)
        received = [int(store.get(f"received {rank}")) for rank in range(options.rings * options.ring)]
        told = {"loss": float(store.get("loss")), "replaced": generation, "received_bytes": received}
    print(json.dumps(told))
    return told


if __name__ == "__main__":
    main()
