"""Training that survives dead ranks: torchrun starts all ranks again, and they continue from the last checkpoint.

    torchrun --nproc-per-node 4 --max-restarts 20 examples/recover.py --folder run --step-time 0.3 --die-every 10 \\
        --deaths 5
    torchrun --nproc-per-node 3 --max-restarts 20 examples/recover.py --folder run --steps 220  # goes on, three ranks

Only a complete checkpoint counts: ranks write into a folder with a temporary name, and the first rank renames it when
all have written. So a checkpoint that a rank dies in only costs space. Batches follow from the number of the step, and
are divided among the ranks: losses depend neither on the number of starts nor on the number of ranks.

For the demonstration a rank kills itself `--die-every` seconds after its first step, `--deaths` times, every other time
in a save. The last line has the share of time spent on steps that were not repeated. Runs on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import rtp_ext

BATCH = 24  # samples of a step, of all ranks together


class DyingWriter(dcp.FileSystemWriter):
    """Kills the process of its rank in the middle of a checkpoint."""

    def write_data(self, *arguments: Any) -> Any:
        super().write_data(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)


def save(folder: Path, step: int, state: dict[str, Any], dies: bool = False) -> None:
    """Saves a checkpoint, which gets its name once it is complete. Collective."""
    unfinished, whole = folder / f"unfinished_{step}", folder / f"step_{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a rank that died in this save
    dist.barrier()
    dcp.save(state, storage_writer=(DyingWriter if dies else dcp.FileSystemWriter)(unfinished))
    if dist.get_rank() == 0:
        os.replace(unfinished, whole)
        for old in sorted(checkpoints(folder))[:-2]:
            shutil.rmtree(folder / f"step_{old}")
    dist.barrier()


def checkpoints(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in folder.glob("step_*")]


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part [BATCH / ranks, 16] of the batch of a step, and its targets [BATCH / ranks]."""
    x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    return x[mine], x.unflatten(1, (4, 4)).sum(2).argmax(1)[mine]


def meet() -> None:
    """`init_process_group`, for ranks that torchrun may have started again.

    The store of torchrun outlives the ranks: under the same keys they would find the addresses of dead ranks. Where the
    store is not shared (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, on several hosts, which count their restarts separately,
    and with --rdzv-backend c10d), each start has its own store.
    """
    store, rank, ranks = next(dist.rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"life_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Returns the mean loss of the last step (None where all were done before), the number of starts, and the share of
    time in steps that were not repeated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints; the run continues from the last one")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    parser.add_argument("--step-time", type=float, default=0.0, help="least duration of a step in seconds")
    parser.add_argument("--die-every", type=float, help="seconds until a rank kills itself; default: never")
    parser.add_argument("--deaths", type=int, default=3)
    options = parser.parse_args(arguments)
    if not dist.is_initialized():
        meet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if BATCH % ranks != 0:
        raise SystemExit(f"expected a number of ranks that divides {BATCH}, got {ranks}")
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    options.folder.mkdir(parents=True, exist_ok=True)
    log = (options.folder / "log.jsonl").open("a")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4)).double()
    rtp_ext.fully_rotate(model, timeout=20.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    first = max(checkpoints(options.folder), default=0)
    if first:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=options.folder / f"step_{first}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    mortal = options.die_every is not None and life < options.deaths and rank == life % ranks
    in_save = mortal and life % 2 == 1
    began = time.time()
    mean = torch.zeros((), dtype=torch.float64)
    for step in range(first, options.steps):
        start = time.time()
        x, target = batch(step, rank, ranks)
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        if mortal and not in_save and step == first:  # not earlier, since the time to start differs between machines
            timer = threading.Timer(options.die_every, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        time.sleep(max(0.0, options.step_time - (time.time() - start)))
        if rank == 0:
            print(json.dumps({"step": step, "start": start, "end": time.time(), "life": life}), file=log, flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            save(options.folder, step + 1, state, dies=in_save and time.time() - began > options.die_every)
    dist.barrier()
    lines = [json.loads(line) for line in (options.folder / "log.jsonl").read_text().splitlines()]
    useful = sum({line["step"]: line["end"] - line["start"] for line in lines}.values())  # the last run of each step
    total = max(line["end"] for line in lines) - min(line["start"] for line in lines)
    result = {"loss": mean.item() / ranks if first < options.steps else None}
    result |= {"lives": 1 + life, "first": first, "ranks": ranks}
    result["effective_time"] = useful / total
    if rank == 0:
        print(json.dumps(result), flush=True)
    rtp_ext.ring_of(model).close()
    return result


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
