"""The program of ranks on emulated hosts: `python host_ranks.py FUNCTION FOLDER`. They write results to FOLDER."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from models import batch_loss, make_model, mean_loss, train
from torch import nn

import rtp_ext
from rtp_ext.__main__ import main
from rtp_ext.nn import RotatedLinear

TIMEOUT = 2.0
STEPS, LR = 4, 0.1


def answer(folder: Path, value: object) -> None:
    rank = int(os.environ["RANK"])
    (folder / f"new{rank}").write_text(json.dumps(value))
    os.replace(folder / f"new{rank}", folder / f"rank{rank}")


def doctor() -> str:
    """Returns the output of `python -m rtp_ext doctor` under torchrun. It has its own process group."""
    more = {"TORCHELASTIC_RUN_ID": "tests", "MASTER_PORT": "29501"}
    before = dict(os.environ)
    os.environ.update(more)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert main(["doctor"]) == 0
    os.environ.clear()
    os.environ.update(before)
    return told.getvalue()


def trains() -> float:
    """The largest difference between parameters that a ring over all hosts trains and those of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = rtp_ext.fully_rotate(make_model())
    train(model, lambda step: batch_loss(model, rank, step), 3)
    plain = make_model()
    train(plain, lambda step: mean_loss(plain, ranks, step), 3)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    apart = max((ours.full_tensor() - theirs).abs().max().item() for ours, theirs in pairs)
    rtp_ext.ring_of(model).close()
    return apart


def forwards() -> tuple[str, str, float]:
    """The transport of a forward-only model over all hosts, why it is not shm, the largest difference of outputs."""
    plain = make_model()
    model, refused = rtp_ext.rotate_for_inference(make_model()), ""
    try:
        rtp_ext.rotate_for_inference(make_model(), transport="shm")
    except rtp_ext.RotationError as error:
        refused = str(error)
    ids = torch.arange(3 + dist.get_rank()).unsqueeze(0)
    with torch.no_grad():
        apart = (model(ids) - plain(ids)).abs().max().item()
    ring = rtp_ext.ring_of(model)
    dist.barrier()  # no rank pulls any more
    ring.close()
    return ring.transport, refused, apart


def until_lost(layer: nn.Module, x: torch.Tensor, folder: Path) -> dict:
    """Steps until an error ends them; says so when a few are done."""
    step, operation = 0, ""
    while True:
        try:
            layer(x).sum().backward()
            step += 1
            if step == 2:
                (folder / f"stepping{dist.get_rank()}").touch()
        except rtp_ext.RotationError as error:
            operation = str(error)
            return {"kind": type(error).__name__, "text": operation, "at": time.monotonic(), "steps": step}


def a_host_is_lost(folder: Path) -> None:
    """Two hosts of two ranks: the ring, its description, and its failure when a host goes dark."""
    told = {"doctor": doctor(), "hostname": socket.gethostname()}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    told["apart"], told["forwards"] = trains(), forwards()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with rtp_ext.Ring(groups[rank // 2]) as near:
        told["near"] = near.transport, near.transport_reason, len(list(near.rotate(torch.ones(2))))
    ring = rtp_ext.Ring(timeout=TIMEOUT)
    told["far"] = ring.transport, ring.transport_reason
    if rank == 2:  # the second host takes the name of the first, and boots as another machine
        boot = folder / "boot_id"
        boot.write_text("another-kernel\n")
        disguise = f"hostname host0 && mount --bind {boot} /proc/sys/kernel/random/boot_id"
        subprocess.run(["sh", "-c", disguise], check=True)
    dist.barrier()
    with rtp_ext.Ring() as disguised:
        told["disguised"] = disguised.transport, disguised.transport_reason, len(list(disguised.rotate(torch.ones(2))))
    layer = RotatedLinear(512, 512, ring=ring)  # 256 KiB a hop: a step has more than half a second of wire
    told["lost"] = until_lost(layer, torch.ones(4, 512), folder)
    answer(folder, told)
    os._exit(0)


def restarts(folder: Path) -> None:
    """Trains from the last checkpoint on; in the first life the process of one rank ends in the middle of a step."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    saved, first = folder / "saved", 0
    model = make_model()
    if saved.exists():
        first, values = torch.load(saved)
        model.load_state_dict(values)
    model = rtp_ext.fully_rotate(model, timeout=60.0)  # an ended rank is detected at once; hosts start seconds apart
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(first, STEPS):
        loss = batch_loss(model, rank, step)
        if (life, rank, step) == (0, 1, 2):
            os._exit(13)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values = {name: value.full_tensor() for name, value in model.named_parameters()}
        if rank == 0:
            torch.save((step + 1, values), folder / "new")
            os.replace(folder / "new", saved)
        dist.barrier()
    answer(folder, {"first": first, "life": life, "host": int(os.environ["HOST"])})
    dist.destroy_process_group()


if __name__ == "__main__":
    {each.__name__: each for each in (a_host_is_lost, restarts)}[sys.argv[1]](Path(sys.argv[2]))
