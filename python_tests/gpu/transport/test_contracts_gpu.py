"""What the engine relies on and no simulation can show, in the order in which a failure says most. Each check prints
what is expected and what a failure means. `benchmarks/gpu/first_day.sh ranks` runs them; docs/gpu.md, 'First day'."""

import copy
import os
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from gemm_checks import check_gemm
from models import make_batch, make_model, train
from reference import assert_same, full
from support import record, share_gpu
from test_transports_gpu import _ring, _run
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext

HOPS, REPLAYS = 1_000_000, 100_000
SECONDS = float(os.environ.get("RTP_CONTRACT_SECONDS", "40"))  # of a check that repeats itself, at most
HOP_US, LINK_GBPS = 20.0, 360.0

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def check(expected, means):
    """Says what a check expects, and what a failure of it means."""
    record(check=os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split(" ")[0], expected=expected, failing_means=means)


def _unequal_loss(model, rank, step, ranks):
    ids, targets = (tensor.cuda() for tensor in make_batch(rank, step, 6 + 4 * ((rank + step) % ranks)))
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def _unequal(rank, ranks, transport, log):
    share_gpu(rank, ranks, log)
    ring = _ring(init_device_mesh("cuda", (ranks,)), transport, prefetch=1)
    if isinstance(ring, str):
        return ring
    plain = make_model().cuda()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
    train(model, lambda step: _unequal_loss(model, rank, step, ranks), 6)
    train(plain, lambda step: sum(_unequal_loss(plain, each, step, ranks) for each in range(ranks)) / ranks, 6)
    for name, parameter in plain.named_parameters():
        assert_same(full(model.get_parameter(name)), parameter, 1e-9, name)
    sent, used = ring.communicator.executor.prefetched()
    ring.close()
    return sent, used


@pytest.mark.parametrize("transport", ["ce", "nccl"])
def test_prefetch_with_unequal_tokens(transport, tmp_path):
    check(
        "parameters of plain training",
        "ranks decide hops from facts that they do not share: nothing else can be trusted",
    )
    for sent, used in _run(_unequal, 2, transport, tmp_path):
        record(transport=transport, sent_ahead=sent, used=used)
        assert used > 0, "control: nothing was sent ahead"


def _stays_on_its_gpu(rank, ranks, transport, log):
    share_gpu(rank, ranks, log)
    ring = _ring(init_device_mesh("cuda", (ranks,)), transport)
    if isinstance(ring, str):
        return ring
    for _ in ring.rotate(torch.ones(1 << 20, device="cuda")):
        pass
    time.sleep(0.5)  # the watchdog has looked
    ring.close()
    asked = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    apps = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return len({line.split(",")[1].strip() for line in apps.splitlines() if line.split(",")[0] == str(os.getpid())})


@two_gpus
@pytest.mark.parametrize("transport", ["ce", "nccl"])
def test_no_context_on_another_gpu(transport, tmp_path):
    check("each process is on one GPU", "a thread restores device 0: 500 MiB of GPU 0 for every rank")
    assert _run(_stays_on_its_gpu, 2, transport, tmp_path) == [1, 1]


def _loses_one_with_layers_queued(rank, ranks, transport, log):
    share_gpu(rank, ranks, log)
    ring = _ring(init_device_mesh("cuda", (ranks,)), transport)
    if isinstance(ring, str):
        return ring
    ring.close()
    ring = rtp_ext.Ring(init_device_mesh("cuda", (ranks,)), transport=transport, timeout=5.0)
    shard = torch.ones(1 << 20, device="cuda")
    for _ in ring.rotate(shard):
        pass
    torch.cuda.synchronize()
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(rtp_ext.RotationError):
        for _ in range(30):
            for _ in ring.rotate(shard):
                pass
        while time.monotonic() - started < 30:
            ring.check_alive("a check")
            for _ in ring.rotate(shard):
                pass
            time.sleep(0.05)
    waited = time.monotonic() - started
    del ring
    torch.cuda.synchronize()  # an unmapped address would show here, in all that follows
    assert torch.ones(8, device="cuda").sum().item() == 8
    return waited


@pytest.mark.parametrize("transport", ["ce", "nccl"])
def test_a_rank_is_lost_with_30_layers_queued(transport, tmp_path):
    check(
        "RotationError within 15 s, and a GPU that still computes",
        "memory is unmapped under copies, or waits do not end",
    )
    waited = _run(_loses_one_with_layers_queued, 2, transport, tmp_path, lost=(1,))[0]
    assert waited < 15


def _random_hops(rank, ranks, transport, log):
    share_gpu(rank, ranks, log)
    ring = _ring(init_device_mesh("cuda", (ranks,)), transport)
    if isinstance(ring, str):
        return ring
    random, hops, started = np.random.default_rng(1), 0, time.monotonic()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    over = False
    while hops < HOPS and not over:
        for _ in range(50):
            size, value = int(random.integers(1, 1 << 16)), int(random.integers(1 << 20))
            for owner, view in ring.rotate(torch.full((size,), value + rank, dtype=torch.int64, device="cuda")):
                wrong += (view != value + owner).sum()
            hops += ranks - 1
        over = max(ring.exchange(time.monotonic() - started)) > SECONDS
    ring.close()
    return hops, wrong.item()


def test_random_hops_of_ce(tmp_path):
    check(f"no wrong number in {HOPS} hops or {SECONDS:.0f} s", "a flag arrives before the data it stands for")
    for hops, wrong in _run(_random_hops, 2, "ce", tmp_path):
        record(hops=hops, wrong=wrong)
        assert wrong == 0


def _link(rank, ranks, transport, log):
    share_gpu(rank, ranks, log)
    ring = _ring(init_device_mesh("cuda", (ranks,)), transport)
    if isinstance(ring, str):
        return ring
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in ring.rotate(torch.ones(16 << 20, device="cuda")):
            pass
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "ncclDevKernel" in event.key]
    copies = [event.key for event in profile.key_averages() if "Memcpy" in event.key]
    rate = ring.measure_link(256 << 20).bytes_per_second / 1e9
    ring.close()
    return rate, copies, kernels


@two_gpus
def test_copy_engines_carry_hops(tmp_path):
    check(
        f"copies in the trace, no kernels of NCCL, {LINK_GBPS:.0f} GB/s",
        "copies run on SMs, or the link is no NVLink 4",
    )
    for rate, copies, kernels in _run(_link, 2, "ce", tmp_path):
        record(gigabytes_per_second=rate, copies=copies)
        assert copies and not kernels and rate >= LINK_GBPS


def _replays(rank, ranks, transport, log):
    share_gpu(rank, ranks, log)
    ring = _ring(init_device_mesh("cuda", (ranks,)), transport, prefetch=0)
    if isinstance(ring, str):
        return ring
    shard, total = torch.full((4096,), 1.0 + rank, device="cuda"), torch.zeros(4096, device="cuda")

    def both_channels():
        total.zero_()
        for _, view in ring.rotate(shard):
            total.add_(view)
        total.add_(ring.collect(lambda owner, partial: partial.add_(shard), shard))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            both_channels()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            both_channels()
        done, started, over = 0, time.monotonic(), False
        while done < REPLAYS and not over:
            for _ in range(200):
                graph.replay()
            done += 200
            stream.synchronize()
            over = max(ring.exchange(time.monotonic() - started)) > SECONDS
    expected = 2.0 * sum(1.0 + other for other in range(ranks))
    wrong = (total != expected).sum().item()
    ring.close()
    return done, wrong


@pytest.mark.real_gpu("it captures")
@pytest.mark.parametrize("transport", ["ce", "nccl"])
def test_graphs_with_both_channels(transport, tmp_path):
    check(f"right sums after {REPLAYS} replays or {SECONDS:.0f} s", "a flag is raised when a replay begins, or is lost")
    for done, wrong in _run(_replays, 2, transport, tmp_path):
        record(transport=transport, replays=done, wrong=wrong)
        assert wrong == 0


def _starts(rank, ranks, transport, log, environment):
    os.environ.update(environment)
    share_gpu(rank, ranks, log)
    os.environ.update(environment)
    ring = _ring(init_device_mesh("cuda", (ranks,)), transport)
    if isinstance(ring, str):
        return ring
    seen = [view.sum().item() for _, view in ring.rotate(torch.ones(1000, device="cuda"))]
    ring.close()
    return seen


def _starts_lazily(rank, ranks, transport, log):
    return _starts(rank, ranks, transport, log, {"CUDA_MODULE_LOADING": "LAZY"})


def _starts_without_nvls(rank, ranks, transport, log):
    return _starts(rank, ranks, transport, log, {"NCCL_NVLS_ENABLE": "0"})


def test_cold_start_with_lazy_loading(tmp_path):
    check("a first pass ends", "code is loaded while a stream waits for a neighbour, which waits for it")
    assert _run(_starts_lazily, 2, "ce", tmp_path) == [[1000.0, 1000.0]] * 2


def test_windows_without_multicast(tmp_path):
    check(
        "ce works", "windows with flag 0 have no addresses of peers, or need multicast: see csrc/device/nccl/windows.h"
    )
    assert _run(_starts_without_nvls, 2, "ce", tmp_path) == [[1000.0, 1000.0]] * 2


def _host_time(rank, ranks, transport, log):
    share_gpu(rank, ranks, log)
    ring = _ring(init_device_mesh("cuda", (ranks,)), transport)
    if isinstance(ring, str):
        return ring
    shard, best = torch.ones(256, device="cuda"), float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        ring.exchange(None)
        started = time.perf_counter()
        for _ in range(10):
            for _ in ring.rotate(shard):
                pass
        best = min(best, (time.perf_counter() - started) / (10 * (ranks - 1)))
    ring.close()
    return best * 1e6


@pytest.mark.alone
@pytest.mark.parametrize("transport", ["ce", "nccl"])
def test_host_time_of_a_hop(transport, tmp_path):
    check(
        f"ce: at most {HOP_US:.0f} us, Python's generator and a compute step included",
        "docs/gpu.md predicts too little",
    )
    for microseconds in _run(_host_time, 2, transport, tmp_path):
        slower = transport == "ce" and microseconds > HOP_US  # a fact of this host, and no mistake
        record(transport=transport, host_us_per_hop=microseconds, expected_us=HOP_US, slower_than_expected=slower)
        assert 0 < microseconds < float("inf")


def test_products_in_float32():
    check(
        "200 random products as in float64",
        "a layout, or cuBLASLt with separate C and D, is wrong: no gradient is right",
    )
    for seed in range(200):
        check_gemm(np.random.default_rng(seed), "cuda")
