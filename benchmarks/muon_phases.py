"""Times the phases of a step of rtp_ext.optim.Muon: how much of it could run beside the backward.

    torchrun --nproc-per-node 2 benchmarks/muon_phases.py
    python benchmarks/hosts.py --hosts 2 --rate 2gbit -- benchmarks/muon_phases.py

Products of the parts and the first exchange could begin when the gradient of a layer is final; iterations, the second
exchange and the updates follow. Prints one JSON line from rank 0: mean seconds of each phase over the steps, of the
whole step, and of forward and backward; `early` is the share of a training step (forward, backward and optimizer) that
an early start could remove at most.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import rtp_ext
from rtp_ext.optim import Muon, exchange, matrices


class Block(nn.Module):
    """A gated MLP, whose matrices a ring cuts along their long side."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down_proj, self.act_fn = nn.Linear(hidden, width, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def timed(name: str, seconds: dict[str, float], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments)
        seconds[name] += time.perf_counter() - start
        return result

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--exchange", choices=("gram", "whole", "auto"), default="gram")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(options.width, options.hidden) for _ in range(options.layers)])
    rtp_ext.fully_rotate(model)
    hidden, _ = matrices(model)
    optimizer = Muon(hidden, lr=1e-3, exchange=options.exchange)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(options.tokens, options.width)

    seconds: dict[str, float] = defaultdict(float)
    exchange._contribute = timed("products", seconds, exchange._contribute)
    exchange._iterate = timed("iterations", seconds, exchange._iterate)
    exchange._finish = timed("updates", seconds, exchange._finish)
    hops: list[float] = []

    def step() -> None:
        start = time.perf_counter()
        model(x).square().mean().backward()
        seconds["forward and backward"] += time.perf_counter() - start
        dist.barrier()  # so that the exchanges contain no wait for a late backward
        start = time.perf_counter()
        optimizer.step()
        seconds["optimizer"] += time.perf_counter() - start
        model.zero_grad()

    step()  # groups and slots
    sharers = next(iter(optimizer._sharers.values()))
    plain = sharers.all_to_all

    def all_to_all(*arguments: Any) -> None:
        start = time.perf_counter()
        plain(*arguments)
        hops.append(time.perf_counter() - start)

    sharers.all_to_all = all_to_all  # type: ignore[method-assign]
    seconds.clear()
    for _ in range(options.steps):
        step()
    seconds["first exchange"], seconds["second exchange"] = sum(hops[::2]), sum(hops[1::2])
    mean = {name: round(total / options.steps, 4) for name, total in sorted(seconds.items())}
    whole = mean["forward and backward"] + mean["optimizer"]
    early = (mean.get("products", 0.0) + mean["first exchange"]) / whole
    if dist.get_rank() == 0:
        print(json.dumps({**vars(options), "ranks": dist.get_world_size(), **mean, "early": round(early, 3)}))
    rtp_ext.ring_of(model).close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
