"""Trains between made hosts while everything is late at random: losses stay equal bit by bit, and nothing grows.

    python benchmarks/reliability/soak_hosts.py  # 500 steps on two hosts
    python benchmarks/reliability/soak_hosts.py --hosts 3 --steps 2000 --seed 7

Two runs of the same steps: one undisturbed, one in which ranks sleep at random in front of their steps and cables are
pulled out for up to 0.1 s, so that packets are lost, or slowed down to a twentieth (drawn from --seed; with --delay,
where the kernel has netem, packets are late besides). The last line of stdout is JSON, and appended to
results/MACHINE/soak_hosts.jsonl where at least 500 steps were taken: whether the losses are equal,
how many disturbances there were, and for both runs the seconds, and by how much the memory, the descriptors and the
threads of the rank that grew most did between a fifth of the steps and the last one. Exit status 1 where losses differ,
nothing was disturbed, or descriptors, threads or more than 8 MiB of memory have been added. Needs root:
shared/hosts.py.
"""

import argparse
import dataclasses
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import add_output_options, append_line, complete_output, environment_card
from shared.hosts import Hosts, NoHosts, add_host_options, complete_hosts
from shared.launch import Place, gather, launch_on_hosts
from shared.memory import resources

GROWN = {"resident_bytes": 8 * 2**20, "descriptors": 0, "threads": 0}  # the most that is no growth
RECORDED = 500  # steps, at least
NAP = 0.02  # seconds: the longest sleep in front of a step


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A long run with random delays. See the top of the file.")
    add_host_options(parser, hosts=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(device="cpu", threads=1, rates=["1gbit"])
    add_output_options(parser)
    args = parser.parse_args(argv)
    complete_hosts(args, parser.error)
    args.quick = args.steps < RECORDED
    complete_output(args, "soak_hosts", parser.error)
    if args.steps < 10 or len(args.networks) != 1 or args.network.rate is None:
        parser.error("expected at least 10 --steps and one --rate other than none")
    return args


def train(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one rank. Returns the losses of all steps, and the growth of its resources."""
    from shared.models import MLPStack, random_vectors
    from shared.strategies import Trainer

    trainer = Trainer("rtp", lambda: MLPStack(blocks=2, width=64, inner=192), place.mesh, place.device, **SETTINGS)
    naps = random.Random(args.seed * 1000 + place.rank)
    losses, early = [], resources()
    for step in range(args.steps):
        if step == args.steps // 5:
            early = resources()
        if args.disturbed:
            time.sleep(naps.uniform(0, NAP) if naps.random() < 0.5 else 0)
        batch = random_vectors(32, torch.Generator().manual_seed(step * 1009 + place.rank), width=64)
        losses.append(trainer.step(*batch).item())
    added = {name: value - early[name] for name, value in resources().items()}
    most = gather([float(value) for value in added.values()], place).amax(0).long().tolist()
    every = gather(losses, place).tolist()
    transport = trainer.ring.transport
    trainer.close()
    return {"losses": every, "added": dict(zip(added, most, strict=True)), "transport": transport}


SETTINGS: dict[str, Any] = {"dtype": "float32", "lr": 1e-3, "seed": 0}


class Trouble:
    """Cables that are pulled out, and links that slow down, at random until the end of a `with`."""

    def __init__(self, hosts: Hosts, seed: int) -> None:
        self.counts = {"cables": 0, "slow_links": 0}
        self._hosts, self._draw, self._stop = hosts, random.Random(seed), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        rate = self._hosts.links.rate
        assert rate is not None
        digits = rate.rstrip("kmgbit")
        slow = f"{float(digits) / 20:g}{rate.removeprefix(digits)}"
        while not self._stop.wait(self._draw.uniform(0, 0.5)):
            try:
                self._one(rate, slow)
            except NoHosts:  # the hosts have ended; the counts show any other reason
                return

    def _one(self, rate: str, slow: str) -> None:
        host, lasts = self._draw.randrange(self._hosts.links.hosts), self._draw.uniform(0, 0.1)
        if self._draw.random() < 0.5:
            self._hosts.plug(host, False)
            self._stop.wait(lasts)
            self._hosts.plug(host, True)
            self.counts["cables"] += 1
        else:
            self._hosts.set_rate(host, slow)
            self._stop.wait(3 * lasts)
            self._hosts.set_rate(host, rate)
            self.counts["slow_links"] += 1


def run(args: argparse.Namespace, disturbed: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """Returns the result of rank 0, the seconds, and the counts of disturbances."""
    started, troubles = time.monotonic(), []
    args = argparse.Namespace(**{**vars(args), "disturbed": disturbed})
    if not disturbed:
        args.network = dataclasses.replace(args.network, delay=None)

    def meanwhile(hosts: Hosts) -> None:
        if disturbed:
            troubles.append(Trouble(hosts, args.seed))
            troubles[0].start()

    try:
        found = launch_on_hosts(train, args, meanwhile)
    finally:
        for trouble in troubles:
            trouble.stop()
    return found | {"seconds": time.monotonic() - started}, troubles[0].counts if troubles else {}


def main() -> int:
    args = parse_arguments()
    (calm, _), (rough, disturbances) = run(args, False), run(args, True)
    equal = calm["losses"] == rough["losses"] and len(calm["losses"][0]) == args.steps
    disturbed = all(disturbances.values())
    grown = [name for each in (calm, rough) for name, most in GROWN.items() if each["added"][name] > most]
    told: dict[str, Any] = {"benchmark": "soak_hosts", **args.network.card(), "steps": args.steps, "seed": args.seed}
    told |= {
        "transport": rough["transport"],
        "losses_equal": equal,
        "last_losses": [each[-1] for each in rough["losses"]],
    }
    told |= {"disturbances": disturbances, "grown": grown}
    told |= {f"{name}_seconds": each["seconds"] for name, each in (("calm", calm), ("rough", rough))}
    told |= {f"{name}_added": each["added"] for name, each in (("calm", calm), ("rough", rough))}
    append_line(args.output, {**environment_card(torch.device("cpu"), args.command), **told})
    print(json.dumps(told), flush=True)
    return 0 if equal and disturbed and not grown else 1


if __name__ == "__main__":
    sys.exit(main())
