"""Products of 16-bit operands in float32, as a GPU has them: the engine's own source on a simulated cuBLAS. A sum that
arrives elsewhere than it goes is added without a copy; rows of the logits start at multiples of 16 bytes."""

from collections import Counter
from itertools import product

import pytest
import simulated_cuda
import torch
from code_reference import dequantized
from reference import differs, random
from simulated_cuda import skip_without_headers
from torch.utils._python_dispatch import TorchDispatchMode

import rtp_ext
from rtp_ext.functional import rotated_linear_cross_entropy
from rtp_ext.recipes import quantize, recipe
from rtp_ext.ring.links import transports
from rtp_ext.ring.routes import route_planner

CANARY = 77.0


class Seen(TorchDispatchMode):
    """Notes the operators that are called, and where products go."""

    def __init__(self):
        super().__init__()
        self.calls, self.strides = Counter(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        self.calls[name] += 1
        if name == "aten::addmm" and kwargs and "out" in kwargs:
            self.strides.append((kwargs["out"].stride(0), kwargs["out"].element_size()))
        return function(*args, **(kwargs or {}))


def stored(values, by_columns, wide):
    room = torch.full((values.shape[0] + wide, values.shape[1] + wide), CANARY, dtype=values.dtype)
    room = room.t().contiguous().t() if by_columns else room
    view = room[: values.shape[0], : values.shape[1]]
    view.copy_(values)
    return view


@pytest.fixture
def sim_blas():
    skip_without_headers()
    with simulated_cuda.simulation() as module:
        yield module


def test_a_sum_that_lies_elsewhere_is_added_without_a_copy(sim_blas):
    generator = torch.Generator().manual_seed(1)
    for number in range(48):
        turned_a, turned_b, turned_out, wide = number & 1, number >> 1 & 1, number >> 2 & 1, 3 * (number >> 3 & 1)
        m, n, k = (int(torch.randint(1, 9, (1,), generator=generator)) for _ in range(3))
        dtype = torch.bfloat16 if number % 3 else torch.float16
        a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
        before = torch.randn(m, n, generator=generator)
        expected = before.double() + 0.25 * (a.double() @ b.double())
        out = stored(torch.zeros(m, n), turned_out, wide)
        summand = stored(before, turned_out, 2 * wide)
        a, b = stored(a, turned_a, wide), stored(b, turned_b, wide)
        counted = Counter(sim_blas.calls())
        with Seen() as seen:
            sim_blas.gemm_widening(out, summand, a, b, 0.25)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(summand, before)
        counted = Counter(sim_blas.calls()) - counted
        assert counted["cublasLtMatmul"] == 1 and counted["cublasGemmEx_64"] == 0, number
        assert seen.calls["aten::copy_"] == 0, number
    # Addends that cuBLASLt does not support are copied first: a bias, and a sum that is stored the other way.
    out, bias = torch.zeros(4, 6), torch.arange(6.0)
    a, b = torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(3, 6, dtype=torch.bfloat16)
    for other in (bias, stored(torch.ones(4, 6), True, 2)):
        sim_blas.gemm_widening(out, other, a, b, 1.0)
        assert torch.equal(out, other.expand(4, 6) + 3)


def test_without_a_kernel_of_cublaslt_the_sum_is_copied_first(sim_blas):
    a, b = torch.ones(5, 3, dtype=torch.bfloat16), torch.full((3, 7), 2.0, dtype=torch.bfloat16)
    out, summand = torch.full((5, 7), CANARY), torch.arange(35.0).view(5, 7)
    sim_blas.controls.lacks_products = True
    counted = Counter(sim_blas.calls())
    sim_blas.gemm_widening(out, summand, a, b, 0.5)
    counted = Counter(sim_blas.calls()) - counted
    assert counted["cublasGemmEx_64"] == 1 and counted["cublasLtMatmul"] == 0
    assert torch.equal(out, torch.arange(35.0).view(5, 7) + 3)


def test_a_kernel_that_cublaslt_refuses_is_not_tried_again(sim_blas):
    a, b = torch.ones(5, 3, dtype=torch.bfloat16), torch.full((3, 9), 2.0, dtype=torch.bfloat16)
    sim_blas.controls.refuses_products = True
    out, summand, counted = torch.empty(5, 9), torch.arange(45.0).view(5, 9), []
    for _ in range(2):
        out.fill_(CANARY)
        before = Counter(sim_blas.calls())
        sim_blas.gemm_widening(out, summand, a, b, 0.5)
        counted.append(Counter(sim_blas.calls()) - before)
        assert torch.equal(out, torch.arange(45.0).view(5, 9) + 3)
    assert [each["cublasLtMatmul"] for each in counted] == [1, 0]
    assert [each["cublasGemmEx_64"] for each in counted] == [1, 1]


ONE, OUTER, OF_32, OF_128, OF_128X128 = range(5)
KINDS = {"float8_tensorwise": (ONE, ONE), "float8_rowwise": (OUTER, OUTER), "float8_blockwise": (OF_128, OF_128X128)}
KINDS |= {"float8_rowwise_with_gw_hp": (OUTER, OUTER), "mxfp8": (OF_32, OF_32)}


def test_products_of_codes_add_to_their_sums(sim_blas):
    """dx = dy W of each recipe, with scales in the layouts of a GPU, in one call; a control with another scale."""
    for name, dtype, (m, k, n) in product(KINDS, (torch.float32, torch.bfloat16), ((7, 256, 384), (130, 640, 128))):
        chosen = recipe(name)
        dy, weight = random(m, k, dtype=torch.float32, seed=m), random(k, n, dtype=torch.float32, seed=n)
        left, right = quantize(chosen.gradients, dy, gpu=True), quantize(chosen.planes[-1], weight, gpu=True)
        exact = dequantized(left).double() @ dequantized(right).double()
        before, kinds = random(m, n, dtype=dtype, seed=1), KINDS[name]
        of_a, of_b = left.scales, right.scales
        if kinds[1] == OUTER:
            of_b = of_b.expand(1, n).contiguous()
        b = right.codes if chosen.planes[-1].transposed else right.codes.t().contiguous().t()
        for given, alpha in ((None, 1.0), (before, 1.0), (before.clone(), 0.25)):
            out = before if given is before else torch.full((m, n), CANARY, dtype=dtype)
            expected = alpha * exact + (0 if given is None else given.double())
            counted = Counter(sim_blas.calls())
            with Seen() as seen:
                assert sim_blas.gemm_scaled(out, given, left.codes, of_a, kinds[0], b, of_b, kinds[1], alpha), name
            assert (Counter(sim_blas.calls()) - counted)["cublasLtMatmul"] == 1 and not seen.calls["aten::add"]
            rounding = {"atol": 1e-3, "rtol": 2.0**-8 if dtype == torch.bfloat16 else 1e-5}
            torch.testing.assert_close(out.double(), expected, **rounding)
            assert not torch.allclose(out.double(), expected + 0.1 * exact, **rounding), "control"


def test_scales_of_slices_and_of_joined_shards(sim_blas):
    """dW = dy^T x of shards in blocks along tokens, and y of shards whose scales lie without gaps. cuBLASLt takes no
    strides of scales."""
    chosen = recipe("float8_blockwise")
    of_dy, of_x = chosen.weight_gradient
    dy, x = random(384, 256, dtype=torch.float32, seed=1), random(384, 16, dtype=torch.float32, seed=2)
    dy *= torch.arange(1, 385).unsqueeze(1)
    whole, right = quantize(of_dy, dy, gpu=True), quantize(of_x, x, gpu=True)
    part = slice(128, 192)
    codes, scales = whole.codes[:, part].t(), whole.scales[:, part].t()
    joined = torch.cat([scales[:32], scales[32:]])
    exact = dequantized(whole)[:, part].t().double() @ dequantized(right).double()
    for each in (scales, joined):
        out = torch.empty(64, 16)
        assert sim_blas.gemm_scaled(out, None, codes, each, OF_128, right.codes, right.scales, OF_128, 1.0)
        torch.testing.assert_close(out.double(), exact, atol=0.1, rtol=1e-4)
        read = each.as_strided(each.shape, (1, len(each)))
        assert sim_blas.gemm_scaled(out, None, codes, read, OF_128, right.codes, right.scales, OF_128, 1.0)
        assert differs(out.double(), exact, 0.01), "control: as they are read without a copy"
    tokens = quantize(chosen.tokens, x.t().contiguous(), gpu=True)
    weight = quantize(chosen.forward, dy.t().contiguous(), gpu=True)
    dense = weight.scales.contiguous()
    assert dense.stride() != weight.scales.stride(), "control"
    for each in (weight.scales, dense):
        out = torch.empty(16, 256)
        given = (weight.codes.t(), each.t(), OF_128X128)
        assert sim_blas.gemm_scaled(out, None, tokens.codes, tokens.scales, OF_128, *given, 1.0)
        exact = dequantized(tokens).double() @ dequantized(weight).double().t()
        torch.testing.assert_close(out.double(), exact, atol=0.1, rtol=1e-4)


def test_products_of_codes_without_a_kernel(sim_blas):
    """Are refused without side effects: codes that are not contiguous along what is summed, scales of two kinds, and
    a cuBLASLt that lacks them."""
    left, right, deep = (torch.ones(16, k).to(torch.float8_e4m3fn) for k in (16, 16, 32))
    out, one = torch.full((16, 16), CANARY), torch.ones(1)

    def refused(a, b, kind=ONE):
        found = sim_blas.gemm_scaled(out, None, a, one, ONE, b, one, kind, 1.0)
        return not found and bool((out == CANARY).all())

    assert refused(left, right) and refused(left, right.t(), OUTER)
    sim_blas.controls.lacks_products = True
    assert refused(deep, deep.t())
    sim_blas.controls.lacks_products = False
    assert not refused(left, right.t())


def test_epilogues_add_the_bias_and_apply_the_gelu(sim_blas):
    """In the strided slices that a bundle keeps; rounded once. Only the tanh form is a GELU of cuBLASLt's."""
    generator = torch.Generator().manual_seed(2)
    gelu = torch.nn.functional.gelu
    for number in range(24):
        biased, kept, activated, dtype = number & 1, number >> 1 & 1, number >> 2 & 1, torch.bfloat16
        dtype = torch.float16 if number >= 16 else dtype
        m, n, k = (int(torch.randint(1, 40, (1,), generator=generator)) for _ in range(3))
        a, b = torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, k, generator=generator).to(dtype).t()
        odd = torch.randn(n + 1, generator=generator).to(dtype)
        bias = odd[number // 8 % 2 :][:n] if biased or not activated else None  # also at an odd address
        out = torch.full((m, n + 16), CANARY, dtype=dtype)[:, 8 : 8 + n]
        before = torch.full((m, -(-n // 8) * 8 + 16), CANARY, dtype=dtype)[:, 8 : 8 + n] if kept and activated else None
        counted = Counter(sim_blas.calls())
        with Seen() as seen:
            assert sim_blas.gemm_epilogue(out, before, bias, a, b, bool(activated))
        counted = Counter(sim_blas.calls()) - counted
        assert counted["cublasLtMatmul"] == 1 and seen.calls["aten::copy_"] == 0
        pre = a.double() @ b.double() + (0 if bias is None else bias.double())
        expected = gelu(pre, approximate="tanh") if activated else pre
        rounding = {"atol": 1e-3, "rtol": 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11}
        torch.testing.assert_close(out.double(), expected, **rounding)
        if before is not None:
            torch.testing.assert_close(before.double(), pre, **rounding)
        if activated and n * m > 20:  # the control
            assert not torch.allclose(out.double(), pre, **rounding)


def test_epilogues_that_cannot_be_leave_the_work_to_others(sim_blas):
    a, b, bias = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((4, 8), (8, 6), (6,)))
    out = torch.full((4, 6), CANARY, dtype=torch.bfloat16)

    def refused(out=out, before=None, bias=bias, a=a, b=b):
        found = sim_blas.gemm_epilogue(out, before, bias, a, b, before is not None)
        return not found and bool((out == CANARY).all())

    assert refused(out=out.float(), bias=bias.float(), a=a.float(), b=b.float())  # torch decides about TF32
    assert refused(out=torch.full((6, 4), CANARY, dtype=torch.bfloat16).t())  # stored by columns
    assert refused(before=torch.empty(4, 6, dtype=torch.bfloat16))  # rows of 12 bytes
    assert refused(bias=torch.ones(6, 2, dtype=torch.bfloat16)[:, 0])
    sim_blas.controls.lacks_epilogues = True
    assert refused(a=torch.ones(4, 9, dtype=torch.bfloat16), b=torch.ones(9, 6, dtype=torch.bfloat16))
    sim_blas.controls.lacks_epilogues = False
    assert not refused()


def test_rows_of_logits_are_aligned():
    """50257 over 8 ranks is 6283 entries a shard: here 4 ranks of 7."""
    ring = rtp_ext.Ring.emulated(4)
    weight, x = torch.randn(7, 6, requires_grad=True), torch.randn(300, 6, requires_grad=True)
    targets = torch.randint(28, (300,))
    with Seen() as seen:
        rotated_linear_cross_entropy(x, weight, targets, ring=ring).backward()
    logits = [stride for stride, _ in seen.strides if stride in (7, 8)]
    assert logits and set(logits) == {8}, seen.strides


def test_weights_and_gradients_share_a_link_and_sums_cost_memory_traffic():
    link = route_planner.Link(100e9, 0.0, "assumed")
    fast = route_planner.Device(1e15, 0, 0.0, "assumed")
    layer = route_planner.LayerSize(8192, 4096, 2, 4)
    forward_only = 8 * route_planner.gemm_seconds(fast, 64, 1024, 4096)
    hop = 1024 * 4096 * (2 + 4) / 100e9  # both, one after the other
    assert route_planner.predict(8, 64, layer, link, fast)["rotate"] > forward_only + 7 * hop
    slow = route_planner.Device(1e15, 0, 0.0, "assumed", memory_bytes_per_second=1e12)
    assert route_planner.gemm_seconds(slow, 1000, 1000, 1, 8) == pytest.approx(8e-6, rel=1e-3)
    assert route_planner.gemm_seconds(fast, 1000, 1000, 1, 8) == pytest.approx(2e-9)


def test_launches_of_communicators_are_put_in_order(monkeypatch, caplog):
    monkeypatch.delenv(transports.LAUNCH_ORDER, raising=False)
    assert "is not set" in transports.launch_order_problem()
    transports.order_launches()
    assert transports.os.environ[transports.LAUNCH_ORDER] == "1" and transports.launch_order_problem() is None
    monkeypatch.setenv(transports.LAUNCH_ORDER, "0")
    transports.order_launches()
    assert transports.os.environ[transports.LAUNCH_ORDER] == "0" and "may wait for each other" in caplog.text
