"""Subclasses of torch's layers: those that compute as these do rotate and keep their class, others are gathered."""

import copy
import pickle

import pytest
import torch
from grids import few
from harness import on_ranks
from reference import TOLERANCE, assert_same, differs, full, random
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import rtp_ext
from rtp_ext.nn._base import RotatedModule
from rtp_ext.parameters.sharded_module import mixin_of

LIMIT = TOLERANCE[torch.float64]


class Configured:
    """A mixin with which frameworks add protocols to torch's layers."""

    def describe(self):
        return f"a {self.kind}"


class Linear(nn.Linear, Configured):
    kind = "layer"

    def __init__(self, inputs, outputs, *, gain=3.0):
        self.gain = gain
        super().__init__(inputs, outputs)

    def reset_parameters(self):
        super().reset_parameters()
        with torch.no_grad():
            self.weight.mul_(self.gain)

    def extra_repr(self):
        return f"{super().extra_repr()}, gain={self.gain}"


class Deeper(Linear):
    pass


class Embedding(nn.Embedding):
    pass


class Conv1d(nn.Conv1d):
    pass


class Conv2d(nn.Conv2d):
    extra = 1


class Conv3d(nn.Conv3d):
    pass


class Attention(nn.MultiheadAttention):
    def _reset_parameters(self):
        super()._reset_parameters()
        nn.init.constant_(self.in_proj_bias, 0.25)

    def extra_repr(self):
        return "mine"


class Doubled(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


class Padded(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(nn.functional.pad(x, (1, 1)), weight, bias)


class Derived(nn.Linear):
    """Its weight is not a parameter."""

    def __init__(self, inputs, outputs):
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        self.raw, self.bias = nn.Parameter(torch.rand(outputs, inputs)), None

    @property
    def weight(self):
        return self.raw * 2.0


class Late(Doubled):
    """A subclass without overrides."""


class Attends(nn.MultiheadAttention):
    def forward(self, x, *arguments, **keywords):
        return super().forward(2.0 * x, x, x, *arguments, **keywords)


def _x(rank, *shape):
    return random(*shape, dtype=torch.float64, seed=100 + rank)


def _ids(rank):
    return torch.arange(6).view(2, 3) + rank


def _attend(module, x):
    return (module(x, x, x) if not isinstance(module, Attends) else module(x))[0]


def _call(module, x):
    return module(x)


# name: (builder, input of a rank, how it is called, whether it rotates)
LAYERS = {
    "linear": (lambda: Linear(4, 7), lambda r: _x(r, 3, 4), _call, True),
    "linear below": (lambda: Deeper(4, 7), lambda r: _x(r, 3, 4), _call, True),
    "embedding": (lambda: Embedding(11, 5, padding_idx=2), _ids, _call, True),
    "conv1d": (lambda: Conv1d(2, 5, 3, stride=2, padding=1), lambda r: _x(r, 2, 2, 9), _call, True),
    "conv2d": (lambda: Conv2d(2, 5, 3, padding_mode="circular", padding=1), lambda r: _x(r, 2, 2, 4, 4), _call, True),
    "conv3d": (lambda: Conv3d(2, 4, 2, groups=2), lambda r: _x(r, 1, 2, 3, 3, 3), _call, True),
    "attention": (lambda: Attention(6, 2, batch_first=True), lambda r: _x(r, 2, 3, 6), _attend, True),
    "own forward": (lambda: Doubled(4, 7), lambda r: _x(r, 3, 4), _call, False),
    "a base's forward": (lambda: Late(4, 7), lambda r: _x(r, 3, 4), _call, False),
    "own convolution": (lambda: Padded(2, 5, 3), lambda r: _x(r, 2, 2, 9), _call, False),
    "own weight": (lambda: Derived(4, 7), lambda r: _x(r, 3, 4), _call, False),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(Linear(4, 7)), lambda r: _x(r, 3, 4), _call, False),
    "own attention": (lambda: Attends(6, 2), lambda r: _x(r, 2, 3, 6), _attend, False),
    "read by attention": (lambda: NonDynamicallyQuantizableLinear(4, 7), lambda r: _x(r, 3, 4), _call, False),
}


def _rotates(module: nn.Module) -> bool:
    return isinstance(module, RotatedModule)


@on_ranks(few([3], [2, 3]))
def test_layers(rank, ranks, ring, cases):
    for name, (build, inputs, call, rotates) in LAYERS.items():
        with cases.case(name):
            torch.manual_seed(3)
            plain = build().double()
            model = rtp_ext.fully_rotate(nn.ModuleList([copy.deepcopy(plain)]), mesh=ring)
            layer = model[0]
            assert _rotates(layer) == rotates, type(layer).__mro__
            assert isinstance(layer, type(plain)) and [*layer.state_dict()] == [*plain.state_dict()]
            assert all(isinstance(p, DTensor) for p in layer.parameters())
            for each in (layer, copy.deepcopy(model)[0]):
                assert type(each) is type(layer)
                each.zero_grad(), plain.zero_grad()
                output = call(each, inputs(rank))
                assert_same(output, call(plain, inputs(rank)), LIMIT, "output")
                output.square().sum().backward()
                sum(call(plain, inputs(other)).square().sum() for other in range(ranks)).div(ranks).backward()
                for key, parameter in plain.named_parameters():
                    assert_same(full(each.get_parameter(key).grad), parameter.grad, LIMIT, key)
            with pytest.raises(TypeError, match="cannot be pickled"):
                pickle.dumps(model)
    with cases.case("what a subclass does in its own way"):
        model = rtp_ext.fully_rotate(nn.ModuleList([Deeper(4, 7), Attention(6, 2)]), mesh=ring)
        plain = nn.ModuleList([Deeper(4, 7), Attention(6, 2)])
        assert model[0].describe() == "a layer" and "gain=3.0, ring=" in repr(model[0]) and "mine" in repr(model[1])
        assert type(model[0]).__name__ == "RotatedDeeper" and mixin_of(model[0]) is rtp_ext.nn.RotatedLinear
        for reset in (lambda m: m[0].reset_parameters(), lambda m: m[1]._reset_parameters()):
            for each in (model, plain):
                torch.manual_seed(8)
                reset(each)
        for key in ("0.weight", "0.bias", "1.in_proj_weight", "1.in_proj_bias"):
            assert_same(full(model.get_parameter(key)), plain.get_parameter(key), 0.0, key)
        assert differs(full(model.get_parameter("0.weight")), plain.get_parameter("0.weight") / 3.0, 0.1)
        twin = rtp_ext.nn.RotatedLinear.from_module(plain[0], ring)
        assert isinstance(twin, Deeper) and _rotates(twin) and type(plain[0]) is Deeper
        with pytest.raises(TypeError, match="expected a Linear, got a Doubled"):
            rtp_ext.nn.RotatedLinear.from_module(Doubled(4, 7), ring)


@on_ranks(few([3], [2, 3]))
def test_blocks(rank, ranks, cases):
    """Subclassed linear layers are a part of their bundle, share their input, and are fused heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ring = rtp_ext.Ring(timeout=30.0)
    torch.manual_seed(0)
    for first, last in ((Linear, Linear), (nn.Linear, Deeper), (Doubled, nn.Linear)):
        with cases.case(f"{first.__name__}, {last.__name__}"):
            plain = nn.Sequential(first(4, 9), nn.GELU(), last(9, 5)).double()
            model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
            bundled = first is not Doubled
            assert getattr(model, "intact", False) == bundled
            x = _x(rank, 3, 4)
            before = ring.hops("weight")
            assert_same(model(x), plain(x), LIMIT, "output")
            assert not bundled or ring.hops("weight") - before <= ranks, "one rotation"
            model(x).square().sum().backward()
            sum(plain(_x(other, 3, 4)).square().sum() for other in range(ranks)).div(ranks).backward()
            for key, parameter in plain.named_parameters():
                assert_same(full(model.get_parameter(key).grad), parameter.grad, LIMIT, key)
    with cases.case("RotatedMLP.from_module"):
        plain = nn.Sequential(Linear(4, 9), nn.GELU(), Deeper(9, 5)).double()
        module = rtp_ext.nn.RotatedMLP.from_module(plain, ring)
        assert isinstance(module.down_proj, Deeper)
        assert_same(module(_x(rank, 3, 4)), plain(_x(rank, 3, 4)), LIMIT, "output")

    config = LlamaConfig(
        vocab_size=23,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation="eager",
    )
    plain = LlamaForCausalLM(config).double()
    for module in plain.modules():
        if type(module) is nn.Linear:
            module.__class__ = Deeper
            module.gain = 1.0
    ids = torch.arange(10).view(2, 5) + rank
    theirs = plain(input_ids=ids, labels=ids).loss
    with cases.case("Llama"):
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring, loss_head="fused")
        block, head = model.model.layers[0], model.lm_head
        assert block.mlp.intact and isinstance(head, Deeper) and isinstance(block.mlp.up_proj, Deeper)
        output = model(input_ids=ids, labels=ids)
        assert "logits" not in output and block.self_attn.q_proj.together.shared
        assert_same(output.loss, theirs, 1e-6, "loss")  # transformers computes it in float32
        output.loss.backward()
        assert_same(model(input_ids=ids).logits, plain(input_ids=ids).logits, LIMIT, "logits")
        other = [
            plain(input_ids=torch.arange(10).view(2, 5) + r, labels=torch.arange(10).view(2, 5) + r)
            for r in range(ranks)
        ]
        sum(each.loss for each in other).div(ranks).backward()
        for key, parameter in plain.named_parameters():
            assert_same(full(model.get_parameter(key).grad), parameter.grad, 1e-5, key)
    with cases.case("a head with a forward of its own is not fused"):
        model = copy.deepcopy(plain)
        model.lm_head.__class__ = Doubled
        with pytest.raises(ValueError, match=r"LlamaForCausalLM.lm_head to be a linear layer .* got a Doubled"):
            rtp_ext.fully_rotate(model, mesh=ring, loss_head="fused")
