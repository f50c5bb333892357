"""Runs a function on several ranks of this machine and brings back what each returned, or why it failed.

    def work(rank, ranks, scale):          # module level, so that it can be pickled
        ...
        return value

    values = run_ranks(work, 4, 2.0)

The ranks are forked from a server process that has imported torch and the package already, so that a start takes a
fraction of a second. They are kept for the next call that wants as many: what DTensor finds out about shapes, most of
the time of many tests, it finds out once. Kept are only those that are as they were before: `surroundings.py`.
One call should still run many cases: see `Cases`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn

GRACE = 2.0  # seconds that the other ranks have to report their own failure after the first one
EXIT = 20.0  # seconds that a rank may take to tidy up, or to end, after all ranks have reported
GROUP_TIMEOUT = 60.0
LARGEST = 4  # ranks that are kept
# What ranks find imported: each would need half a second and more for it.
PRELOADED = [
    "pytest",
    "torch._dynamo",  # the first DTensor would import it
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "rtp_ext.convert",
    "rtp_ext.nn",
    "rtp_ext.parameters.loading",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]


class RankError(AssertionError):
    """One or more ranks failed. The message holds the traceback of each, in the order in which they failed."""


@dataclass
class Cases:
    """Many cases in one function of a rank. A failed comparison lets the next case run; any other error ends the rank.

    with cases.case("5->7 float32"):
        ...
    cases.finish()
    """

    count: int = 0
    failures: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        self.count += 1
        try:
            yield
        except AssertionError as error:
            self.failures.append(f"case {name}: {error}")
        except Exception as error:
            raise RuntimeError(f"case {name}: {type(error).__name__}: {error}") from error

    def finish(self) -> None:
        assert self.count > 0, "no case ran"
        text = "\n".join(self.failures[:20])
        assert not self.failures, f"{len(self.failures)} of {self.count} cases failed:\n{text}"


def run_ranks(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 120.0,
    lost: Collection[int] = (),
    group_timeout: float = GROUP_TIMEOUT,
    alone: bool = False,
) -> list[Any]:
    """Calls `fn(rank, ranks, *args)` in `ranks` processes that share a Gloo process group.

    Args:
        fn: a module-level function; its result and `args` must pickle.
        timeout: seconds until the stacks of all ranks are dumped and everything is killed.
        lost: ranks that will kill or stop themselves. They return None, and are killed once the others have ended.
        group_timeout: seconds, of the default process group.
        alone: in processes that have run nothing else and run nothing afterwards, as where `lost` or another
            `group_timeout` is given, and everywhere if the environment's RTP_RANKS is `alone`.

    Returns:
        The results, by rank.

    Raises:
        RankError: with the tracebacks of the ranks that failed, or the stacks of those that hang. The first failure
            ends the other ranks.
    """
    __tracebackhide__ = True
    alone = alone or bool(lost) or group_timeout != GROUP_TIMEOUT or ranks > LARGEST
    alone = alone or os.environ.get("RTP_RANKS") == "alone"
    crew = (None if alone else _kept.pop(ranks, None)) or _Crew()
    try:
        if not crew.ranks:
            crew.start(ranks, group_timeout)
        results = crew.run(fn, args, timeout, frozenset(lost))
        if not alone and crew.tidy_up():
            _kept[ranks] = crew
        else:
            crew.end(frozenset(lost))
        return results
    except RankError as error:
        earlier = f"\nBefore, these ranks ran {', '.join(crew.ran[:-1])}." if crew.ran[:-1] else ""
        raise RankError(f"{error}{earlier}") from None
    finally:
        if crew is not _kept.get(ranks):
            crew.kill()


def end_ranks() -> None:
    """Ends the ranks that are kept. Raises RankError where one does not end well."""
    while _kept:
        _, crew = _kept.popitem()
        try:
            crew.end()
        finally:
            crew.kill()


@dataclass(eq=False)
class _Rank:
    process: Any
    pipe: Connection
    done: bool = False
    result: Any = None
    failure: str | None = None

    def take(self) -> None:
        """What it reports. Whether it is good, and a value or the reason."""
        self.done = True
        try:
            good, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(EXIT)
            good, value = False, f"ended without a result, exit code {self.process.exitcode}"
        self.result, self.failure = (value, None) if good else (None, value)


class _Crew:
    """Ranks of one process group. To each call of theirs they are sent b"tidy" or b"leave" once all have reported."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="rtp_ranks_")
        self.ranks: list[_Rank] = []
        self.ran: list[str] = []

    def start(self, ranks: int, group_timeout: float) -> None:
        context = multiprocessing.get_context("forkserver")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the server process inherits it when it starts
        context.set_forkserver_preload(PRELOADED)
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_main, args=(rank, ranks, there, self.folder.name, group_timeout), name=f"rank {rank}"
            )
            process.start()
            there.close()
            self.ranks.append(_Rank(process, here))

    def run(self, fn: Callable[..., Any], args: tuple, timeout: float, lost: frozenset[int]) -> list[Any]:
        __tracebackhide__ = True
        self.ran.append(fn.__qualname__)
        work = tempfile.mkdtemp(dir=self.folder.name)
        for rank in self.ranks:
            rank.done, rank.result, rank.failure = False, None, None
        self._send(*(bytes(ForkingPickler.dumps((fn, args, work))) for _ in self.ranks))  # a tensor arrives once
        self._collect(lost, time.monotonic() + timeout, timeout)
        shutil.rmtree(work, ignore_errors=True)
        return [rank.result for rank in self.ranks]

    def tidy_up(self) -> bool:
        """Whether they can run something else."""
        self._send(b"tidy")
        deadline = time.monotonic() + EXIT
        pending = list(self.ranks)
        while pending and (ready := wait([rank.pipe for rank in pending], max(0.0, deadline - time.monotonic()))):
            for rank in [rank for rank in pending if rank.pipe in ready]:
                rank.take()
                pending.remove(rank)
        if pending:
            self._refuse(pending[0], f"did not tidy up within {EXIT} s of its result:\n{self._stacks()}")
        for rank in self.ranks:
            if rank.failure is not None:
                self._refuse(rank, f"failed to tidy up:\n{rank.failure}")
            if rank.result is not None and (log := os.environ.get("RTP_RANKS_LOG")):
                with open(log, "a") as file:
                    file.write(f"{self.ran[-1]}: {rank.result}\n")
        return all(rank.result is None for rank in self.ranks)

    def end(self, lost: frozenset[int] = frozenset()) -> None:
        for number in lost:
            self.ranks[number].process.kill()
        self._send(b"leave")
        for number, rank in enumerate(self.ranks):
            rank.process.join(EXIT)
            if rank.process.exitcode is None:
                self._refuse(rank, f"did not end within {EXIT} s of its result:\n{self._stacks()}")
            if rank.process.exitcode != 0 and number not in lost:
                self._refuse(rank, f"ended with exit code {rank.process.exitcode}")

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
            rank.pipe.close()
        self.folder.cleanup()

    def _send(self, *messages: bytes) -> None:
        """One to all, or one to each."""
        for number, rank in enumerate(self.ranks):
            with contextlib.suppress(BrokenPipeError):
                rank.pipe.send_bytes(messages[number % len(messages)])

    def _refuse(self, rank: _Rank, what: str) -> NoReturn:
        raise RankError(f"rank {self.ranks.index(rank)} {what}")

    def _collect(self, lost: frozenset[int], deadline: float, timeout: float) -> None:
        __tracebackhide__ = True
        failed: list[int] = []
        while pending := [n for n, rank in enumerate(self.ranks) if not rank.done and n not in lost]:
            left = deadline - time.monotonic()
            if left <= 0 and not failed:
                raise RankError(
                    f"ranks {pending} did not finish within {timeout} s. Stacks of all threads:\n{self._stacks()}"
                )
            if left <= 0:
                break
            ready = wait([self.ranks[number].pipe for number in pending], left)
            for number in pending:
                rank = self.ranks[number]
                if rank.pipe in ready:
                    rank.take()
                    if rank.failure is not None:
                        failed.append(number)
                        deadline = min(deadline, time.monotonic() + GRACE)
        if failed:
            raise RankError("\n".join(f"rank {number}:\n{self.ranks[number].failure}" for number in failed))

    def _stacks(self) -> str:
        for rank in self.ranks:
            if rank.process.is_alive():
                os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        texts = []
        for number in range(len(self.ranks)):
            file = Path(self.folder.name) / f"stack{number}"
            text = file.read_text() if file.exists() else ""
            texts.append(f"rank {number}:\n{text or 'no stack: it has ended or is stopped'}")
        return "\n".join(texts)


_kept: dict[int, _Crew] = {}  # by the number of ranks
atexit.register(end_ranks)


def _main(rank: int, ranks: int, pipe: Connection, folder: str, group_timeout: float) -> None:
    import torch
    import torch.distributed as dist
    from surroundings import Surroundings

    # What the server has imported is no garbage: to look through it takes longer than all else that a start does, and
    # copies the pages that the server shares.
    gc.freeze()
    torch.set_num_threads(1)
    with open(Path(folder) / f"stack{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        found: Surroundings | None = None
        # Nobody leaves before everybody is finished: a neighbour may still be reading what this rank sent.
        while (message := _received(pipe)) != b"leave":
            try:
                if message == b"tidy":
                    assert found is not None
                    left_behind = found.difference()
                    gc.freeze()
                    reply = pickle.dumps((True, left_behind))
                else:
                    if found is None:
                        dist.init_process_group(
                            "gloo",
                            init_method=f"file://{folder}/rendezvous",
                            rank=rank,
                            world_size=ranks,
                            timeout=timedelta(seconds=group_timeout),
                        )
                        found = Surroundings()
                    fn, args, work = pickle.loads(message)
                    found.renew()
                    found.watch()
                    os.environ["RTP_RECORD_DIR"] = work
                    reply = pickle.dumps((True, fn(rank, ranks, *args)))
            except BaseException:
                # The parent hears of it before anything here is taken down: what is torn down may hang.
                reply = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(reply)
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
    sys.stdout.flush()


def _received(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except EOFError:
        return b"leave"
