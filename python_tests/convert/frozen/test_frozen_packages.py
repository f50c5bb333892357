"""Models in 4 bits of bitsandbytes and torchao, taken as they are: the same bits, outputs and gradients of trained
layers. Skipped where a package is not installed."""

import copy

import peft
import pytest
import torch
from harness import Cases, run_ranks
from reference import assert_same, differs, full, local
from torch import nn

import rtp_ext
from rtp_ext.parameters import torchao
from rtp_ext.parameters.frozen import FrozenWeight
from rtp_ext.parameters.sharding import frozen_of


def _model(blocksize=64, **options):
    import bitsandbytes

    torch.manual_seed(0)
    four = []
    for inputs, outputs, bias in ((128, 130, True), (128, 64, False)):
        layer = bitsandbytes.nn.Linear4bit(inputs, outputs, bias, **options)
        settings = {"quant_type": options["quant_type"], "compress_statistics": options["compress_statistics"]}
        data = layer.weight.data
        layer.weight = bitsandbytes.nn.Params4bit(data, requires_grad=False, blocksize=blocksize, **settings)
        four.append(layer)
    return nn.Sequential(four[0], nn.LayerNorm(130), nn.Linear(130, 128), four[1]).to("cpu")


def _with_adapters(model):
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "3"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def _taken(rank, ranks):
    from bitsandbytes.functional import dequantize_4bit

    cases = Cases()
    for kind, blocksize, nested in (("nf4", 64, False), ("nf4", 64, True), ("fp4", 64, True), ("fp4", 128, False)):
        options = {"quant_type": kind, "blocksize": blocksize, "compress_statistics": nested}
        plain = _with_adapters(_model(**options))
        model = rtp_ext.fully_rotate(_with_adapters(_model(**options)), transport="shm")
        values = rtp_ext.frozen_weights(model)
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(rank))
        results = []
        for each in (plain, model):
            mine = x.clone().requires_grad_()
            y = each(mine)
            y.square().mean().backward()
            results.append((y, mine.grad))
        names = [name for name, p in plain.named_parameters() if "lora" in name]
        gradients = {name: full(model.get_parameter(name).grad) for name in names}
        averages = {name: plain.get_parameter(name).grad.clone() for name in names}
        for gradient in averages.values():
            torch.distributed.all_reduce(gradient)
        with cases.case(str(options)):
            assert len(values) == 2
            for name, value in values.items():
                weight, mine = plain.get_parameter(name), model.get_parameter(name)
                theirs = dequantize_4bit(weight.data, weight.quant_state)
                assert torch.equal(value, theirs.view(value.shape)), name
                assert local(mine).numel() == frozen_of(mine).shard_rows(ranks)[rank] * 128 * 36 // 64
            assert_same(results[1][0], results[0][0], 1e-6, "output")
            assert_same(results[1][1], results[0][1], 1e-5, "input gradient")
            assert differs(results[1][0], _with_adapters(_model(**options).requires_grad_(False))(x + 0.01), 1e-4)
            for name, gradient in gradients.items():
                assert_same(gradient, averages[name] / ranks, 1e-5, name)
            plan = rtp_ext.explain(model)
            assert {row.name for row in plan.parameters if row.travel == kind} == set(values)
            before = rtp_ext.explain(_with_adapters(_model(**options)), mesh=rtp_ext.ring_of(model))
            assert before == plan
        with cases.case("merge"), pytest.raises(ValueError, match=f"in a floating-point dtype, got blocks of {kind}"):
            model.merge_adapter()
        rtp_ext.ring_of(model).close()
    import bitsandbytes

    small = _model(quant_type="nf4", blocksize=32, compress_statistics=False)
    unmoved = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4"))
    message = "expected nf4 or fp4 in blocks of a multiple of 64, got nf4 in blocks of 32"
    for what, wrong, expected in (("32", small, message), ("not quantized", unmoved, "not quantized yet")):
        with cases.case(what), pytest.raises(ValueError, match=expected):
            rtp_ext.fully_rotate(wrong, transport="shm")
    cases.finish()


@pytest.mark.parametrize("ranks", [2, 3])
def test_bitsandbytes_as_it_is(ranks):
    pytest.importorskip("bitsandbytes")
    run_ranks(_taken, ranks)


def _with_nf4(dtype: torch.dtype, block: int = 64, scaler_block: int = 256) -> nn.Module:
    from torchao.quantization import NF4Tensor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 192, bias=False))
    for place in (0, 3):
        four = NF4Tensor.from_tensor(model[place].weight.detach().to(dtype), block, scaler_block)
        model[place].weight = nn.Parameter(four, requires_grad=False)
        if model[place].bias is not None:
            model[place].bias = nn.Parameter(model[place].bias.detach().to(dtype))
    for place in (1, 2):
        model[place].to(dtype)
    return model


class _OwnForward(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


def _torchao(rank, ranks):
    cases = Cases()
    with cases.case("larger blocks"):
        four = _with_nf4(torch.float32, 128, 128)[0].weight
        weight = torchao.weight_of(four)
        assert torch.equal(weight.decode(torchao.blocks_of(four, weight)), four.get_original_weight())
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-6)):
        model, plain = rtp_ext.fully_rotate(_with_nf4(dtype), transport="shm"), _with_nf4(dtype)
        ring, values = rtp_ext.ring_of(model), rtp_ext.frozen_weights(model)
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(rank)).to(dtype)
        results = []
        for each in (plain, model):
            mine = x.clone().requires_grad_()
            y = each(mine)
            y.float().square().mean().backward()
            results.append((y, mine.grad))
        gradients = {
            name: full(model.get_parameter(name).grad) for name, p in plain.named_parameters() if p.grad is not None
        }
        averages = {name: plain.get_parameter(name).grad.float() for name in gradients}
        for gradient in averages.values():
            torch.distributed.all_reduce(gradient)
        h = torch.randn(5, 256, generator=torch.Generator().manual_seed(rank)).to(dtype)
        y, rows = model[3](h), [n for n in frozen_of(model[3].weight).shard_rows(ranks) if n]
        with cases.case(str(dtype)):
            format = "nf4-torchao" if dtype == torch.float32 else "nf4-torchao-bfloat16"
            assert set(values) == {"0.weight", "3.weight"} and len(gradients) == 5
            for name, value in values.items():
                original = plain.get_parameter(name).get_original_weight()
                assert value.dtype == dtype and torch.equal(value, original), name
                frozen = frozen_of(model.get_parameter(name))
                blocks = full(model.get_parameter(name))
                nf4 = FrozenWeight("nf4", frozen.shape, frozen.dtype)
                assert not torch.equal(nf4.decode(blocks), original), "control: numbers of bitsandbytes"
            parts = [nn.functional.linear(h, part) for part in values["3.weight"].split(rows)]
            assert torch.equal(y, torch.cat(parts, 1)), "the GEMMs of shards in one process"
            assert_same(results[1][0], results[0][0], tolerance, "output")
            assert_same(results[1][1], results[0][1], tolerance, "input gradient")
            for name, gradient in gradients.items():
                assert_same(gradient.float(), averages[name] / ranks, tolerance, name)
            plan = rtp_ext.explain(model)
            assert {row.name for row in plan.parameters if row.travel == format} == set(values)
            assert plan == rtp_ext.explain(_with_nf4(dtype), mesh=ring)
            whole = torch.tensor(sum(local(model.get_parameter(name)).numel() for name in values))
            torch.distributed.all_reduce(whole)
            assert whole.item() == 36 * sum(value.numel() for value in values.values()) // 64
        if dtype == torch.float32:
            with cases.case("a state dict of plain weights"):
                state = {
                    **copy.deepcopy(values),
                    **{n: full(p) for n, p in model.named_parameters() if n not in values},
                }
                model.load_state_dict(state)
                again = rtp_ext.frozen_weights(model)
                assert_same(again["0.weight"], values["0.weight"], 1e-6, "codes of numbers that have one")
        ring.close()
    for what, wrong, options, message in (
        ("small blocks", (torch.float32, 32), {}, "expected blocks of a multiple of 64, got 32"),
        ("float16", (torch.float16,), {}, "expected numbers of torch.float32 or torch.bfloat16, got torch.float16"),
        ("in place", (torch.float32,), {"in_place": True}, "of another package cannot be combined with in_place=True"),
    ):
        with cases.case(what), pytest.raises(ValueError, match=message):
            rtp_ext.fully_rotate(_with_nf4(*wrong), transport="shm", **options)
    own = _OwnForward(128, 128)
    own.weight = _with_nf4(torch.float32)[0].weight
    with cases.case("a forward of its own"), pytest.raises(ValueError, match="NF4Tensor, which cannot be sliced"):
        rtp_ext.fully_rotate(own, transport="shm")
    with cases.case("forwards alone"), pytest.raises(ValueError, match="in 4 bits: not made yet"):
        rtp_ext.rotate_for_inference(_with_nf4(torch.float32))
    cases.finish()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_torchao_as_it_is(ranks):
    pytest.importorskip("torchao.quantization")
    run_ranks(_torchao, ranks)
