"""Runs a function on several ranks of this machine and returns the results, or raises their errors.

    def work(rank, ranks, scale):          # module level, so that it can be pickled
        ...
        return value

    values = run_ranks(work, 4, 2.0)

A test that is a function of a rank as a whole:

    @on_ranks([2, 3])
    def test_of_a_ring(rank, ranks, ring): ...

The ranks are forked from a server process that has imported torch and the package already, so that a start takes a
fraction of a second. One start should still run many cases: see `Cases`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE = 2.0  # seconds that the other ranks have to report their own failure after the first one
EXIT = 20.0  # seconds that a rank may take to end after all ranks have reported
# Modules that ranks find imported: each rank would need half a second and more to import them.
PRELOADED = [
    "pytest",
    "torch._dynamo",  # the first DTensor would import it
    "torch._dynamo.backends.common",  # and the first compiled graph this and the next two
    "torch._inductor.debug",
    "torch._inductor.pattern_matcher",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "rtp_ext.convert",
    "rtp_ext.nn",
    "rtp_ext.parameters.loading",
    "rtp_ext.observe",
    "rtp_ext.planner",
    "peft",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "python_tests.support.shared",  # these two are found where tests are started in the root
    "python_tests.support.huge_pages",
]


class RankError(AssertionError):
    """One or more ranks failed. The message holds the traceback of each, in the order in which they failed."""


@dataclass(eq=False)
class _Rank:
    process: Any
    pipe: Connection
    done: bool = False
    result: Any = None
    failure: str | None = None


@dataclass
class Cases:
    """Many cases in one function of a rank. A failed comparison does not end the rank; any other error does.

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
    group_timeout: float = 60.0,
    fresh: bool = False,
) -> list[Any]:
    """Calls `fn(rank, ranks, *args)` in `ranks` processes that share a Gloo process group.

    Args:
        fn: a module-level function; its result and `args` must pickle.
        timeout: seconds until the stacks of all ranks are dumped and everything is killed.
        lost: ranks that will kill or stop themselves. They return None, and are killed once the others have ended; one
            that fails before is a failure.
        group_timeout: seconds, of the default process group.
        fresh: new processes, which import everything: a fork cannot use CUDA once any module has counted the GPUs.

    Returns:
        The results, by rank.

    Raises:
        RankError: with the tracebacks of the ranks that failed, or the stacks of those that hang. The first failure
            ends the other ranks.
    """
    __tracebackhide__ = True
    context = multiprocessing.get_context("spawn" if fresh else "forkserver")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the server process inherits it when it starts
    if not fresh:
        context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="rtp_ranks_") as folder:
        started = []
        try:
            for rank in range(ranks):
                here, there = context.Pipe()
                process = context.Process(
                    target=_main, args=(fn, rank, ranks, args, there, folder, group_timeout), name=f"rank {rank}"
                )
                process.start()
                there.close()
                started.append(_Rank(process, here))
            _collect(started, frozenset(lost), time.monotonic() + timeout, timeout, Path(folder))
            return [rank.result for rank in started]
        finally:
            for rank in started:
                if rank.process.is_alive():
                    rank.process.kill()
                rank.process.join()
                rank.pipe.close()


def on_ranks(
    ranks: int | Sequence[Any] | None = None,
    *,
    timeout: float = 120.0,
    lost: Collection[int] = (),
    group_timeout: float = 60.0,
    ring_timeout: float = 30.0,
    **options: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test whose body runs on each of `ranks` ranks, with what it asks for by name.

    The body's parameters `rank` and `ranks` are numbers, `cases` is a `Cases` that is finished afterwards, and `ring` a
    Ring of all ranks that is closed afterwards. Parameters with other names are pytest's: their values must pickle. The
    ring also takes the values of those that are called `transport`, `route` and `in_place`.

    Args:
        ranks: number of ranks; a list is a parameter of the test. None: the test has a parameter `ranks` already.
        timeout, lost, group_timeout: see `run_ranks`.
        ring_timeout: seconds, of the ring.
        options: of the ring.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**values: Any) -> None:
            __tracebackhide__ = True
            count = values.pop("ranks", ranks)
            given = {"timeout": ring_timeout, **options}
            run_ranks(_run_body, count, test, given, values, timeout=timeout, lost=lost, group_timeout=group_timeout)

        names = [name for name in inspect.signature(body).parameters if name not in ("rank", "ranks", "ring", "cases")]
        if not isinstance(ranks, int):
            names.append("ranks")
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        if ranks is None or isinstance(ranks, int):
            return test
        import pytest  # programs that only run ranks do without it

        return pytest.mark.parametrize("ranks", ranks)(test)

    return decorate


def _run_body(rank: int, ranks: int, test: Any, options: dict[str, Any], values: dict[str, Any]) -> None:
    """Runs the body of a test that was pickled by its name, under which the module holds what `on_ranks` made of it."""
    import rtp_ext

    asked = inspect.signature(test.__wrapped__).parameters
    cases = Cases()
    given = {"rank": rank, "ranks": ranks, "cases": cases, **values}
    with contextlib.ExitStack() as stack:
        if "ring" in asked:
            own = {name: values[name] for name in ("transport", "route", "in_place") if name in values}
            given["ring"] = stack.enter_context(rtp_ext.Ring(**options, **own))
        test.__wrapped__(**{name: given[name] for name in asked})
    if "cases" in asked:
        cases.finish()


def _main(
    fn: Callable[..., Any], rank: int, ranks: int, args: tuple, pipe: Connection, folder: str, group_timeout: float
) -> None:
    import torch
    import torch._dynamo.guards
    import torch.distributed as dist
    from shards import copies_without_rules

    # The server's imports are no garbage: to scan them takes longer than the rest of a start, and
    # copies the pages that the server shares.
    gc.freeze()
    # torch flushes the processor's caches to time the guards of each graph, for a line of a log.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    copies_without_rules()
    torch.set_num_threads(1)
    os.environ["RTP_RECORD_DIR"] = folder
    with open(Path(folder) / f"stack{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=group_timeout),
            )
            message = pickle.dumps((True, fn(rank, ranks, *args)))
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
            # Report to the parent before the teardown, which may hang.
            pipe.send_bytes(message)
            message = b""
        if message:
            pipe.send_bytes(message)
        # No rank leaves before all ranks are finished: a neighbour may still read data of this rank.
        with contextlib.suppress(EOFError):
            pipe.recv_bytes()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
    sys.stdout.flush()


def _collect(ranks: list[_Rank], lost: frozenset[int], deadline: float, timeout: float, folder: Path) -> None:
    __tracebackhide__ = True
    order: list[int] = []
    while any(not rank.done for number, rank in enumerate(ranks) if number not in lost):
        pending = [rank for rank in ranks if not rank.done]  # those to be lost may fail before they are
        left = deadline - time.monotonic()
        if left <= 0 and not order:
            stacks = _stacks(ranks, folder)
            waiting = [number for number, rank in enumerate(ranks) if rank in pending and number not in lost]
            raise RankError(f"ranks {waiting} did not finish within {timeout} s. Stacks of all threads:\n{stacks}")
        if left <= 0:
            break
        ready = wait([rank.pipe for rank in pending], left)
        for number, rank in enumerate(ranks):
            if rank in pending and rank.pipe in ready:
                _take(rank, number in lost)
                if rank.failure is not None:
                    order.append(number)
                    deadline = min(deadline, time.monotonic() + GRACE)
    for number in lost:
        if not ranks[number].done and ranks[number].pipe.poll():
            _take(ranks[number], True)
            if ranks[number].failure is not None:
                order.append(number)
    if order:
        raise RankError("\n".join(f"rank {number}:\n{ranks[number].failure}" for number in order))
    for number in lost:
        ranks[number].process.kill()
    for rank in ranks:
        with contextlib.suppress(BrokenPipeError):
            rank.pipe.send_bytes(b"leave")
    for number, rank in enumerate(ranks):
        rank.process.join(EXIT)
        if rank.process.exitcode is None:
            raise RankError(f"rank {number} did not end within {EXIT} s of its result:\n{_stacks(ranks, folder)}")
        if rank.process.exitcode != 0 and number not in lost:
            raise RankError(f"rank {number} ended with exit code {rank.process.exitcode}")


def _take(rank: _Rank, lost: bool) -> None:
    """Receives the message of a rank; notes if the rank ended without one."""
    rank.done = True
    try:
        good, value = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, OSError):
        if lost:
            return
        rank.process.join(EXIT)
        good, value = False, f"ended without a result, exit code {rank.process.exitcode}"
    if not good:
        rank.failure = value
    elif not lost:
        rank.result = value


def _stacks(ranks: list[_Rank], folder: Path) -> str:
    for rank in ranks:
        if rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    texts = []
    for number in range(len(ranks)):
        file = folder / f"stack{number}"
        text = file.read_text() if file.exists() else ""
        texts.append(f"rank {number}:\n{text or 'no stack: it has ended or is stopped'}")
    return "\n".join(texts)
