"""Our kernels and the engine's GEMMs on a GPU: the checks that their PTX passes, and what only a GPU shows.

Under the CUDA sanitizer: compute-sanitizer python python_tests/kernels/kernel_sweep.py --runner cuda --cases 20
"""

import pytest
import torch
from gemm_checks import run_gemm_checks
from kernel_checks import CHECKS, run_checks
from reference import assert_same, differs, random
from torch_kernels import Torch

from rtp_ext._native import kernels


@pytest.mark.parametrize("kernel", CHECKS)
def test_kernels_match_float64(kernel):
    run_checks(Torch("cuda"), 100, names=[kernel])


def test_products_match_float64():
    run_gemm_checks("cuda", 400)


@pytest.mark.real_gpu("torch counts its memory")
def test_a_sum_of_16_bit_products_takes_no_temporary():
    """Straight into the float32 sum: no memory beyond what cuBLAS keeps as its workspace."""
    for dtype in (torch.bfloat16, torch.float16):
        dy = random(512, 1024, dtype=dtype, seed=1).cuda()
        x = random(512, 2048, dtype=dtype, seed=2).cuda()
        total = torch.ones(1024, 2048, device="cuda")
        kernels.gemm(total, total, dy.t(), x, 0.5)  # the first call makes the workspace
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kernels.gemm(total, total, dy.t(), x, 0.5)
        assert torch.cuda.max_memory_allocated() == before
        expected = 1 + dy.double().t() @ x.double()
        assert_same(total, expected, 1e-5, str(dtype))
        assert differs(total, expected - 1, 1e-5), "control: without the ones it started with"


def test_deterministic_algorithms_are_asked_for():
    ids = torch.randint(3, (4096,), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    values = random(4096, 257, dtype=torch.float32, seed=1).cuda()
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            sums = torch.zeros(3, 257, device="cuda")
            kernels.add_rows(sums, ids, values, 0, -1, 1.0)
            results.append(sums)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(results[0], other) for other in results[1:])
    free = torch.zeros(3, 257, device="cuda")
    kernels.add_rows(free, ids, values, 0, -1, 1.0)
    assert_same(free, results[0], 1e-5, "the kernel")


def test_kernels_follow_the_current_stream():
    up = random(2000, 3000, dtype=torch.bfloat16, seed=1).cuda()
    expected = torch.relu(up)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(up)
        torch.cuda._sleep(100_000_000)
        late.copy_(up)
        value = kernels.hidden_forward("relu", late)
        packed = torch.empty(up.shape, device="cuda")
        kernels.pack([value], [packed])
    stream.synchronize()
    assert torch.equal(value, expected) and torch.equal(packed, expected.float())


def test_no_host_synchronisation():
    up = random(100, 300, dtype=torch.bfloat16, seed=1).cuda()
    total = torch.zeros(300, 300, device="cuda")
    ids = torch.randint(100, (100,), device="cuda")
    table = torch.zeros(100, 300, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        value, d_pre, d_gate = kernels.hidden_backward("silu", up.clone(), up, up)
        kernels.gemm(total, total, value.t(), d_pre)
        kernels.add_rows(table, ids, d_gate, 0, -1, 1.0)
        kernels.pack([table], [torch.empty_like(table, dtype=torch.bfloat16)])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.alone
@pytest.mark.real_gpu("14 GB")
def test_more_elements_than_32_bits_count():
    rows, columns = 70_000, 32_768  # 2.3e9
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 3 * rows * columns * 2:
        pytest.skip("less than 14 GB of free GPU memory")
    up = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    up[-1] = torch.arange(columns, device="cuda") % 7 - 3
    dense = kernels.hidden_forward("relu", up)
    assert torch.equal(dense[-1], torch.relu(up[-1])) and not dense[:-1].any()
    del dense
    strided = kernels.hidden_forward("relu", up[:, 1:])
    assert torch.equal(strided[-1], torch.relu(up[-1, 1:])) and not strided[:-1].any()
