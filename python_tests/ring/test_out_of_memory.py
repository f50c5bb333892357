"""A rank runs out of memory in the middle of a step but continues: the others name it within the timeout, and its next
call on the ring raises within the timeout, too. If all ranks catch the error, training continues."""

import contextlib
import os
import re
import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import on_ranks, run_ranks
from reference import assert_same, full
from torch import nn

import rtp_ext
from rtp_ext.functional import rotated_linear
from rtp_ext.nn import Flyweight

TIMEOUT = 4.0
PROMPT = TIMEOUT + 6.0  # some more for the scheduler
VICTIM = 1
NOTHING = 1 << 46  # numbers that no machine has memory for
ERRORS = (torch.OutOfMemoryError, MemoryError, RuntimeError)


class Small(nn.Linear):
    """A part of a copied structure; memory runs out in its second copy."""

    hungry = False

    def forward(self, x):
        if Small.hungry == "copies":
            Small.hungry = True
        elif Small.hungry is True:
            raise MemoryError("planted")
        return super().forward(x)


class Net(nn.Module):
    """Layers by kind of pass: of C++, of Python, gathered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 9), nn.LayerNorm(9)
        self.second, self.third = nn.Linear(9, 6), nn.Linear(6, 6)
        self.place = ""

    def forward(self, x):
        x = self.norm(self.first(x))
        if self.place == "forward":
            raise torch.OutOfMemoryError("planted")
        if self.place == "a product":  # its output is allocated before the first hop
            x = x[:1].expand(NOTHING, -1)
        x = self.second(x)
        if self.place == "backward":
            x.register_hook(_no_memory)
        return self.third(x)


def _no_memory(_gradient):
    raise MemoryError("planted")


def batch(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * rank + step))


@contextlib.contextmanager
def _memory_left(size):
    """Lets this process take `size` bytes more of its address space."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _steps_until_error(step):
    """The error that ends the steps, and the seconds since the last good one."""
    last = time.monotonic()
    for number in range(1000):
        try:
            step(number)
        except Exception as error:
            return error, time.monotonic() - last
        last = time.monotonic()
    raise AssertionError("no error")


def _goes_on(rank, ranks, step, ring, plant, clear):
    """Plants it on one rank, and continues on all until they get an error. Returns the error of this rank."""
    for number in range(3):
        step(number)
    dist.barrier()
    if rank == VICTIM:
        plant()
        with pytest.raises(ERRORS) as planted:
            step(3)
        assert not isinstance(planted.value, rtp_ext.RotationError), planted.value
        clear()
    error, seconds = _steps_until_error(step)
    assert isinstance(error, rtp_ext.RotationError), f"{type(error)}: {error}"
    assert seconds < PROMPT, f"{seconds} s: {error}"
    assert not ring.alive
    start = time.monotonic()
    with pytest.raises(rtp_ext.RotationError, match="cannot be used any more"):
        step(0)
    ring.close()
    assert time.monotonic() - start < PROMPT, "a dead ring answers at once"
    return str(error)


def _one_rank(rank, ranks, transport, folder):
    os.environ["RTP_RECORD_DIR"] = folder
    told = {}
    for place in ("forward", "a product", "backward"):
        model = rtp_ext.fully_rotate(Net(), transport=transport, timeout=TIMEOUT)

        def step(number, model=model):
            model.zero_grad()
            model(batch(rank, number)).sum().backward()

        def plant(model=model, place=place):
            model.place = place

        def clear(model=model):
            model.place = ""

        told[place] = _goes_on(rank, ranks, step, rtp_ext.ring_of(model), plant, clear)
        dist.barrier()
    ring = rtp_ext.Ring(transport=transport, timeout=TIMEOUT)
    torch.manual_seed(0)
    copies = Flyweight(Small(6, 9), ring, shard_dims={"weight": 0, "bias": 0})
    layer = rtp_ext.nn.RotatedLinear(9, 9, ring=ring)

    def step_of_copies(number):
        layer(copies(batch(rank, number))).sum().backward()

    def plant_in_copies():
        Small.hungry = "copies"

    def clear_copies():
        Small.hungry = False

    told["a pass from Python"] = _goes_on(rank, ranks, step_of_copies, ring, plant_in_copies, clear_copies)
    dist.barrier()
    return told


@pytest.mark.parametrize(("ranks", "transport"), few([(3, "c10d")], [(2, "c10d"), (3, "c10d"), (3, "tcp"), (2, "shm")]))
def test_a_rank_without_memory_that_goes_on(ranks, transport, tmp_path):
    told = run_ranks(_one_rank, ranks, transport, str(tmp_path), timeout=200.0)
    for place in told[0]:
        # who waits for it names it; who waits for one that does, names that one
        named = [rank for rank in range(ranks) if rank != VICTIM and re.search(r"rank 1\b", told[rank][place])]
        assert named, f"{place}: {[each[place] for each in told]}"
    assert list(Path(tmp_path).glob("rtp_record_*"))


@on_ranks(2, ring_timeout=60.0, slot_cap=0)
@pytest.mark.parametrize("transport", few(["tcp"], ["c10d", "tcp"]))
def test_slots_that_there_is_no_memory_for(rank, ring, transport):
    """Memory runs out within a pass when its slots are allocated: the ring ends at once and notifies its neighbours."""
    shard = torch.zeros(8000, 3000)  # 96 MB, and so is a slot: more than what the heaps of other threads have reserved
    small = rtp_ext.nn.RotatedLinear(8, 8, ring=ring)
    small(torch.ones(1, 8)).sum().backward()
    dist.barrier()
    start, limit = time.monotonic(), _memory_left(8 << 20) if rank == VICTIM else contextlib.nullcontext()
    with limit, pytest.raises(RuntimeError) as caught:
        rotated_linear(torch.ones(1, 3000), shard, ring=ring, name="large")
    assert time.monotonic() - start < 30.0, "not by the timeout"
    if rank == VICTIM:
        assert re.search("can't allocate memory|bad_alloc|allocate", str(caught.value)), caught.value
    else:
        assert isinstance(caught.value, rtp_ext.RotationError), caught.value
    assert not ring.alive
    for _ in range(2):
        with pytest.raises(rtp_ext.RotationError, match="cannot be used any more"):
            small(torch.ones(1, 8))


@on_ranks(2, ring_timeout=60.0, slot_cap=0, transport="c10d", group=2, collective=True)
def test_collectives_that_there_is_no_memory_for(rank, ring):
    """Gloo allocates in a collective: the rank whose memory runs out says so, and accuses no other."""
    shard = torch.zeros(8000, 3000)

    def forward():
        return rotated_linear(torch.ones(1, 3000), shard, ring=ring, name="large")

    forward()  # its slot is made
    dist.barrier()
    start, limit = time.monotonic(), _memory_left(8 << 20) if rank == VICTIM else contextlib.nullcontext()
    with limit, pytest.raises(rtp_ext.RotationError) as caught:
        forward()
    assert time.monotonic() - start < 30.0, "not by the timeout"
    own, told = "large forward, weight gather: an error of this rank: .*allocate memory", str(caught.value)
    if rank == VICTIM:
        assert re.match(own, told) and not isinstance(caught.value, rtp_ext.RingTimeout), told
    else:
        assert re.search("the first error was that of global rank 1: " + own, told), told
    assert not ring.alive


@on_ranks(3)
@pytest.mark.parametrize("transport", few(["c10d"], ["c10d", "shm"]))
def test_where_all_ranks_caught_it_training_goes_on(rank, ranks, transport):
    """The same batch is too large for all ranks, which then use a smaller one."""
    model, plain = rtp_ext.fully_rotate(Net(), transport=transport, timeout=30.0), Net()
    for place in ("forward", "a product", "backward"):
        model.place = place
        with pytest.raises(ERRORS):
            model(batch(rank, 0)).sum().backward()
        model.place = ""
        model.zero_grad(), plain.zero_grad()
        model(batch(rank, 1)).square().sum().backward()
        (sum(plain(batch(each, 1)).square().sum() for each in range(ranks)) / ranks).backward()
        for name, parameter in model.named_parameters():
            assert_same(full(parameter.grad), plain.get_parameter(name).grad, 1e-5, f"{place}: {name}")
    rtp_ext.ring_of(model).close()


def _on_one_process(_rank, _ranks):
    ring = rtp_ext.Ring.emulated(3)
    shard = torch.ones(32 << 20)
    for work in (
        lambda: list(ring.rotate(shard)),
        lambda: rotated_linear(torch.ones(1, 1 << 20), shard.view(32, 1 << 20), ring=ring),
    ):
        with _memory_left(64 << 20), pytest.raises(RuntimeError, match="allocate memory"):
            work()
    assert ring.alive and ring.hops("weight") == 0
    values = shard[:6].view(2, 3)
    x = torch.arange(6.0).view(2, 3)
    assert_same(rotated_linear(x, values, ring=ring), x @ values.t().repeat(1, 3), 1e-6, "y")
    for rotated in (shard[:1000], shard):
        assert sum(torch.equal(view, rotated) for _, view in ring.rotate(rotated)) == 3


def test_a_ring_of_one_process_works_after_a_slot_that_did_not_fit():
    run_ranks(_on_one_process, 1)
