"""Modules of other packages are recognised by what they compute: outputs and gradients in float64, not names."""

import copy
import importlib

import pytest
import torch
from grids import few
from harness import on_ranks
from reference import TOLERANCE, assert_same, full, random
from torch import nn
from torch.nn import functional as F

import rtp_ext
from rtp_ext.families.blocks import mlp_block
from rtp_ext.families.recognised import is_experts
from rtp_ext.nn import RotatedExperts

LIMIT = TOLERANCE[torch.float64]
E, D, H = 5, 6, 4


class Sizes:
    """The configuration of any experts module."""

    num_local_experts = num_experts = n_routed_experts = moe_num_experts = E
    hidden_size = D
    intermediate_size = moe_intermediate_size = H
    hidden_act = hidden_activation = mlp_hidden_act = "silu"
    moe_latent_size, swiglu_limit, swiglu_alpha = None, 0.9, 1.5
    _experts_implementation = "eager"


# of families that differ in their words: no gate, interleaved and transposed, a gate that clamps, names of attributes
EXPERTS = {
    "deepseek_v3": "DeepseekV3Experts",
    "qwen3_next": "Qwen3NextExperts",
    "glm4_moe": "Glm4MoeExperts",
    "jamba": "JambaExperts",
    "phimoe": "PhimoeExperts",
    "nemotron_h": "NemotronHExperts",
    "gpt_oss": "GptOssExperts",
    "minimax_m3_vl": "MiniMaxM3VLExperts",
}
OTHERS = {"step3p7": "Step3p7Experts", "deepseek_v4": "DeepseekV4Experts", "llama4": "Llama4TextExperts"}


def _made(family: str, name: str) -> nn.Module:
    cls = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    module = cls(Sizes()).double()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=seed))
    return module


def _batch(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = torch.rand(7 - rank, E, generator=torch.Generator().manual_seed(rank)).topk(2).indices
    x = random(7 - rank, D, dtype=torch.float64, seed=50 + rank)
    return x, index, random(7 - rank, 2, dtype=torch.float64, seed=60 + rank)


@on_ranks(few([3], [2, 3]))
def test_experts_rotate_whatever_their_name(rank, ranks, ring, cases):
    for family, name in {**EXPERTS, **OTHERS}.items():
        plain = _made(family, name)
        model = rtp_ext.fully_rotate(nn.ModuleList([copy.deepcopy(plain)]), mesh=ring)
        with cases.case(name):
            assert isinstance(model[0], RotatedExperts) == (family in EXPERTS)
            if family == "llama4":  # gets tokens by expert
                continue
            output = model[0](*_batch(rank))
            assert_same(output, plain(*_batch(rank)), LIMIT, "output")
            output.square().sum().backward()
            sum(plain(*_batch(other)).square().sum() for other in range(ranks)).div(ranks).backward()
            for key, parameter in plain.named_parameters():
                assert_same(full(model[0].get_parameter(key).grad), parameter.grad, LIMIT, key)


class Experts(nn.Module):
    """MixtralExperts in other words; subclasses change one detail."""

    def __init__(self, experts=E, features=D, hidden=H):
        super().__init__()
        self.num_experts, self.hidden_dim = experts, features
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, features))
        self.down_proj = nn.Parameter(torch.randn(experts, features, hidden))
        self.act_fn = nn.SiLU()

    def gate(self, both):
        gate, up = both.chunk(2, -1)
        return self.act_fn(gate) * up

    def into(self, x):
        return x

    def out(self, y, weight):
        return y * weight

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states.view(-1, self.hidden_dim))
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            h = self.gate(F.linear(self.into(hidden_states[token]), self.gate_up_proj[expert]))
            y = F.linear(h, self.down_proj[expert])
            result.index_add_(0, token, self.out(y, top_k_weights[token, place, None]))
        return result


class UpFirst(Experts):
    def gate(self, both):
        up, gate = both.chunk(2, -1)
        return self.act_fn(gate) * up


class Clamped(Experts):
    def gate(self, both):
        return super().gate(both.clamp(max=7.0))


class Scaled(Experts):
    def out(self, y, weight):
        return 2.5 * super().out(y, weight)


class Unweighted(Experts):
    def out(self, y, weight):
        return y


class Residual(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights) + hidden_states


class Noisy(Experts):
    def into(self, x):
        return F.dropout(x, 0.1, self.training)


class Detached(Experts):
    def out(self, y, weight):
        return y * weight.detach()


class Frugal(Experts):
    """Drops what is above a capacity, which few tokens do not reach."""

    def into(self, x):
        return x * (torch.arange(len(x), device=x.device) < 6)[:, None]


class Counting(Experts):
    seen = 0

    def into(self, x):
        self.seen = self.seen + len(x)
        return x


class Configured(Experts):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.config = Sizes()

    def out(self, y, weight):
        return super().out(y, weight) * self.config.hidden_size


class Rounded(Experts):
    def into(self, x):
        return x.float().to(x.dtype)


SAME = (Experts,)
DIFFERENT = (UpFirst, Clamped, Scaled, Unweighted, Residual, Noisy, Detached, Frugal, Counting, Configured, Rounded)


@pytest.mark.parametrize("sizes", [(E, D, H), (16, 2048, 1024), (64, 768, 768), (8, 512, 1024), (64, 512, 32)])
def test_every_detail_counts(sizes):
    """Small modules run as they are, large ones, here on the meta device, in small sizes with the same equalities."""
    for cls in SAME + DIFFERENT:
        with torch.device("meta"):
            module = cls(*sizes)
        cls.__module__, plain = "transformers.models.other", cls.__module__
        try:
            assert is_experts(module)
            state = torch.random.get_rng_state()
            problem = RotatedExperts.refusal(module)
            assert torch.equal(torch.random.get_rng_state(), state), "the caller's random numbers stay"
        finally:
            cls.__module__ = plain
        assert (problem is None) == (cls in SAME), (cls, problem)
    assert not is_experts(module), "experts of other packages may have effects that their values do not show"
    module = Experts()
    module.forward = module.forward
    assert "something else" in RotatedExperts.refusal(module), "replaced on the instance"


class Config:
    """The configuration of any MLP."""

    hidden_size = num_hidden_layers = D
    intermediate_size = 9
    hidden_act = hidden_activation = activation_function = "gelu_pytorch_tanh"
    mlp_bias = attention_bias = False
    resid_pdrop = layer_norm_eps = 0.1


# module, class, arguments, the kind of the block
MLPS = (
    ("gemma3", "Gemma3MLP", (), "forward"),
    ("siglip", "SiglipMLP", (), "forward"),
    ("lfm2", "Lfm2MLP", (), "forward"),
    ("gpt2", "GPT2MLP", (9,), "dropout"),
    ("granite", "GraniteMLP", (), "forward"),
)


class SwiGLU(nn.Module):
    """An MLP under other names; subclasses change one detail."""

    function = staticmethod(F.silu)

    def __init__(self):
        super().__init__()
        self.b, self.c, self.a = nn.Linear(D, 9), nn.Linear(9, D), nn.Linear(D, 9)
        self.drop, self.rate = nn.Dropout(0.0), 0.0

    def forward(self, states):
        return self.c(self.function(self.a(states)) * self.b(states))


class Softer(SwiGLU):
    function = staticmethod(F.mish)


class Limited(SwiGLU):
    function = staticmethod(lambda x: F.silu(x).clamp(max=40.0))


class Added(SwiGLU):
    def forward(self, states):
        return super().forward(states) + states


class Flat(SwiGLU):
    def forward(self, states):
        return super().forward(states.flatten(0, -2))


class Between(SwiGLU):
    def forward(self, states):
        return self.c(self.drop(F.silu(self.a(states)) * self.b(states)))


class Rated(SwiGLU):
    def forward(self, states):
        return F.dropout(super().forward(states), self.rate, self.training)


class TwoInputs(SwiGLU):
    def forward(self, states, more=None):
        return super().forward(states)


def test_mlps_in_every_detail():
    for cls in (SwiGLU, Softer, Limited, Added, Flat, Between, Rated, TwoInputs):
        module, plain = cls(), cls.__module__
        assert mlp_block(module) is None, "of another package"
        cls.__module__ = "transformers.models.other"
        try:
            block = mlp_block(module)
        finally:
            cls.__module__ = plain
        if cls is not SwiGLU:
            assert block is None, cls
            continue
        spec = block.spec
        assert (block.kind, spec.gate, spec.up, spec.down, spec.activation) == ("forward", "a", "b", "c", "swiglu")
        assert set(spec.between) == {"drop"}


@on_ranks(3)
def test_mlps_rotate_whatever_their_name(rank, ranks, ring, cases):
    def check(plain, model, inputs):
        output = model(inputs(rank))
        assert_same(output, plain(inputs(rank)), LIMIT, "output")
        output.square().sum().backward()
        sum(plain(inputs(other)).square().sum() for other in range(ranks)).div(ranks).backward()
        for key, parameter in plain.named_parameters():
            assert_same(full(model.get_parameter(key).grad), parameter.grad, LIMIT, key)

    for family, name, arguments, kind in MLPS:
        with cases.case(name):
            cls = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
            config = LfmConfig() if family == "lfm2" else Config()
            plain = cls(*arguments, config).double().eval()
            assert mlp_block(plain).kind == kind
            model = rtp_ext.fully_rotate(nn.ModuleList([copy.deepcopy(plain)]), mesh=ring)
            assert model[0].intact
            before = ring.hops("weight")
            check(plain, model[0], lambda r: random(2, 3 + r, D, dtype=torch.float64, seed=70 + r))
            assert ring.hops("weight") - before <= 2 * ranks, "one rotation a pass"


class LfmConfig:
    hidden_size, intermediate_size, block_auto_adjust_ff_dim = D, 9, False
