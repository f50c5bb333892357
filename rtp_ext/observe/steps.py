"""Time, bytes and memory of every training step: lines of JSON and, if TensorBoard is installed, event files."""

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
    """Logs time, bytes and memory of each step of this rank.

        with StepLog(ring, "steps.jsonl", tensorboard="runs/first") as log:
            for batch in data:
                with log.step() as line:
                    ...
                    line["loss"] = loss.item()

    A line has `step`, `seconds`, `weight_bytes` and `gradient_bytes` (sent by this rank in hops), `hops`, `slot_bytes`
    (weight and gradient slots), `peak_bytes` (of the device since the start; on a CPU the resident memory of the
    process), `exposed_seconds` and the entries that the caller adds. `exposed_seconds` is the time for which computes
    waited for hops; it is null in steps without a recording of the ring. A step that raises is not written.

    Args:
        ring: the ring whose hops are counted.
        file: lines are appended to it; None: no file.
        tensorboard: folder for the numbers as scalars `rtp/...`; None: none. Raises ValueError if the package
            tensorboard is not installed.
        exposed_every: interval, in steps, of the recordings for `exposed_seconds`; step 0 is recorded. 0: no
            recordings. A recording is collective at its begin and end: all ranks must use the same interval and steps.
        first: number of the first step, for a resumed training.
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
        """Closes the files. Idempotent."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        self._file = self._board = None

    @contextlib.contextmanager
    def step(self) -> Iterator[dict[str, Any]]:
        """Runs one step and writes its line, with the entries of the dictionary. On a GPU waits for the step's end."""
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
            self._file.flush()  # the next step may end the process
        if self._board is not None:
            for key, value in line.items():
                if key != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(f"rtp/{key}", value, line["step"])


def exposed_seconds(trace: Any) -> float:
    """Returns the seconds for which the computes of a recording (`Ring.trace`) waited for hops, or posted them."""
    return sum(event.end - event.start for event in trace.events if event.kind == "wait")


def _board(folder: str | os.PathLike[str]) -> Any:
    if find_spec("tensorboard") is None:
        raise ValueError(
            "StepLog: expected the package tensorboard for tensorboard=, got none: pip install tensorboard"
        )
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(os.fspath(folder))
