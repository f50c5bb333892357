"""What every step of a training took: lines of JSON and, where TensorBoard is installed, its event files."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from rtp_ext.ring import Ring

__all__ = ["StepLog"]


class StepLog:
    """Writes what each step of this rank took.

        with StepLog(ring, "steps.jsonl", tensorboard="runs/first") as log:
            for batch in data:
                with log.step() as line:
                    ...
                    line["loss"] = loss.item()

    A line has `step`, `seconds`, `weight_bytes` and `gradient_bytes` (what this rank has sent in hops), `hops`,
    `slot_bytes` (of both kinds), `peak_bytes` (of the device since the start; on a CPU of the process, in main memory),
    `exposed_seconds` and whatever was put into it. `exposed_seconds` is the time for which computes waited for hops; it
    takes a recording of the ring, and is null in the steps that were not recorded. A step that raises is not written.

    Args:
        ring: whose hops are counted.
        file: lines are appended to it; None: no file.
        tensorboard: folder for the numbers as scalars `rtp/...`; None: none. Raises ValueError where the package
            tensorboard is not installed.
        exposed_every: every how manieth step is recorded for `exposed_seconds`, the first one (of number 0) too. 0:
            none. Recording is collective at either end: the same on every rank, as are its steps.
        first: number of the first step, where a training is resumed.
    """

    def __init__(
        self,
        ring: Ring,
        file: str | os.PathLike[str] | None = None,
        *,
        tensorboard: str | os.PathLike[str] | None = None,
        exposed_every: int = 0,
        first: int = 0,
    ) -> None:
        if exposed_every < 0:
            raise ValueError(f"StepLog: expected exposed_every >= 0, got {exposed_every}")
        self.ring, self.exposed_every, self.next = ring, exposed_every, first
        self._board = None if tensorboard is None else _board(tensorboard)
        self._file = None if file is None else open(file, "a", encoding="utf-8")  # noqa: SIM115

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the files. Idempotent."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        self._file = self._board = None

    @contextlib.contextmanager
    def step(self) -> Iterator[dict[str, Any]]:
        """Runs one step; what is put into the dictionary goes into its line. On a GPU its end is waited for."""
        recorded = self.exposed_every > 0 and self.next % self.exposed_every == 0
        line: dict[str, Any] = {"step": self.next}
        before = self._counts()
        with self.ring.trace() if recorded else contextlib.nullcontext() as trace:
            start = time.perf_counter()
            yield line
            self._synchronize()
            line["seconds"] = time.perf_counter() - start
        line.update({key: value - before[key] for key, value in self._counts().items()})
        line["slot_bytes"] = sum(self.ring.slot_count(channel).bytes for channel in ("weight", "gradient"))
        line["peak_bytes"] = self._peak_bytes()
        line["exposed_seconds"] = None if trace is None else exposed_seconds(trace)
        self.next += 1
        self._write(line)

    def _counts(self) -> dict[str, int]:
        ring = self.ring
        sent = {f"{channel}_bytes": ring.bytes_sent(channel) for channel in ("weight", "gradient")}
        return {**sent, "hops": ring.hops("weight") + ring.hops("gradient")}

    def _synchronize(self) -> None:
        if self.ring.device.type == "cuda":
            torch.cuda.synchronize(self.ring.device)

    def _peak_bytes(self) -> int:
        if self.ring.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.ring.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()  # whatever happens to the next step
        if self._board is not None:
            for key, value in line.items():
                if key != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(f"rtp/{key}", value, line["step"])


def exposed_seconds(trace: Any) -> float:
    """For how long the computes of a recording (`Ring.trace`) waited for hops, or posted them."""
    return sum(event.end - event.start for event in trace.events if event.kind == "wait")


def _board(folder: str | os.PathLike[str]) -> Any:
    if find_spec("tensorboard") is None:
        raise ValueError(
            "StepLog: expected the package tensorboard for tensorboard=, got none: pip install tensorboard"
        )
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(os.fspath(folder))
