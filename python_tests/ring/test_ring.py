"""Ring, rotate and collect: order, values, counters, and loops that end early."""

import copy
import datetime
import pickle
import threading
import time
from itertools import product

import numpy
import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, run_ranks
from reference import chunk, random
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import rtp_ext
from rtp_ext.functional import rotated_linears

TIMEOUT = 30.0
TRANSPORTS = ["shm", "tcp", "c10d"]


def shard_of(owner: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Shards of different sizes; the one of owner 2 is empty."""
    rows = [3, 1, 0, 5][owner]
    return (torch.arange(rows * 2).view(rows, 2) + 20 * owner).to(dtype)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks([1, 2, 3, 4])
def test_rotate(rank, ranks, transport):
    for route in ("ring", "direct"):
        with rtp_ext.Ring(transport=transport, route=route, timeout=TIMEOUT) as ring:
            for dtype, reverse in product((torch.float64, torch.int32, torch.bfloat16, torch.bool), (False, True)):
                own = shard_of(rank, dtype)
                before = own.clone()
                seen = []
                for owner, view in ring.rotate(own, reverse=reverse):
                    assert view.dtype == dtype and torch.equal(view, shard_of(owner, dtype)), (owner, view)
                    seen.append(owner)
                step = 1 if reverse else -1
                assert seen == [(rank + step * s) % ranks for s in range(ranks)]
                assert torch.equal(own, before), "the local shard changed"
            # Several tensors travel together; one that is not contiguous is taken too.
            pair = [shard_of(rank), torch.full((2, 3), float(rank)).t()]
            for owner, (first, second) in ring.rotate(pair):
                assert torch.equal(first, shard_of(owner)) and torch.equal(second, torch.full((3, 2), float(owner)))
            # Arrays of other libraries, over DLPack.
            for owner, view in ring.rotate(numpy.full(4, rank, dtype=numpy.int64)):
                assert view.tolist() == [owner] * 4
            mesh = init_device_mesh("cpu", (ranks,))
            whole = random(5, 3, dtype=torch.float64, seed=1)
            own = DTensor.from_local(chunk(whole, ranks, rank), mesh, [Shard(0)], shape=(5, 3), stride=(3, 1))
            for owner, view in ring.rotate(own):
                assert torch.equal(view, chunk(whole, ranks, owner))
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        # Changing a view changes no shard but the one in hand, and only until it is dropped.
        own = torch.full((4,), float(rank))
        for owner, view in ring.rotate(own):
            if owner != rank:
                view.add_(1000.0)
        assert own.tolist() == [float(rank)] * 4


@on_ranks([2, 3])
def test_lists_that_cannot_travel(rank, ranks):
    """Every rank raises before anything travels."""
    emulated = rtp_ext.Ring.emulated(2)
    assert len(list(emulated.rotate([torch.ones(1)] * 13))) == 2, "one process may send any number"
    for transport in TRANSPORTS:
        with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
            over = [torch.ones(1)] * 13
            for many, text in (([], "at least one, got an empty list"), (over, "at most 12 .*, got 13")):
                with pytest.raises(ValueError, match=rf"rotate: expected .*{text}"):
                    ring.rotate(many)
                with pytest.raises(ValueError, match=rf"collect: expected .*{text}"):
                    ring.collect(lambda *_: None, many)
            x, weight = torch.ones(2, 6), torch.ones(3, 6)
            for projections in (
                [(1, 0, 0, 3 * ranks)],
                [(-1, 0, 0, 3 * ranks)],
                [(0, 1, 0, 3)],
                [(0, -1, 0, 3 * ranks)],
            ):
                with pytest.raises(
                    ValueError, match=r"projections \(input, layer, begin, end\) of 1 inputs and 1 layers"
                ):
                    rotated_linears([x], [weight], ring=ring, projections=projections)
            for inputs, weights in (([], [weight]), ([x], [])):
                with pytest.raises(ValueError, match=r"at least one input and one weight, got \d and \d"):
                    rotated_linears(inputs, weights, ring=ring)
            assert len(list(ring.rotate([torch.ones(1)] * 8))) == ranks
            with torch.device("meta"):  # where models are built
                assert ring.exchange("x" * rank) == ["x" * each for each in range(ranks)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks([2, 4])
def test_leaving_a_loop_early_serves_the_neighbours(rank, ranks, ring, transport):
    own = torch.full((3,), float(rank))
    for _ in range(3):
        for owner, _view in ring.rotate(own):
            if rank == 0:
                break  # neighbours still need what passes through here
            del owner
        with pytest.raises(KeyError, match="mistake"):
            for owner, _view in ring.rotate(own):
                if owner == 1:
                    raise KeyError("mistake")
    iterator = ring.rotate(own)
    next(iterator)
    del iterator
    assert [owner for owner, view in ring.rotate(own) if view.eq(owner).all()] == [
        (rank - s) % ranks for s in range(ranks)
    ]

    def add(owner, partial):
        partial += rank
        if rank == 1 and owner == 0:
            raise KeyError("mistake")

    if rank == 1:
        with pytest.raises(KeyError, match="mistake"):
            ring.collect(add, own)
    else:
        ring.collect(add, own)
    total = ring.collect(lambda owner, partial: partial.add_(1.0), own)
    assert total.tolist() == [float(ranks)] * 3
    assert ring.alive


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks([1, 2, 3, 4])
def test_collect_sums_over_ranks(rank, ranks, ring, transport):
    for dtype in (torch.float64, torch.int64):
        like = shard_of(rank, dtype)
        before, owners = like.clone(), []

        def add(owner, partial, dtype=dtype, owners=owners):
            assert partial.shape == shard_of(owner).shape and partial.dtype == dtype
            partial += shard_of(owner, dtype) * (rank + 1)
            owners.append(owner)

        total = ring.collect(add, like)
        assert torch.equal(total, shard_of(rank, dtype) * sum(range(1, ranks + 1)))
        assert torch.equal(like, before), "`like` changed"
        assert owners == [(rank + s) % ranks for s in range(1, ranks + 1)]
    first, second = ring.collect(
        lambda owner, parts: (parts[0].add_(owner), parts[1].add_(2.0)), [torch.empty(2), torch.empty(3)]
    )
    assert first.tolist() == [float(ranks * rank)] * 2 and second.tolist() == [2.0 * ranks] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks([1, 2, 4], route="ring")
def test_counters(ranks, ring, transport):
    own = torch.zeros(256, dtype=torch.float32)
    assert (ring.slot_count("weight").slots, ring.hops("weight"), ring.bytes_sent("weight")) == (0, 0, 0)
    for _ in range(3):
        for _owner, _view in ring.rotate(own):
            pass
    slots = min(ranks - 1, 2)
    count = ring.slot_count("weight")
    assert (count.slots, count.bytes, count.peak_slots, count.allocations) == (slots, slots * 1024, slots, slots)
    assert (ring.hops("weight"), ring.bytes_sent("weight")) == (3 * (ranks - 1), 3 * (ranks - 1) * 1024)
    assert ring.hops("gradient") == ring.slot_count("gradient").allocations == 0
    ring.reset_peak()
    assert (ring.slot_count("weight").peak_slots, ring.slot_count("weight").peak_bytes) == (0, slots * 1024)
    for _owner, _view in ring.rotate(torch.zeros(16)):
        pass
    assert ring.slot_count("weight").bytes == slots * 1024, "smaller shards use the slots there are"
    for _owner, _view in ring.rotate(torch.zeros(1024)):
        pass
    assert ring.slot_count("weight").bytes == slots * 4096, "larger slots replace smaller ones"
    with pytest.raises(ValueError, match="weight or gradient"):
        ring.slot_count("bias")


@on_ranks(2)
def test_attributes_and_arguments(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("rtp",))
    group = dist.new_group(list(range(ranks)))
    for source in (None, mesh, group):
        with rtp_ext.Ring(source, timeout=datetime.timedelta(seconds=TIMEOUT)) as ring:
            assert (ring.rank, ring.size, ring.device) == (rank, ranks, torch.device("cpu"))
            assert ring.transport == "shm" and ring.route in ("ring", "direct") and ring.alive
            assert ring.mesh.size() == ranks and (source is not mesh or ring.mesh is mesh)
        assert not ring.alive
        ring.close()
        with pytest.raises(rtp_ext.RotationError, match="closed"):
            next(ring.rotate(torch.zeros(2)))
    for options, error, text in (
        ({"transport": "carrier pigeon"}, ValueError, "shm.*'carrier pigeon'"),
        ({"route": "scenic"}, ValueError, "direct.*'scenic'"),
        ({"timeout": 0.0}, ValueError, "positive"),
        ({"transport": "nccl"}, (ValueError, rtp_ext.RotationError), "nccl"),
        ({"mesh_or_group": 3}, TypeError, "int"),
        ({"mesh_or_group": init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("a", "b"))}, ValueError, "dimension"),
    ):
        with pytest.raises(error, match=text):
            rtp_ext.Ring(**options)
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        assert copy.deepcopy(ring) is ring
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(ring)


@on_ranks(2)
def test_a_ring_that_refuses_to_close_stays_whole(rank, ranks):
    """As with a CUDA graph of the caller's that holds its hops: without groups, collectives would return wrong
    numbers."""

    class Held:
        def __init__(self, executor):
            self.executor = executor

        def __getattr__(self, name):
            return getattr(self.executor, name)

        def close(self):
            raise rtp_ext.RotationError("close: a graph")

    ring = rtp_ext.Ring(timeout=TIMEOUT)
    executor = ring.communicator.executor
    ring.communicator.executor = Held(executor)
    with pytest.raises(rtp_ext.RotationError, match="a graph"):
        ring.close()
    assert ring.alive and ring.exchange(rank) == [0, 1]
    assert ring.all_reduce(torch.tensor([rank + 1.0])).tolist() == [3.0]
    ring.communicator.executor = executor
    ring.close()
    assert not ring.alive


def test_a_ring_needs_a_process_group():
    with pytest.raises(rtp_ext.RotationError, match="init_process_group"):
        rtp_ext.Ring()


def test_emulated_ring():
    for size, rank in ((1, 0), (3, 2), (16, 5)):
        with rtp_ext.Ring.emulated(size, rank=rank) as ring:
            own = torch.full((2, 2), 7.0)
            seen = [(owner, view.tolist()) for owner, view in ring.rotate(own)]
            assert seen == [((rank - s) % size, own.tolist()) for s in range(size)]
            assert ring.collect(lambda owner, partial: partial.add_(1.0), own).tolist() == [[size] * 2] * 2
            assert (ring.transport, ring.hops("weight")) == ("emulated", size - 1)
    for size, rank in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(ValueError, match=f"size {size}, rank {rank}"):
            rtp_ext.Ring.emulated(size, rank=rank)


@on_ranks(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_rings_at_once(rank, ranks, transport):
    """Rings are independent for any order of use and close."""
    rings = [rtp_ext.Ring(transport=transport, timeout=TIMEOUT) for _ in range(4)]
    iterators = [ring.rotate(torch.full((64,), float(10 * number + rank))) for number, ring in enumerate(rings)]
    for _ in range(ranks):  # in step with each other
        for number, iterator in enumerate(iterators):
            owner, view = next(iterator)
            assert view.eq(10 * number + owner).all()
    assert all(next(iterator, None) is None for iterator in iterators)
    rings[1].close()
    rings[3].close()
    for number in (2, 0):
        assert [view[0].item() for _, view in rings[number].rotate(torch.tensor([rank]))] == [
            (rank - s) % ranks for s in range(ranks)
        ]
        rings[number].close()
    for _ in range(5):  # rings come and go
        with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
            assert len(list(ring.rotate(torch.zeros(3)))) == ranks


@on_ranks(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_while_others_finish(rank, ranks, transport):
    """A rank that finishes and closes does not disturb ranks that still run their last hops."""
    for slow in range(ranks):
        ring = rtp_ext.Ring(transport=transport, route="ring", timeout=TIMEOUT)
        seen = []
        for owner, view in ring.rotate(torch.full((4096,), float(rank))):
            assert view.eq(owner).all()
            seen.append(owner)
            if rank == slow:
                time.sleep(0.15)
        assert len(seen) == ranks
        ring.close()


def _wait_for_a_slow_rank(rank, ranks, transport):
    """Counts the runs of another Python thread of rank 0 while it waited for rank 1."""
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        visits = ring.rotate(torch.zeros(4))  # collective: from here on only hops hold a rank up
        if rank == 1:
            time.sleep(1.0)
            assert len(list(visits)) == ranks
            return None
        ticks, stop = [], threading.Event()

        def tick():
            while not stop.wait(0.01):
                ticks.append(time.monotonic())

        thread = threading.Thread(target=tick)
        start = time.monotonic()
        thread.start()
        assert len(list(visits)) == ranks
        end = time.monotonic()
        stop.set()
        thread.join()
        assert end - start > 0.5, "rank 1 was to be late"
        return sum(start < moment < end for moment in ticks)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_gil_is_released_while_a_rank_waits(transport):
    ticks = run_ranks(_wait_for_a_slow_rank, 2, transport)[0]
    assert ticks > 3, f"another thread ran {ticks} times in a second of waiting"
