"""Recipes of products in 8 bits: codes and scales bitwise as plain torch and torchao, shards as the whole weight."""

from dataclasses import replace

import pytest
import torch
from code_reference import dequantized, reference_amax, reference_codes, unswizzled
from reference import random

from rtp_ext._native import kernels
from rtp_ext.recipes import RECIPES, Codes, Plane, amax, empty, quantize, quantize_into, recipe

SHAPES = ((1, 1), (37, 53), (128, 256), (130, 257), (64, 96), (8, 1024))
PLANES = sorted(
    {
        plane
        for each in RECIPES.values()
        for plane in (*each.planes, each.tokens, each.gradients, *(each.weight_gradient or ()))
    },
    key=str,
)
SPECIAL = (0.0, -0.0, 1e-45, -3e-39, 1e-37, -1e-13, 9.9e-13, 1e-12, 3e38, -1e30, 447.9, 2.0**-7 * 1.0625, 464.0)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same_codes(left, right):
    """Whether codes are equal, with any sign of a NaN."""
    left, right = bits(left), bits(right)
    nan = (left & 127 == 127) & (right & 127 == 127)
    return bool(((left == right) | nan).all())


def same_scales(left, right):
    nan = left.float().isnan() & right.float().isnan()
    return bool((nan | (left.float() == right.float())).all()) and left.shape == right.shape


def matrices(rows, columns, dtype):
    """Random numbers of many magnitudes, special ones, zeros, and numbers that are not finite."""
    plain = random(rows, columns, dtype=torch.float32, seed=rows + columns)
    yield plain.to(dtype)
    yield (plain * 10 ** random(rows, 1, dtype=torch.float32, seed=1)).to(dtype)
    special = plain.clone()
    places = torch.arange(special.numel()) % 3 == 0
    special.view(-1)[places] = torch.tensor(SPECIAL).repeat(special.numel())[: int(places.sum())]
    special = special.to(dtype)
    special[special.isinf()] = 1
    yield special
    yield torch.zeros(rows, columns, dtype=dtype)
    yield torch.full((rows, columns), 1e-40).to(dtype)
    for wrong in (torch.inf, -torch.inf, torch.nan):
        broken = plain.to(dtype)
        broken[rows // 2, columns // 2] = wrong
        yield broken


@pytest.mark.parametrize("instructions", kernels.instruction_sets())
def test_codes_and_scales_are_those_of_plain_torch(instructions):
    before = kernels.instruction_set()
    kernels.set_instruction_set(instructions)
    try:
        controls = 0
        for plane in PLANES:
            for rows, columns in SHAPES:
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    for values in matrices(rows, columns, dtype):
                        what = f"{plane} {rows} x {columns} {dtype}"
                        largest = reference_amax(plane, values)
                        assert torch.equal(amax(plane, values).nan_to_num(-1), largest.nan_to_num(-1)), what
                        made = quantize(plane, values)
                        codes, scales = reference_codes(plane, values)
                        assert same_codes(made.codes, codes), what
                        assert same_scales(made.scales, scales), what
                        assert made.codes.t().is_contiguous() or not plane.transposed, what
                        if (rows, columns) == SHAPES[3] and values.isfinite().all() and values.float().std() > 0.5:
                            wrong, _ = reference_codes(plane, values, largest.flip(0, 1) * 3)
                            controls += not same_codes(made.codes, wrong)
        assert controls >= 3 * len(PLANES), "control: scales of the neighbor"
    finally:
        kernels.set_instruction_set(before)


def test_powers_of_two_are_those_of_a_logarithm_in_float32():
    """As torchao's: a factor whose logarithm rounds up to a whole number becomes the power of two above it."""
    powers = torch.arange(-60, 49).view(-1, 1)
    factors = torch.exp2(powers.double()) * (1 - 2.0**-24 * torch.arange(50))
    factors = factors[factors <= 448e12].view(-1, 1)
    largest = (448 / factors).float()
    scales = quantize(Plane((1, None), "power_of_two"), largest).scales
    given = (448 / largest.double()).float()
    assert torch.equal(1 / scales, torch.exp2(torch.floor(torch.log2(given))))
    exact = torch.exp2(torch.frexp(given).exponent.float() - 1)
    assert not torch.equal(1 / scales, exact) and (1 / scales <= 2 * exact).all(), "control"


def test_scales_in_the_layout_of_a_gpu():
    for plane in PLANES:
        for rows, columns in SHAPES:
            values = random(rows, columns, dtype=torch.bfloat16, seed=3)
            plain, laid = quantize(plane, values), quantize(plane, values, gpu=True)
            assert torch.equal(bits(plain.codes), bits(laid.codes))
            assert torch.equal(dequantized(plain), dequantized(laid)), plane
            if plane.exponents:
                assert laid.scales.dim() == 1 and laid.scales.numel() % 512 == 0
                shape = plane.scale_shape(rows, columns)
                turned = shape[::-1] if plane.block[1] == 1 else shape
                back = unswizzled(laid.scales, *turned)
                assert torch.equal(bits(back.t() if plane.block[1] == 1 else back), bits(plain.scales))
                used = int((bits(laid.scales) != 0).sum())
                assert used == plain.scales.numel(), "the padding is zero"
            elif plane.block == (1, 128):
                assert laid.scales.stride(0) == 1 or rows == 1
            elif plane.block == (128, 128):
                assert laid.scales.stride(0) % 4 == 0


def cut(values, cuts):
    return values.split(list(cuts))


@pytest.mark.parametrize("name", RECIPES)
def test_codes_of_shards_are_those_of_the_whole_weight(name):
    chosen = recipe(name)
    weight = random(384, 256, dtype=torch.float32, seed=5, scale=0.02)
    weight *= 2.0 ** torch.arange(384).view(-1, 1).div(64, rounding_mode="floor")  # scales that differ
    aligned = (128, 256) if chosen.align > 1 else (100, 284)
    for plane in chosen.planes:
        whole = quantize(plane, weight)
        own = plane.block[0] is None  # a block reaches over all rows
        parts = [quantize(plane, shard, whole_amax(plane, weight) if own else None) for shard in cut(weight, aligned)]
        assert torch.equal(bits(torch.cat([bits(part.codes) for part in parts])), bits(whole.codes)), plane
        if not own:
            assert torch.equal(torch.cat([bits(part.scales) for part in parts]), bits(whole.scales)), plane
            odd = [quantize(plane, shard) for shard in cut(weight, (70, 314))]
            differ = not torch.equal(torch.cat([bits(part.codes) for part in odd]), bits(whole.codes))
            assert differ == (plane.block[0] != 1), "control: blocks that reach over a cut"
        else:
            assert all(torch.equal(part.scales, whole.scales) for part in parts)
            apart = [quantize(plane, shard) for shard in cut(weight, aligned)]
            assert not torch.equal(apart[0].scales, whole.scales), "control: scales of the shard alone"
            error = torch.cat([dequantized(part) for part in apart]) - weight
            assert error.norm() / weight.norm() < 0.04, "their own scales are as exact"


def whole_amax(plane, weight):
    return amax(plane, weight)


def error_of(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", RECIPES)
def test_products(name):
    """torch._scaled_mm on a CPU is the float32 product of the dequantized operands, bitwise, where it runs."""
    chosen = recipe(name)
    weight = random(256, 384, dtype=torch.bfloat16, seed=1)
    x, dy = random(130, 384, dtype=torch.bfloat16, seed=2), random(130, 256, dtype=torch.bfloat16, seed=3)
    forward, backward = quantize(chosen.forward, weight), quantize(chosen.planes[-1], weight)
    tokens, gradients = quantize(chosen.tokens, x), quantize(chosen.gradients, dy)
    y = dequantized(tokens) @ dequantized(forward).t()
    dx = dequantized(gradients) @ dequantized(backward)
    exact = x.double() @ weight.double().t(), dy.double() @ weight.double()
    limit = 0.08 if name.startswith("float8_tensorwise") else 0.045  # e5m2 has two bits of mantissa
    assert 0.015 < error_of(y, exact[0]) < 0.045 and 0.015 < error_of(dx, exact[1]) < limit
    scaled = Codes(forward.plane, forward.codes, forward.scales.float() * 1.5)
    assert error_of(dequantized(tokens) @ dequantized(scaled).t(), exact[0]) > 0.4, "control: another scale"
    if name.startswith("float8_") and name != "float8_blockwise":
        assert torch.equal(product(tokens, forward.codes.t(), forward.scales.t()), y)
        assert torch.equal(product(gradients, backward.codes, backward.scales), dx)
        other = product(tokens, forward.codes.t(), forward.scales.t() * 2)
        assert not torch.equal(other, y), "control"
    if chosen.weight_gradient is not None:
        planes = chosen.weight_gradient
        left, right = quantize(planes[0], dy), quantize(planes[1], x)
        dw = dequantized(left).t() @ dequantized(right)
        assert 0.015 < error_of(dw, dy.double().t() @ x.double()) < limit
        if name in ("float8_tensorwise", "float8_rowwise"):  # its contracted size is a multiple of 16
            turned = Codes(left.plane, left.codes.t(), left.scales.t())
            assert torch.equal(product(turned, right.codes, right.scales), dw)


def product(left, codes, scales):
    """Rows of one scale and a whole of one scale: the whole's is repeated, as torchao does."""
    rows, columns = left.codes.size(0), codes.size(1)
    a, b = left.scales, scales
    if a.numel() != 1 or b.numel() != 1:
        a, b = torch.empty(rows, 1).copy_(a), torch.empty(1, columns).copy_(b)
    return torch._scaled_mm(left.codes, codes, a, b, out_dtype=torch.float32)


def test_bytes_and_refusals():
    for name, chosen in RECIPES.items():
        for rows, columns in ((256, 512), (128, 640)):
            for gpu in (False, True):
                sizes = []
                for plane in chosen.planes:
                    made = empty(plane, rows, columns, "cpu", gpu=gpu)
                    quantize_into(made, random(rows, columns, dtype=torch.float32, seed=1))
                    stored = made.scales.untyped_storage().nbytes()
                    sizes.append(made.codes.nbytes + stored)
                assert sizes[0] == chosen.travels(rows, columns, gpu=gpu)
                assert sizes[-1] == chosen.travels(rows, columns, backward=True, gpu=gpu)
                assert sum(sizes) == chosen.memory(rows, columns, gpu=gpu)
        assert 1 <= chosen.travels(4096, 4096) / 4096**2 <= 1.03125, name
    assert RECIPES["mxfp8"].travels(4096, 4096) == RECIPES["mxfp8"].travels(4096, 4096, gpu=True) == 1.03125 * 4096**2
    assert RECIPES["float8_blockwise"].memory(4096, 4096) == 4096**2 + 4 * 32**2
    for name, size in (("float8_blockwise", 128), ("mxfp8", 32), ("float8_rowwise", 1)):
        chosen = recipe(name)
        assert chosen.refusal(256, 384, (128, 128)) is None
        refused = [chosen.refusal(200, 384), chosen.refusal(256, 100), chosen.refusal(256, 384, (120, 136))]
        if size > 1:
            assert refused[0] == f"{name} needs outputs in multiples of {size}, got 200"
            assert refused[1] == f"{name} needs inputs in multiples of {size}, got 100"
            assert refused[2] == f"{name} needs outputs of a shard in multiples of {size}, got 120"
        else:
            assert refused == [None] * 3
            assert chosen.refusal(200, 384, gpu=True) == "float8_rowwise needs outputs in multiples of 16, got 200"
    with pytest.raises(ValueError, match=r"recipe: expected one of float8_tensorwise, .*, got 'fp8'"):
        recipe("fp8")


def test_wrong_arguments_are_refused():
    values = random(8, 64, dtype=torch.float32, seed=1)
    plane = Plane((1, None))
    made = empty(plane, 8, 64, "cpu")
    with pytest.raises(TypeError, match="expected float32, bfloat16 or float16 values for 8-bit codes, got Double"):
        quantize(plane, values.double())
    with pytest.raises(ValueError, match="expected a matrix with contiguous rows"):
        quantize(plane, values.t())
    with pytest.raises(ValueError, match="expected a matrix to quantize to 8 bits, got shape"):
        quantize(plane, values.view(2, 4, 64))
    with pytest.raises(ValueError, match="a multiple of 32 columns or all 64, got 1 x 24"):
        quantize(Plane((1, 24)), values)
    with pytest.raises(ValueError, match=r"largest magnitudes of shape \[8, 1\] on cpu"):
        quantize(plane, values, torch.ones(1, 1))
    with pytest.raises(ValueError, match="expected a rule of linear, power_of_two"):
        quantize(Plane((1, None), "nearest"), values)
    with pytest.raises(TypeError, match="expected float8_e4m3fn or float8_e5m2 codes, got"):
        quantize_into(replace(made, codes=made.codes.view(torch.int8)), values)
    with pytest.raises(TypeError, match="expected Float8_e8m0fnu scales, got Float"):
        quantize_into(replace(made, plane=Plane((1, None), "e8m0_floor")), values)
    with pytest.raises(ValueError, match=r"expected dense codes of shape \[8, 64\]"):
        quantize_into(replace(made, codes=made.codes[:4]), values)


@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp"])
def test_casts_are_those_of_torchao(name):
    config = pytest.importorskip("torchao.float8.config")
    scaling = pytest.importorskip("torchao.float8.float8_scaling_utils")
    recipe_name = name.removeprefix("float8_")
    theirs = config.Float8LinearConfig.from_recipe_name(recipe_name)
    chosen = recipe(name)

    def cast(values, given, dim):
        return scaling.hp_tensor_to_float8_dynamic(
            values,
            given.target_dtype,
            None,
            scaling_granularity=given.scaling_granularity,
            axiswise_dim=scaling.get_maybe_axiswise_dim(dim, given.scaling_granularity),
            round_scales_to_power_of_2=theirs.round_scales_to_power_of_2,
        )

    for dtype in (torch.float32, torch.bfloat16):
        for rows, columns in SHAPES:
            for scale in (1.0, 0.02, 1e-14, 1e6):
                values = random(rows, columns, dtype=dtype, seed=7, scale=scale)
                casts = [
                    (chosen.forward, theirs.cast_config_weight, -1),
                    (chosen.planes[-1], theirs.cast_config_weight_for_grad_input, 0),
                    (chosen.tokens, theirs.cast_config_input, -1),
                    (chosen.gradients, theirs.cast_config_grad_output, -1),
                ]
                if chosen.weight_gradient is not None:
                    left, right = chosen.weight_gradient
                    casts.append((left, theirs.cast_config_grad_output_for_grad_weight, 0))
                    casts.append((right, theirs.cast_config_input_for_grad_weight, 0))
                else:
                    assert theirs.cast_config_input_for_grad_weight.scaling_type is config.ScalingType.DISABLED
                for plane, given, dim in casts:
                    expected = cast(values, given, dim)
                    made = quantize(plane, values)
                    assert torch.equal(bits(made.codes), bits(expected._data)), (plane, dtype, rows, columns, scale)
                    inverse = expected._scale.reciprocal().view(made.scales.shape)
                    assert torch.equal(made.scales, inverse), (plane, dtype, rows, columns, scale)
                    if rows > 1 and scale == 1.0 and plane.block != (None, None):
                        other = cast(values, given, 0 if dim == -1 else -1)
                        assert not torch.equal(bits(made.codes), bits(other._data)), "control: swapped planes"


def test_exponents_are_those_of_torchao():
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    modes = {"e8m0_floor": "FLOOR", "e8m0_ceil": "RCEIL"}
    for rule, mode in modes.items():
        mode = getattr(module.ScaleCalculationMode, mode)
        for dtype in (torch.float32, torch.bfloat16):
            for values in matrices(96, 160, dtype):
                for plane in RECIPES["mxfp8"].planes:
                    plane = replace(plane, rule=rule)
                    turned = values.t().contiguous() if plane.transposed else values
                    scales, codes = module.to_mx(turned, torch.float8_e4m3fn, 32, mode)
                    if plane.transposed:
                        scales, codes = scales.t(), codes.t()
                    made = quantize(plane, values)
                    assert torch.equal(bits(made.scales), bits(scales)), (plane, dtype)
                    known = bits(scales) != 255  # in blocks with a NaN all codes are NaN here, some there
                    known = known.repeat_interleave(values.size(0) // scales.size(0), 0)
                    known = known.repeat_interleave(values.size(1) // scales.size(1), 1)
                    assert torch.equal(bits(made.codes)[known], bits(codes)[known]), (plane, dtype)
                    laid = quantize(plane, values, gpu=True).scales
                    given = (scales.t() if plane.transposed else scales).contiguous()
                    assert torch.equal(bits(laid), bits(utils.to_blocked(given.view(torch.uint8)))), plane
                    if not torch.equal(values, torch.zeros_like(values)) and values.isfinite().all():
                        other = quantize(replace(plane, block=plane.block[::-1]), values).codes
                        same = torch.equal(bits(other), bits(codes))
                        assert not same or values.std() < 1e-6, "control: blocks along the other dimension"


def test_blocks_are_those_of_torchao():
    module = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels", exc_type=ImportError)
    chosen = recipe("float8_blockwise")
    for dtype in (torch.float32, torch.bfloat16):
        for scale in (1.0, 0.02, 1e6):
            values = random(256, 384, dtype=dtype, seed=9, scale=scale)
            made = quantize(chosen.forward, values)
            codes, scales = module.torch_blockwise_scale_weight_quant(values)
            assert torch.equal(bits(made.codes), bits(codes)) and torch.equal(made.scales, scales)
            made = quantize(chosen.tokens, values, gpu=True)
            codes, scales = module.torch_blockwise_scale_act_quant_lhs(values)
            assert torch.equal(bits(made.codes), bits(codes)) and torch.equal(made.scales, scales)
            assert made.scales.stride() == scales.stride()
            made = quantize(chosen.weight_gradient[1], values)
            codes, scales = module.torch_blockwise_scale_act_quant_rhs(values)
            assert torch.equal(bits(made.codes), bits(codes)) and torch.equal(made.scales, scales)
            assert made.codes.stride() == codes.stride()
            assert not torch.equal(bits(made.codes), bits(quantize(chosen.tokens, values).codes)), "control"
            turned = quantize(chosen.forward, values, gpu=True).scales.t()
            assert turned.stride() == module._pad_blockwise_128x128_scale_k_major(scales_of(values, module)).stride()


def scales_of(values, module):
    return module.torch_blockwise_scale_weight_quant(values)[1].t()
