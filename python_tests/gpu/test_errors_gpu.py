"""Failures on a GPU become errors of the documented kind, and the ring reports why it failed."""

import pytest
import torch
from support import emulated, record, run_gpu_ranks

import rtp_ext
from rtp_ext.functional import rotated_linear

pytestmark = pytest.mark.alone

KEPT: list = []  # by a process whose GPU is broken: what is not freed cannot fail
TRAP = 'extern "C" __global__ void stop_here(int* anything) { asm volatile("trap;"); }'


def test_unknown_devices_and_links():
    with pytest.raises(RuntimeError):
        rtp_ext.Ring.emulated(2, device="cuda:99")
    ring = emulated(2, link="sm-local")
    ring.close()
    for link in ("nvlink", "ce-local:3", "nccl-self:0", ""):
        with pytest.raises(ValueError, match="link"):
            rtp_ext.Ring.emulated(2, device="cuda", link=link)


def test_a_closed_ring_says_so():
    ring = emulated(2)
    weight = torch.ones(8, 8, device="cuda")
    rotated_linear(weight, weight, ring=ring)
    ring.close()
    with pytest.raises(rtp_ext.RotationError, match="it was closed"):
        rotated_linear(weight, weight, ring=ring)


@pytest.mark.real_gpu("its memory has a limit")
def test_too_little_memory_leaves_a_working_ring():
    """A slot that does not fit is torch's error; nothing has travelled by then."""
    ring = emulated(2)
    shard = torch.ones(32 << 20, device="cuda")  # 128 MiB
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (16 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            for _ in ring.rotate(shard):
                pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert ring.alive and ring.hops("weight") == 0
    small = torch.arange(5.0, device="cuda")
    for values in (small, shard[:1000]):
        assert all(torch.equal(view, values) for _, view in ring.rotate(values))


def _meets_a_broken_gpu(rank, ranks):
    """A kernel that traps makes every later CUDA call of its process fail."""
    ring = emulated(2)
    shard = torch.ones(1024, device="cuda")
    KEPT.extend((ring, shard))
    for _ in ring.rotate(shard):  # allocates the slots
        pass
    torch.cuda.synchronize()
    torch.cuda._compile_kernel(TRAP, "stop_here")((1, 1, 1), (1, 1, 1), [shard])
    try:
        torch.cuda.synchronize()
        return "the kernel did not trap"
    except RuntimeError:
        pass
    messages = []
    for _ in range(2):
        try:
            for _owner, _view in ring.rotate(shard):
                pass
            messages.append(("nothing", ""))
        except RuntimeError as error:
            messages.append((type(error).__name__, str(error)))
    return messages


@pytest.mark.real_gpu("a kernel traps")
def test_a_broken_gpu_is_a_cuda_error():
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip(f"torch {torch.__version__} compiles no kernels at run time (torch.cuda._compile_kernel)")
    (messages,) = run_gpu_ranks(_meets_a_broken_gpu, 1, timeout=60.0)
    record(test="broken GPU", errors=messages)
    assert messages[0][0] == "CudaError", messages
    assert "failed with code" in messages[0][1]
