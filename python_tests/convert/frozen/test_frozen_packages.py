"""Models of bitsandbytes in 4 bits, taken as they are: the same bits, outputs and gradients of adapters. Skipped where
the package is not installed."""

import peft
import pytest
import torch
from harness import Cases, run_ranks
from reference import assert_same, differs, full
from torch import nn

import rtp_ext


def _model(**options):
    import bitsandbytes

    torch.manual_seed(0)
    four = [
        bitsandbytes.nn.Linear4bit(inputs, outputs, bias, quant_type="nf4", **options)
        for inputs, outputs, bias in ((64, 130, True), (128, 64, False))
    ]
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
    for options in ({"compress_statistics": False}, {"compress_statistics": True}):
        plain = _with_adapters(_model(**options))
        model = rtp_ext.fully_rotate(_with_adapters(_model(**options)), transport="shm")
        values = rtp_ext.frozen_weights(model)
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(rank))
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
                weight = plain.get_parameter(name)
                theirs = dequantize_4bit(weight.data, weight.quant_state)
                assert torch.equal(value, theirs.view(value.shape)), name
            assert_same(results[1][0], results[0][0], 1e-6, "output")
            assert_same(results[1][1], results[0][1], 1e-5, "input gradient")
            assert differs(results[1][0], _with_adapters(_model(**options).requires_grad_(False))(x + 0.01), 1e-4)
            for name, gradient in gradients.items():
                assert_same(gradient, averages[name] / ranks, 1e-5, name)
            plan = rtp_ext.explain(model)
            assert {row.name for row in plan.parameters if row.travel == "nf4"} == set(values)
            before = rtp_ext.explain(_with_adapters(_model(**options)), mesh=rtp_ext.ring_of(model))
            assert before == plan
        with cases.case("merge"), pytest.raises(ValueError, match="in a floating-point dtype, got blocks of nf4"):
            model.merge_adapter()
        rtp_ext.ring_of(model).close()
    for what, wrong, message in (
        ("fp4", {"quant_type": "fp4"}, "expected nf4 in blocks of 64, got fp4"),
        ("not quantized", {}, "not quantized yet"),
    ):
        import bitsandbytes

        layer = bitsandbytes.nn.Linear4bit(64, 64, **{"quant_type": "nf4", **wrong})
        with cases.case(what), pytest.raises(ValueError, match=message):
            rtp_ext.fully_rotate(nn.Sequential(layer.to("cpu") if wrong else layer), transport="shm")
    cases.finish()


@pytest.mark.parametrize("ranks", [2, 3])
def test_bitsandbytes_as_it_is(ranks):
    pytest.importorskip("bitsandbytes")
    run_ranks(_taken, ranks)
