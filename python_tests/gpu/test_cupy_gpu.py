"""CuPy as an independent reference, with its own NCCL communicator and products; and arrays without copies."""

import importlib
from typing import Any

import pytest
import torch
from reference import TOLERANCE, assert_same, differs, random
from support import emulated, run_gpu_ranks, several_ranks_problem, share_gpu

import rtp_ext
from rtp_ext.functional import rotated_linear

try:
    cupy: Any = importlib.import_module("cupy")
    nccl: Any = importlib.import_module("cupy.cuda.nccl")  # which `import cupy` alone does not load
except ImportError:
    cupy = nccl = None
needs_nccl = pytest.mark.skipif(not getattr(nccl, "available", False), reason="this CuPy has no NCCL")
# Not `importorskip`: a command that names a test of a module that is skipped runs no test at all.
pytestmark = [
    pytest.mark.skipif(cupy is None, reason="CuPy is not installed"),
    pytest.mark.real_gpu("CuPy's arrays lie on GPUs alone"),
]

TOKENS, FEATURES, ROWS = 70, 48, 40  # of one shard
DTYPES = [torch.float64, torch.float32]


def nccl_dtype(array: Any) -> int:
    return {8: nccl.NCCL_FLOAT64, 4: nccl.NCCL_FLOAT32}[array.dtype.itemsize]


def operands(rank: int, ranks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, the local shard, and dy."""
    shard = random(ROWS, FEATURES, dtype=dtype, seed=rank, scale=FEATURES**-0.5).cuda().requires_grad_()
    x = random(TOKENS, FEATURES, dtype=dtype, seed=100 + rank).cuda().requires_grad_()
    return x, shard, random(TOKENS, ROWS * ranks, dtype=dtype, seed=200 + rank).cuda()


def same(actual: torch.Tensor, expected: Any, what: str) -> None:
    assert_same(actual, torch.from_dlpack(expected), TOLERANCE[actual.dtype], what)


@needs_nccl
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rotation_by_cupy(ranks, dtype):
    """One process: CuPy sends the shard to itself before every product, as the emulated ring's neighbour would."""
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    x, shard, dy = operands(0, ranks, dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        y = rotated_linear(x, shard, ring=emulated(ranks))
        y.backward(dy)
        in_hand, arriving = cupy.from_dlpack(shard.detach()).copy(), cupy.empty((ROWS, FEATURES), str(dtype)[6:])
        cx, cdy = cupy.from_dlpack(x.detach()), cupy.from_dlpack(dy)
        expected, dx = cupy.empty(y.shape, cx.dtype), cupy.zeros_like(cx)
        gradient = cupy.zeros_like(in_hand)
        for step in range(ranks):
            columns = slice(step * ROWS, (step + 1) * ROWS)
            expected[:, columns] = cx @ in_hand.T
            dx += cdy[:, columns] @ in_hand
            gradient += cdy[:, columns].T @ cx / ranks
            nccl.groupStart()
            comm.send(in_hand.data.ptr, in_hand.size, nccl_dtype(in_hand), 0, stream.cuda_stream)
            comm.recv(arriving.data.ptr, arriving.size, nccl_dtype(arriving), 0, stream.cuda_stream)
            nccl.groupEnd()
            in_hand, arriving = arriving, in_hand
    torch.cuda.synchronize()
    same(y.detach(), expected, "output")
    same(x.grad, dx, "input gradient")
    same(shard.grad, gradient, "weight gradient")
    assert differs(shard.grad, torch.from_dlpack(gradient * 2), TOLERANCE[dtype]), "control"


def _against_collectives(rank: int, ranks: int, log: str) -> None:
    share_gpu(rank, ranks, log)
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (ranks,))
    identifier: list[Any] = [nccl.get_unique_id() if rank == 0 else None]
    torch.distributed.broadcast_object_list(identifier, 0)
    comm = nccl.NcclCommunicator(ranks, identifier[0], rank)
    with rtp_ext.Ring(mesh, transport="nccl", timeout=45.0) as ring:
        for dtype in DTYPES:
            x, shard, dy = operands(rank, ranks, dtype)
            y = rotated_linear(x, shard, ring=ring)
            y.backward(dy)
            torch.cuda.synchronize()
            cx, cdy, mine = (cupy.from_dlpack(tensor.detach()) for tensor in (x, dy, shard))
            whole = cupy.empty((ROWS * ranks, FEATURES), mine.dtype)
            gradient = cupy.empty_like(mine)
            stream = cupy.cuda.get_current_stream()
            comm.allGather(mine.data.ptr, whole.data.ptr, mine.size, nccl_dtype(mine), stream.ptr)
            every = cupy.ascontiguousarray(cdy.T @ cx)
            comm.reduceScatter(
                every.data.ptr, gradient.data.ptr, gradient.size, nccl_dtype(every), nccl.NCCL_SUM, stream.ptr
            )
            stream.synchronize()
            same(y.detach(), cx @ whole.T, f"output {dtype}")
            same(x.grad, cdy @ whole, f"input gradient {dtype}")
            same(shard.grad, gradient / ranks, f"weight gradient {dtype}")


@needs_nccl
def test_collectives_by_cupy(tmp_path):
    """Two ranks: CuPy gathers the weight and scatters the gradient with its own communicator."""
    if (problem := several_ranks_problem(2)) is not None:
        pytest.skip(problem)
    run_gpu_ranks(_against_collectives, 2, str(tmp_path / "nccl"), timeout=60.0)


def test_arrays_change_hands_without_a_copy():
    ring = emulated(3)
    array = cupy.arange(24, dtype=cupy.float32).reshape(4, 6)
    seen = []
    for owner, view in ring.rotate(array):
        back = cupy.from_dlpack(view)
        assert back.data.ptr == view.data_ptr(), "from torch to CuPy"
        if owner == ring.rank:
            assert view.data_ptr() == array.data.ptr, "from CuPy to torch"
        seen.append(back.copy())
    assert len(seen) == 3 and all((each == array).all() for each in seen)

    def add(owner: int, partial: torch.Tensor) -> None:
        cupy.add(cupy.from_dlpack(partial), owner + 1, out=cupy.from_dlpack(partial))

    total = ring.collect(add, cupy.zeros((5,), dtype=cupy.float32))
    assert total.tolist() == [1.0 + 2 + 3] * 5
