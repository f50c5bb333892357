"""Changes to a converted model that a bundle must detect; and attributes that conversion must not hide."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from harness import Cases, on_ranks, run_ranks
from reference import assert_same, differs, random
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import rtp_ext
from rtp_ext.convert.modules.bundled import BundledMLP

TOLERANCE = 1e-9


class NoisyGELU(nn.Module):
    """More than it shows in evaluation."""

    def __init__(self):
        super().__init__()
        self.noise = nn.Dropout(0.5)

    def forward(self, x):
        return self.noise(F.gelu(x))


def mlp(activation=None):
    model = nn.Sequential(nn.Linear(5, 7), activation or nn.GELU(), nn.Linear(7, 5)).double()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=seed))
    return model


def rotated(model, **options):
    return rtp_ext.fully_rotate(model, timeout=20.0, **options)


def replace_activation(model):
    model[1] = nn.ReLU()


def append(model):
    model.append(nn.Tanh())


def hook(model):
    model[0].register_forward_hook(lambda module, arguments, output: 2.0 * output)


def patch(model):
    layer = model[2]
    plain = layer.forward
    layer.forward = lambda x: plain(x) + 1.0


@on_ranks(2)
def test_changed_blocks_compute_what_they_became(rank, cases):
    x = random(3, 5, dtype=torch.float64, seed=9 + rank)
    for change in (replace_activation, append, hook, patch):
        with cases.case(change.__name__):
            plain, model = mlp(), rotated(mlp())
            before = plain(x)
            assert isinstance(model, BundledMLP) and model.intact
            assert_same(model(x), before, TOLERANCE, "before")
            change(plain)
            change(model)
            assert not model.intact
            assert_same(model(x), plain(x), TOLERANCE, "after")
            assert differs(model(x), before, TOLERANCE), "control: the change changes nothing"
    with cases.case("slice"):
        model = rotated(mlp())
        assert_same(model[:2](x), mlp()[:2](x), TOLERANCE, "slice")
    with cases.case("activation with a state"):
        model = rotated(mlp(NoisyGELU()).eval())
        assert not isinstance(model, BundledMLP)
        model.train()
        assert differs(model(x), model(x), TOLERANCE), "dropout is gone"
    with cases.case("transformer layer"):
        torch.manual_seed(0)
        plain = nn.TransformerEncoderLayer(6, 2, 11, dropout=0.0, batch_first=True).double()
        model = rotated(copy.deepcopy(plain))
        y = random(2, 3, 6, dtype=torch.float64, seed=20 + rank)
        for layer in (plain, model):
            layer.activation = F.gelu
            layer.dropout = nn.Identity()
        assert_same(model(y), plain(y), TOLERANCE, "activation and dropout replaced")


class CastsToWeight(nn.Module):
    """Casts to the dtype of a weight, as some models of the transformers package do."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.norm(x).to(self.out.weight.dtype))


@on_ranks(2)
def test_inputs_are_cast_as_the_policy_says():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = rotated(CastsToWeight(), mp_policy=policy)
    assert model(torch.ones(2, 5)).dtype == torch.bfloat16
    kept = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    with pytest.raises(TypeError, match=r"expected an input of dtype torch.bfloat16, got torch.float32"):
        rotated(nn.Linear(5, 3), mp_policy=kept)(torch.ones(2, 5))


def _llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=31, max_position_embeddings=64, **sizes, **options))


def _fused_heads(rank, ranks):
    cases = Cases()
    plain = _llama(pad_token_id=0)
    with cases.case("signature"):
        model = rotated(copy.deepcopy(plain), loss_head="fused")
        assert inspect.signature(model.forward) == inspect.signature(plain.forward)
        assert type(model).__name__ == "LlamaForCausalLM", "transformers writes the class into the configuration"
    with cases.case("generation with padding and no mask"):
        ids = torch.tensor([[0, 0, 3, 4], [1, 2, 5, 6]])
        expected, actual = (m.eval().generate(ids, max_new_tokens=4, do_sample=False) for m in (plain, model))
        assert torch.equal(actual, expected)
    for tied in (False, True):
        with cases.case(f"ignored head, tied={tied}"):
            ignoring = _llama(tie_word_embeddings=tied)
            with pytest.raises(ValueError, match=r"lm_head .* ignored_params"):
                rotated(ignoring, loss_head="fused", ignored_params=[ignoring.lm_head.weight])
    with cases.case("an unknown model"), pytest.raises(ValueError, match="Sequential"):
        rotated(mlp(), loss_head="fused")
    cases.finish()


def test_fused_heads():
    pytest.importorskip("transformers")
    run_ranks(_fused_heads, 2)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5))

    def forward(self, x):
        return self.inner(x)


@on_ranks(2)
def test_adapters_are_averaged_without_a_forward_of_the_root(rank):
    """Parameters added after conversion, where only a part of the model is ever called."""
    model = rotated(Backbone().double().requires_grad_(False))
    model.inner.append(nn.Linear(5, 3, dtype=torch.float64))
    with torch.no_grad():
        for seed, parameter in enumerate(model.inner[2].parameters()):
            parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=seed))
    model.inner(random(4, 5, dtype=torch.float64, seed=30 + rank)).square().sum().backward()
    gradient = model.inner[2].weight.grad
    told = rtp_ext.ring_of(model).exchange(gradient)
    assert all(torch.equal(other, gradient) for other in told), "gradients differ between ranks"
