"""The simulated CUDA runtime and NCCL guarantee the same orders as the real ones, and no others."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from simulated_cuda import run_threads, skip_without_headers, values

from rtp_ext import RingTimeout, RotationError, _native

skip_without_headers()

TIMEOUT = timedelta(seconds=10)


def number(value: float) -> torch.Tensor:
    return torch.full((64,), float(value))


def test_streams_run_side_by_side_and_events_order_them(sim):
    sim.controls.delay_us = 3000
    unordered = 0
    for _ in range(20):
        first, second, event = sim.Stream(), sim.Stream(), sim.Event()
        a, b, c = number(1), number(0), number(0)
        assert event.reached(), "an event that was never recorded blocked a stream"
        first.copy(b, a)
        event.record(first)
        a_later = number(2)
        first.copy(b, a_later)  # after the event: the copy below may or may not read it
        second.copy(c, b)  # not ordered
        second.synchronize()
        unordered += not c.eq(2).all()
        second.wait(event)
        second.copy(c, b)
        second.synchronize()
        assert event.reached() and c.ge(1).all()
        first.synchronize()
        assert first.idle() and b.eq(2).all()
    assert unordered > 0, "unordered streams always ran in order"


def test_a_stream_waits_for_a_value_in_memory(sim):
    waiting, writing = sim.Stream(), sim.Stream()
    flag, a, b = torch.zeros(1, dtype=torch.int32), number(1), number(0)
    waiting.copy(b, b)  # the first copy of a rank must not run while one of its streams waits
    waiting.synchronize()
    waiting.wait_value(flag, 2)
    waiting.copy(b, a)
    writing.write_value(flag, 1)
    writing.synchronize()
    time.sleep(0.02)
    assert not waiting.idle() and b.eq(0).all()
    writing.write_value(flag, 3)
    waiting.synchronize()
    assert b.eq(1).all()
    sim.controls.lacks_memory_ops = True
    with pytest.raises(RotationError, match="not found"):
        waiting.wait_value(flag, 2)


def test_sends_meet_receives_and_a_communicator_keeps_its_order(sim):
    ids, looked = [sim.unique_id()], threading.Event()

    def work(rank):
        comms = sim.Communicators(ids, rank, 2, TIMEOUT)
        streams = [sim.Stream(), sim.Stream()]
        data = [number(10 * rank + i) for i in range(2)]
        if rank == 0:  # on two streams: the communicator orders them
            for stream, tensor in zip(streams, data, strict=True):
                comms.send(0, stream, tensor, 1)
            time.sleep(0.05)
            idle = streams[0].idle()
            looked.set()
        else:
            looked.wait(20)
            idle = None
            for stream, tensor in zip(reversed(streams), data, strict=True):
                comms.receive(0, stream, tensor, 0)
        for stream in streams:
            stream.synchronize()
        comms.finalize()
        return idle, [tensor[0].item() for tensor in data]

    (idle, _), (_, received) = values(run_threads(work, 2))
    assert idle is False, "a send ended before its receive"
    assert received == [0.0, 1.0]


def test_an_abort_ends_what_a_missing_peer_leaves_waiting(sim):
    ids = [sim.unique_id()]

    def work(rank):
        comms = sim.Communicators(ids, rank, 2, TIMEOUT)
        stream = sim.Stream()
        if rank == 1:
            return None  # posts nothing
        comms.receive(0, stream, number(0), 1)
        time.sleep(0.05)
        hung = not stream.idle()
        sim.inject_error(0, 0, 6)
        error = comms.asynchronous_error()
        comms.abort()
        stream.synchronize()
        with pytest.raises(RotationError, match="closed"):
            comms.receive(0, stream, number(0), 1)
        return hung, error

    hung, error = values(run_threads(work, 2))[0]
    assert hung and "code 6" in error


def test_a_communicator_that_a_rank_never_joins_times_out(sim):
    start = time.monotonic()
    with pytest.raises(RingTimeout, match=r"start of a communicator.*waited"):
        sim.Communicators([sim.unique_id()], 0, 2, timedelta(milliseconds=100))
    assert time.monotonic() - start < 5


def test_a_compute_stream_of_its_own_is_not_the_hosts(sim):
    sim.controls.delay_us = 100000
    a, b = torch.ones(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    sim.launch_copy(b, a)
    assert b.eq(1).all(), "computes of the host must run at once"
    sim.set_compute(True)
    try:
        for _ in range(5):
            sim.launch_add(b, a)
        early = b[0].item()
        sim.synchronize()
        assert b.eq(6).all() and early < 6
    finally:
        sim.set_compute(False)


def test_the_module_shares_the_types_of_the_extension(sim):
    transport = sim.nccl([sim.unique_id(), sim.unique_id()], 0, 1, TIMEOUT, None)
    assert isinstance(transport, _native._C.Transport) and transport.name == "nccl"
    executor = _native.Executor(transport, 0, 1, torch.device("cpu"))
    executor.close()
