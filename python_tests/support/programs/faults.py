"""Random programs in which one rank raises or omits a backward: every other rank has to end in time with an error that
names this rank."""

from __future__ import annotations

import os
import random
import re
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from programs.drawn import Program
from programs.run import Run

PLACES = ("forward", "backward", "backward left out", "between steps", "optimizer")
AFTERWARDS = ("stays", "ends", "goes on", "closes")
GOES_ON = ("goes on", "closes")  # what the rank does that had the fault
TIMEOUT, COMPILED = 2.0, 20.0  # seconds, of rings; where others wait for a rank that compiles
SLACK = 10.0  # seconds beyond it, where replicas are many steps apart; see rtp_ext/ring/links/failure_report.py
STEPS = 6  # the maximum until the others receive the failure

_WHO = re.compile(r"(?:who failed: global ranks?|the first error was that of global rank) (\d+(?:, \d+)*)")


class PlantedError(RuntimeError):
    pass


@dataclass(frozen=True)
class Fault:
    rank: int
    place: str
    afterwards: str
    block: int

    @classmethod
    def draw(cls, program: Program) -> Fault:
        draw = random.Random(program.seed * 31 + program.ranks)
        place = draw.choice(PLACES)
        afterwards = draw.choice(AFTERWARDS)
        if afterwards == "goes on" and place in ("between steps", "optimizer"):
            afterwards = "ends"  # a step less is no fault that others could see
        return cls(draw.randrange(program.ranks), place, afterwards, draw.randrange(len(program.blocks)))


def timeout_of(program: Program) -> float:
    return TIMEOUT if program.backend is None else COMPILED


@dataclass
class Told:
    """The end of a rank: the kind and the text of its error, and the seconds until it."""

    rank: int
    kind: str
    text: str
    seconds: float

    @property
    def tells(self) -> bool:
        """Whether the error names the difference between the ranks, if no rank is missing."""
        return "out of step" in self.text or "replicas disagree" in self.text

    @property
    def named(self) -> set[int]:
        found = _WHO.search(self.text)
        return {int(rank) for rank in found[1].split(", ")} if found else set()


class Faulty(Run):
    def __init__(self, rank: int, program: Program, fault: Fault) -> None:
        self.fault, self.armed = fault, False
        self.timeout = timeout_of(program)
        super().__init__(rank, program)

    @property
    def has_it(self) -> bool:
        return self.rank == self.fault.rank

    def at(self, place: str, value: Tensor) -> Tensor:
        if self.armed and self.fault.place == "forward":
            self.armed = False
            raise PlantedError("planted")
        if self.armed and self.fault.place == "backward" and value.requires_grad:
            value.register_hook(self.in_backward)
        return value

    def in_backward(self, gradient: Tensor) -> None:
        if self.armed:
            self.armed = False
            raise PlantedError("planted")

    def one_step(self) -> None:
        """Trains on the ring alone."""
        if self.armed and self.fault.place == "between steps":
            self.armed = False
            raise PlantedError("planted")
        ids, targets = self.batch(self.rank, self.micro)
        self.micro += 1
        value = torch.nn.functional.cross_entropy(self.call(ids).flatten(0, 1), targets.flatten(), reduction="sum")
        if self.armed and self.fault.place == "backward left out":
            self.armed = False
        elif value.requires_grad:
            value.backward()
        if self.armed and self.fault.place == "optimizer":
            self.armed = False
            raise PlantedError("planted")
        for optimizer in self.optimizers[:1]:
            optimizer.step()
            optimizer.zero_grad()

    def run(self) -> Told:
        self.one_step()
        self.one_step()
        block: Any = self.model.blocks[self.fault.block]
        block.checkpointed = None
        if self.has_it:
            block.at, self.armed = torch.compiler.disable(self.at), True
        torch.distributed.barrier()
        began = time.monotonic()
        try:
            for _ in range(STEPS):
                try:
                    self.one_step()
                except PlantedError:
                    if self.fault.afterwards == "ends":
                        os._exit(1)
                    if self.fault.afterwards == "closes":
                        self.rings[-1].close()
                    if self.fault.afterwards != "goes on":
                        return Told(self.rank, "planted", "", time.monotonic() - began)
                left_out = self.has_it and self.fault.place == "backward left out"
                if left_out and self.fault.afterwards == "ends":
                    os._exit(1)
                if left_out and self.fault.afterwards == "closes":
                    self.rings[-1].close()
                if left_out and self.fault.afterwards != "goes on":
                    return Told(self.rank, "planted", "", time.monotonic() - began)
        except Exception as error:
            return Told(self.rank, type(error).__name__, str(error), time.monotonic() - began)
        return Told(self.rank, "none", f"{STEPS} steps without an error", time.monotonic() - began)


def lost(seed: int, ranks: int) -> set[int]:
    """The ranks whose processes end in the program of `seed`."""
    fault = Fault.draw(Program.draw(seed, ranks, wide=True))
    return {fault.rank} if fault.afterwards == "ends" else set()


_alive: list[Any] = []  # what a rank that stays holds


def plant(rank: int, ranks: int, seed: int) -> Told:
    """Runs the program of `seed` with its fault."""
    program = Program.draw(seed, ranks, wide=True)
    run = Faulty(rank, program, Fault.draw(program))
    _alive.append(run)
    return run.run()


def problems(seed: int, told: list[Told | None]) -> list[str]:
    """Returns what is wrong with the results of the ranks of a program."""
    program = Program.draw(seed, len(told), wide=True)
    fault = Fault.draw(program)
    found, allowed = [], timeout_of(program) + SLACK
    for each in told:
        if each is None:
            continue
        if each.rank == fault.rank and (fault.afterwards != "goes on" or program.ring == 1):
            if each.seconds > allowed:
                found.append(f"rank {each.rank}: {each.seconds:.1f} s")
            continue
        if each.kind not in ("RingTimeout", "RotationError", "ValueError"):
            found.append(f"rank {each.rank}: expected an error of the ring, got {each.kind}: {each.text[-500:]}")
        elif each.seconds > allowed:
            found.append(f"rank {each.rank}: {each.seconds:.1f} s: {each.text[:500]}")
        elif each.named != {fault.rank} and not (fault.afterwards in GOES_ON and each.tells):
            found.append(
                f"rank {each.rank}: expected {fault.rank} to be named, got {each.named}: {each.kind} {each.text}"
            )
    return [f"{fault} in {program}", *found] if found else []
