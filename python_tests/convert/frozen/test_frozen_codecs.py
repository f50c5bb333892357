"""Bytes of frozen weights in blocks: those of bitsandbytes and torchao, where these are installed, and round trips."""

import pytest
import torch

from rtp_ext._native import kernels
from rtp_ext.parameters.frozen import FORMATS, FrozenWeight, encode_blocks

BLOCK = {"nf4": 64, "mxfp4": 32, "int8": 128}
# The largest error of a number, of the largest magnitude in its block: half of the widest gap between codes. In mxfp4
# up to 8 scales become 6.
ERROR = {"nf4": 0.5 * (1 - 0.6961928), "mxfp4": 0.25, "int8": 0.5 / 127}


def _values(format: str, blocks: int = 600) -> torch.Tensor:
    """Blocks with magnitudes far apart, zeros, ties of codes and tiny numbers."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(blocks, BLOCK[format], generator=generator)
    values *= torch.exp2(torch.randint(-30, 30, (blocks, 1), generator=generator).float())
    values[0], values[1, 1:] = 0.0, 0.0
    values[2] = torch.linspace(-6, 6, BLOCK[format])  # a maximum of 6 makes halves of codes ties in mxfp4
    values[3, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) * torch.tensor([1.0, -1.0] * 8)
    values[3, 16:] = 0.0
    values[4] *= 2.0**-125 / values[4].abs().max()
    return values


def _decoded(packed: torch.Tensor, format: str) -> torch.Tensor:
    out = torch.empty(packed.shape[0], kernels.block_layout(format)[0])
    kernels.dequantize_blocks(out.view(-1), packed.view(-1), format)
    return out


@pytest.mark.parametrize("format", FORMATS)
def test_errors_are_those_of_the_codes(format):
    values = _values(format)
    values = torch.cat([values[:4], values[5:]])  # tiny blocks have no relative error
    packed = encode_blocks(values, format)
    decoded = _decoded(packed, format)
    largest = values.abs().amax(1, keepdim=True).clamp(min=1e-30)
    error = ((decoded - values).abs() / largest).max().item()
    assert error <= 1.001 * ERROR[format]
    assert error > 0.3 * ERROR[format], "control: numbers between codes"
    assert torch.equal(encode_blocks(decoded, format)[:, : BLOCK[format] // 2], packed[:, : BLOCK[format] // 2])
    if format != "int8":
        swapped = packed.clone()
        codes = swapped[:, : BLOCK[format] // 2]
        codes.copy_(codes << 4 | codes >> 4)
        wrong = ((_decoded(swapped, format) - values).abs() / largest).max().item()
        assert wrong > 1, "control: the two codes of a byte swapped"
    for number in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"finite numbers to store in {format}"):
            encode_blocks(torch.full((1, BLOCK[format]), number), format)


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_codes_are_those_of_bitsandbytes(format):
    functional = pytest.importorskip("bitsandbytes.functional")
    values = _values("nf4")
    theirs, state = functional.quantize_4bit(values, blocksize=64, quant_type=format)
    packed = encode_blocks(values, format)
    assert torch.equal(packed[:, :32], theirs.view(-1, 32)), "codes"
    assert torch.equal(packed[:, 32:].contiguous().view(torch.float32).view(-1), state.absmax), "scales"
    assert torch.equal(_decoded(packed, format), functional.dequantize_4bit(theirs, state)), "values"
    other = "fp4" if format == "nf4" else "nf4"
    assert not torch.equal(_decoded(packed, other), functional.dequantize_4bit(theirs, state)), "control"


def test_mxfp4_is_that_of_torchao():
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    values = _values("mxfp4")
    scales, codes = module.to_mx(values, torch.float4_e2m1fn_x2, 32)
    packed = encode_blocks(values, "mxfp4")
    assert torch.equal(packed[:, :16], codes.view(torch.uint8).view(-1, 16)), "codes"
    assert torch.equal(packed[:, 16], scales.view(torch.uint8).view(-1)), "scales"
    theirs = module.to_dtype(codes, scales, torch.float4_e2m1fn_x2, 32, torch.float32)
    assert torch.equal(_decoded(packed, "mxfp4")[5:], theirs.view(-1, 32)[5:])


def test_int8_is_that_of_weights_that_travel():
    values = _values("int8")
    sent = torch.empty(kernels.quantized_bytes(values.numel()), dtype=torch.uint8)
    kernels.quantize(sent, values.view(-1))
    back = torch.empty_like(values)
    kernels.dequantize(back.view(-1), sent)
    assert torch.equal(_decoded(encode_blocks(values, "int8"), "int8"), back)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 7), (200, 64), (130, 96), (33, 48), (1, 128), (3, 1)])
def test_groups_hold_whole_blocks(format, outputs, inputs):
    """Each shard of any ring holds whole blocks of its rows; together they are the blocks of the flattened weight."""
    weight = FrozenWeight(format, (outputs, inputs), torch.float32)
    rows = weight.group_rows
    assert rows * inputs % BLOCK[format] == 0
    assert not any(fewer * inputs % BLOCK[format] == 0 for fewer in range(1, rows)), "the fewest rows"
    values = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    whole = weight.encode(values, weight.packed_shape[0])
    flat = torch.cat([values.view(-1), values.new_zeros(weight.packed_shape[0] * rows * inputs - values.numel())])
    assert torch.equal(whole.view(-1), encode_blocks(flat.view(-1, BLOCK[format]), format).view(-1))
    assert weight.decode(whole).shape == (outputs, inputs)
    for ranks in (1, 2, 3, 4, 7):
        sizes = weight.shard_rows(ranks)
        assert sum(sizes) == outputs and len(sizes) == ranks
        shares, start = [], 0
        for groups in torch.arange(weight.packed_shape[0]).chunk(ranks):
            begin, end = weight.rows_of(start, len(groups))
            assert end - begin == sizes[len(shares)]
            shares.append(weight.encode(values[begin:end], len(groups)))
            held, pulled = weight.facts.held_bytes, weight.facts.pulled_bytes
            assert sum(pulled(ranks, len(shares) - 1, 0)) <= held(ranks, len(shares) - 1, 0) == shares[-1].numel()
            start += len(groups)
        assert torch.equal(torch.cat(shares), whole), f"{ranks} ranks"
    meta = weight.encode(values.to("meta"), weight.packed_shape[0])
    assert meta.shape == whole.shape and meta.device.type == "meta"


def test_shapes_tell_formats_apart():
    """Bytes of one format are an error in a model of another."""
    formats = (*FORMATS, "fp4", "nf4-torchao", "nf4-torchao-bfloat16")
    for shape, options in (((6, 128), {}), ((8, 256), {"dim": 1}), ((256, 10), {"rows": 64})):
        found = {FrozenWeight(format, shape, torch.float32, **options).packed_shape for format in formats}
        assert len(found) == len(formats), found
