"""One strategy of a run in which several take turns, and the orders in which they do; whether strategies of other
packages run here and compute the same as a plain model, which is tried before they are timed."""

import argparse
import operator
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from rtp_ext.measure.timing import Stopwatch
from shared.agreement import tolerances
from shared.launch import Place, Worker, launch
from shared.models import WORKLOADS
from shared.optimizers import muon_fields
from shared.strategies import STRATEGIES, Trainer
from shared.wire import Counter

Batch = tuple[torch.Tensor, torch.Tensor]
PHASES = ("forward_backward", "optimizer")


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of `count` items in which each follows every other one equally often (a Williams design)."""
    zigzag = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    orders = [[(item + shift) % count for item in zigzag] for shift in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def seconds(device: torch.device, action: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Returns the duration of `action`, by CUDA events on a GPU or by the clock on a CPU, and its result."""
    watch = Stopwatch(device)
    watch.start("action")
    result = action()
    watch.stop()
    return watch.totals()["action"] / 1e6, result


class Contestant:
    """One strategy in the run of one rank: its trainer, this rank's batch, losses and times.

    trainer: None on ranks without work, those but rank 0 of a strategy of one process.
    """

    def __init__(
        self, strategy: str, args: argparse.Namespace, device: torch.device, batch: Batch, trainer: Trainer | None
    ) -> None:
        self.strategy = strategy
        self.trainer, self.batch = trainer, batch
        self.losses: list[torch.Tensor] = []
        self.gradients: list[list[float]] = []  # of the first step: signatures by parameter
        self.seconds: list[float] = []
        self.phases: dict[str, list[float]] = {name: [] for name in PHASES}  # seconds
        # of all threads of this process, in a step and in its phases; not what the kernel does for a host's link
        self.processor: dict[str, list[float]] = {name: [] for name in ("step", *PHASES)}
        self.sent: list[int] = []  # bytes, of this host
        self.optimizer_sent: list[int] = []  # the same of the optimizer, if that is counted apart
        self._muon = args.optimizer == "muon"
        self._apart, self._counted = self._muon and not STRATEGIES[strategy].one_process, list[int]()
        self._device = device
        self._watch = Stopwatch(device)
        self._used: dict[str, float] = {}

    @property
    def transport(self) -> str | None:
        return None if self.trainer is None or self.trainer.ring is None else self.trainer.ring.transport

    @property
    def ring_bytes(self) -> float | None:
        """Returns the bytes that this rank sends along the ring in a step: weights and gradients."""
        if self.trainer is None or self.trainer.ring is None or not self.losses:
            return None
        ring = self.trainer.ring
        return (ring.bytes_sent("weight") + ring.bytes_sent("gradient")) / len(self.losses)

    def step(self, *, timed: bool) -> None:
        taken, parts, self._used = 0.0, dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        counter = Counter()
        counter.start()
        before = time.process_time()
        if self.trainer is not None:
            trainer, self._watch = self.trainer, Stopwatch(self._device)
            taken, loss = seconds(self._device, lambda: trainer.step(*self.batch, phase=self._phase))
            parts = self._watch.totals()
        self._used["step"] = time.process_time() - before
        if self.trainer is not None:
            self.losses.append(loss)
            self.gradients = self.gradients or self.trainer.signatures()
        sent = counter.stop()
        if timed:
            self.optimizer_sent += self._counted
            self.sent += [each - sum(self._counted) for each in sent]
            self.seconds.append(taken)
            for name, times in self.phases.items():
                times.append(parts[name] / 1e6)
            for name, times in self.processor.items():
                times.append(self._used[name])

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        apart, counter = self._apart and name == "optimizer", Counter()
        if apart:
            dist.barrier()
            counter.start()
        before = time.process_time()
        self._watch.start(name)
        yield
        self._watch.stop()
        self._used[name] = time.process_time() - before
        self._counted = counter.stop() if apart else []

    def muon(self, place: Place) -> dict[str, Any]:
        """Returns the fields of a row about Muon; none with another optimizer. Collective."""
        optimizer = None if self.trainer is None else self.trainer.optimizer
        kind = STRATEGIES[self.strategy].muon
        return muon_fields(kind, optimizer, len(self.losses), self.optimizer_sent, place) if self._muon else {}

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()


# -- trial -------------------------------------------------------------------------------------------------------------

PLAIN = "single"
STEPS = 3
TOKENS = 64  # at least


def failures(race: Worker, args: argparse.Namespace, ranks: int, start: Callable[..., Any] = launch) -> dict[str, str]:
    """Returns why a strategy of another package is not timed, by its name; nothing about one that is.

    They take a few steps beside one process with the batches of all ranks, in processes of their own on this host: all
    together, and each alone if that fails.

    race: returns the rows of a run of `args`. start: as `launch`. Under torchrun an error in a rank ends the run.
    """
    packages = [strategy for strategy in args.strategies if STRATEGIES[strategy].package is not None]
    if not packages or _failure(packages, race, args, ranks, start) is None:
        return {}
    found = {strategy: _failure([strategy], race, args, ranks, start) for strategy in packages}
    return {strategy: error for strategy, error in found.items() if error is not None}


def _failure(
    strategies: list[str], race: Worker, args: argparse.Namespace, ranks: int, start: Callable[..., Any]
) -> str | None:
    seq = WORKLOADS[args.model].seq
    asked = {"strategies": [*strategies, PLAIN], "tokens": [-(-TOKENS // seq) * seq], "steps": STEPS, "warmup": 0}
    alone = argparse.Namespace(**{**vars(args), **asked, "network": None, "trace": None, "failures": {}})
    try:
        rows = start(race, alone, ranks)
    except ProcessRaisedException as problem:
        return str(problem).strip().splitlines()[-1]
    for row in rows:
        spreads = row["loss_spread"], row["gradient_spread"]
        if not all(map(operator.le, spreads, tolerances(row))):  # NaN is wrong
            differ = "losses differ from those of one process by {:.0e}, gradients by {:.0e}".format(*spreads)
            return f"it computes something else: {differ}"
    return None
