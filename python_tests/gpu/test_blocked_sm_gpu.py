"""Hops that need no SM: they complete while a kernel occupies every SM and waits for the host.

The control is an ordinary kernel on its own stream, launched at the same time: it must not complete before the blocking
kernel is released. The behaviour of links that use SMs is recorded, and not asserted; `ce-local` is one: an H100 copies
within its memory by SMs, also where cudaMemcpyFlagPreferOverlapWithCompute asks for a copy engine.
"""

import contextlib
import time

import pytest
import torch
from reference import random
from support import LINKS, emulated, record

pytestmark = [pytest.mark.alone, pytest.mark.real_gpu("a kernel occupies every SM")]

RANKS = 4
BYTES = 32 << 20
DEADLINE = 3.0  # seconds for the hops, which take milliseconds
LONGEST = 20  # seconds after which the blocking kernel ends by itself

# 1024 threads in a block, two blocks on an SM: all 2048 threads that it can hold. `words[0]` releases, and `words[1]`
# says that all blocks have started; they lie in pinned host memory. One thread of a block looks, now and then.
SOURCE = """
extern "C" __global__ void __launch_bounds__(1024, 2) block_all(int* started, int* words, int seconds) {
  if (threadIdx.x == 0) {
    volatile int* release = words;
    volatile int* everywhere = words + 1;
    if (atomicAdd(started, 1) == gridDim.x - 1) *everywhere = 1;
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
      __nanosleep(10000);
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (*release == 0 && now - start < 1000000000ull * seconds);
  }
  __syncthreads();
}
"""


class Blocker:
    """A kernel on every SM, from `start` until `release`."""

    def __init__(self) -> None:
        if not hasattr(torch.cuda, "_compile_kernel"):
            pytest.skip(f"torch {torch.__version__} compiles no kernels at run time (torch.cuda._compile_kernel)")
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        if properties.max_threads_per_multi_processor != 2048:
            pytest.skip(f"written for SMs of 2048 threads, not {properties.max_threads_per_multi_processor}")
        self.blocks = 2 * properties.multi_processor_count
        self.kernel = torch.cuda._compile_kernel(SOURCE, "block_all")
        self.stream = torch.cuda.Stream()
        self.words = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self.started = torch.zeros(1, dtype=torch.int32, device="cuda")

    def start(self) -> None:
        self.words.zero_()
        self.started.zero_()
        self.stream.wait_stream(torch.cuda.current_stream())
        arguments = [self.started, self.words, LONGEST]
        self.kernel((self.blocks, 1, 1), (1024, 1, 1), arguments, stream=self.stream)

    def wait_until_everywhere(self) -> None:
        deadline = time.monotonic() + DEADLINE
        while not self.words[1].item():
            assert time.monotonic() < deadline, f"{self.blocks} blocks have not all started within {DEADLINE} s"
            time.sleep(0.001)

    def release(self) -> None:
        self.words[0] = 1
        torch.cuda.synchronize()

    @contextlib.contextmanager
    def blocking(self):
        self.start()
        try:
            self.wait_until_everywhere()
            yield
        finally:
            self.release()


def completes(event: torch.cuda.Event, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if event.query():
            return True
        time.sleep(0.001)
    return event.query()


def rotate(ring, shard) -> torch.cuda.Event:
    """All hops of a rotation, enqueued on streams of the ring between two events of this one."""
    for _owner, _view in ring.rotate(shard):
        pass
    end = torch.cuda.Event()
    end.record()
    return end


def run(link: str, control: bool) -> bool:
    """Whether all hops of a rotation complete while every SM is occupied."""
    ring = emulated(RANKS, link=link)
    shard = random(BYTES // 8, dtype=torch.float64, seed=1).cuda()
    hops, plain, numbers = torch.cuda.Stream(), torch.cuda.Stream(), torch.ones(1024, device="cuda")
    blocker = Blocker()
    # everything that loads code or allocates memory, which may wait for the GPU, happens before
    with torch.cuda.stream(hops):
        rotate(ring, shard)
    with torch.cuda.stream(plain):
        numbers.add_(1)
    with blocker.blocking():
        pass
    before = ring.hops("weight")
    with blocker.blocking():
        with torch.cuda.stream(plain):
            numbers.add_(1)
            done = torch.cuda.Event()
            done.record()
        with torch.cuda.stream(hops):
            arrived = completes(rotate(ring, shard), DEADLINE if control else 0.5)
        ran = completes(done, 0.05)
    assert ring.hops("weight") - before == RANKS - 1
    assert not ran or not control, "control: an ordinary kernel ran although every SM was taken"
    assert completes(done, DEADLINE) and numbers[0].item() == 3
    ring.close()
    return arrived


def test_hops_over_the_host_need_no_sm():
    arrived = run("pcie", control=True)
    record(test="blocked SMs", link="pcie", completes=arrived)
    assert arrived, "the hops of link pcie waited for an SM"


@pytest.mark.parametrize("link", [link for link in LINKS if link != "pcie"])
def test_what_other_links_need_is_recorded(link):
    record(test="blocked SMs", link=link, completes=run(link, control=False))
