"""Products leave SMs to the hops of NCCL: within a pass torch's carveout is what its hops take, and no longer."""

import warnings

import pytest
import torch
from native_options import rotation_options
from simulated_cuda import run_threads, skip_without_headers, values
from test_cuda_transports import CPU, TIMEOUT
from test_two_level_cuda import unique_ids

from rtp_ext import RotationError, _native

skip_without_headers()

CTAS, SMS = 4, 132


def carveout():
    return torch._C._get_sm_carveout_experimental()


@pytest.fixture(autouse=True)
def clean():
    assert carveout() is None
    yield
    torch._C._set_sm_carveout_experimental(None)


def begin(executor, backward):
    """Begins a forward, or a backward in which weights and gradients travel."""
    shapes, local = [[[4]] * 2], torch.ones(4)
    if not backward:
        return _native.Execution.rotate(executor, [local], shapes, "ring", False)
    options = rotation_options("ring", "a layer", torch.float32)
    return _native.Execution.backward(executor, [local], shapes, [local.clone()], shapes, options, True, False)


def product(sim):
    """Returns the number of SMs for which a product of this package launches; 0: all."""
    a, b, out = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, 2, dtype=torch.bfloat16), torch.zeros(2, 2)
    sim.gemm_widening(out, torch.ones(2, 2), a, b, 1.0)
    assert torch.equal(out, torch.full((2, 2), 9.0))
    return sim.last_multiprocessors()


@pytest.mark.parametrize(
    ("link", "each"), [(f"nccl-self:{CTAS}", CTAS), ("nccl-self:100", 100), ("nccl-self", None), ("ce-local", None)]
)
def test_a_pass_leaves_sms_to_its_hops(sim, link, each):
    sim.controls.multiprocessors = SMS
    executor = _native.Executor(sim.emulated(link), 0, 2, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's about the setting
        for backward in (False, True):
            expected = each and min(each * (1 + backward), SMS // 2)  # half of the SMs at most
            execution = begin(executor, backward)
            computes = 0
            while execution.next() is not None:
                computes += 1
                assert carveout() == expected
                assert product(sim) == (SMS - expected if expected else 0)
            assert computes >= 2 and carveout() is None and product(sim) == 0
    assert sim.mistakes() == []
    executor.close()


def test_passes_give_the_sms_back_in_any_order(sim):
    sim.controls.multiprocessors = SMS
    executor, other = (_native.Executor(sim.emulated(f"nccl-self:{ctas}"), 0, 2, CPU) for ctas in (CTAS, 7))
    first, second = begin(executor, False), begin(other, False)
    assert first.next() is not None and second.next() is not None and carveout() == CTAS
    first.finish()
    assert carveout() == CTAS, "the other one still runs"
    second.finish()
    assert carveout() is None
    executor.close(), other.close()


def test_a_pass_that_fails_gives_the_sms_back(sim):
    sim.controls.multiprocessors = SMS
    executor = _native.Executor(sim.emulated(f"nccl-self:{CTAS}"), 0, 2, CPU)
    execution = begin(executor, False)
    assert execution.next() is not None and carveout() == CTAS
    executor.fail("an error")
    with pytest.raises(RotationError, match="an error"):
        execution.next()
    assert carveout() is None, "although the pass still exists"
    assert execution is not None


def test_a_pass_that_is_left_and_one_inside_another_give_the_sms_back(sim):
    sim.controls.multiprocessors = SMS
    executor, other = (_native.Executor(sim.emulated(f"nccl-self:{ctas}"), 0, 2, CPU) for ctas in (CTAS, 7))
    outer = begin(executor, False)
    assert outer.next() is not None and carveout() == CTAS
    inner = begin(other, False)
    assert inner.next() is not None and carveout() == CTAS, "the outermost pass decides"
    inner.finish()
    assert carveout() == CTAS
    del outer
    assert carveout() is None
    executor.close(), other.close()


def test_a_carveout_of_the_user_stays(sim):
    sim.controls.multiprocessors = SMS
    torch._C._set_sm_carveout_experimental(20)
    executor = _native.Executor(sim.emulated(f"nccl-self:{CTAS}"), 0, 2, CPU)
    execution = begin(executor, True)
    while execution.next() is not None:
        assert carveout() == 20
    assert carveout() == 20
    torch._C._set_sm_carveout_experimental(None)
    execution = begin(executor, False)
    assert execution.next() is not None and carveout() == CTAS
    torch._C._set_sm_carveout_experimental(30)
    execution.finish()
    assert carveout() == 30, "one that is set within a pass, too"
    executor.close()


def test_sms_of_transports(sim):
    """NCCL's maximum where there is one; copy engines take none; two levels take those of both."""

    def work(rank, ids):
        plain = [sim.nccl(ids[ctas]["ring"], rank, 4, TIMEOUT, None, max_ctas=ctas) for ctas in (0, CTAS)]
        found = [sim.multiprocessors(each) for each in plain]
        kept = list(plain)
        for inner in ("ce", "nccl"):
            inside, between = sim.levels(rank, 4, 2, TIMEOUT, None)
            host = ids[inner]["hosts"][rank // 2]
            level = sim.ce_level(inside, host[0]) if inner == "ce" else sim.nccl_level(inside, host, CTAS)
            kept.append(_native.CompositeTransport(level, sim.nccl_level(between, ids[inner]["ring"], 3), rank, 2))
            found.append(sim.multiprocessors(kept[-1]))
        for transport in kept:
            _native.Executor(transport, rank, 4, CPU).close()
        return found

    ids = {key: unique_ids(sim, 2) for key in (0, CTAS, "ce", "nccl")}
    assert values(run_threads(work, 4, ids)) == [[0, CTAS, 3, CTAS + 3]] * 4
