"""nn.RotatedExperts: a module of its own, a twin of a plain one, and what an experts module of transformers becomes."""

import copy
from itertools import product

import pytest
import torch
from grids import few
from harness import on_ranks
from hf_models import fill
from reference import adamw, assert_same, chunk, differs, full, local, random
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import rtp_ext
from rtp_ext.families.same_forward import activation_of
from rtp_ext.functional.mlp import ACTIVATIONS
from rtp_ext.nn import RotatedExperts
from rtp_ext.nn._base import mixed_class

TIMEOUT = 30.0
EXPERTS, FEATURES, HIDDEN = 5, 6, 4


class PlainExperts(nn.Module):
    """Laid out as the experts of transformers."""

    def __init__(self, act_fn, gated=True, dtype=torch.float64, bias=False):
        super().__init__()
        rows = 2 * HIDDEN if gated else HIDDEN
        up = nn.Parameter(random(EXPERTS, rows, FEATURES, dtype=dtype, seed=1))
        self.up_name = "gate_up_proj" if gated else "up_proj"
        self.register_parameter(self.up_name, up)
        self.down_proj = nn.Parameter(random(EXPERTS, FEATURES, HIDDEN, dtype=dtype, seed=2))
        if bias:
            up_bias = nn.Parameter(random(EXPERTS, rows, dtype=dtype, seed=3))
            self.register_parameter(f"{self.up_name}_bias", up_bias)
            self.down_proj_bias = nn.Parameter(random(EXPERTS, FEATURES, dtype=dtype, seed=4))
        self.act_fn = act_fn

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states)
        up, up_bias = (getattr(self, self.up_name + ending, None) for ending in ("", "_bias"))
        down_bias = getattr(self, "down_proj_bias", None)
        for expert in range(EXPERTS):
            values = F.linear(hidden_states, up[expert], None if up_bias is None else up_bias[expert])
            if self.up_name == "gate_up_proj":
                gate, values = values.chunk(2, -1)
                values = self.act_fn(gate) * values
            else:
                values = self.act_fn(values)
            share = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)
            y = y + share * F.linear(values, self.down_proj[expert], None if down_bias is None else down_bias[expert])
        return y


def make_batch(
    rank: int, step: int = 0, dtype: torch.dtype = torch.float64, highest: int = EXPERTS
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    index = torch.randint(highest + 1, (7 + rank, 2), generator=generator)
    weights = torch.rand(7 + rank, 2, generator=generator, dtype=torch.float64).to(dtype)
    return [random(7 + rank, FEATURES, dtype=dtype, seed=10 * step + rank), index, weights]


def check_trained(module: nn.Module, plain: nn.Module, rank: int, ranks: int, steps: int = 2, **options) -> None:
    """Both give the same outputs and gradients of the router's weights, and train the same."""
    start = copy.deepcopy(plain)
    optimizers = adamw(module.parameters()), adamw(plain.parameters())
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches = [make_batch(other, step, **options) for other in range(ranks)]
        for batch in batches:
            batch[2].requires_grad_()
        mine = [tensor.detach() for tensor in batches[rank]]
        mine[2].requires_grad_()
        y, outputs = module(*mine), [plain(*batch) for batch in batches]
        assert_same(y, outputs[rank], 1e-10, "output")
        y.square().sum().backward()
        (sum(output.square().sum() for output in outputs) / ranks).backward()
        assert_same(mine[2].grad, batches[rank][2].grad * ranks, 1e-10, "gradient of the router's weights")
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in plain.named_parameters():
        whole = full(module.get_parameter(name))
        assert_same(whole, parameter, 1e-9, name)
        assert differs(whole, start.get_parameter(name), 1e-3), f"control: {name} is untrained"


@on_ranks()
@pytest.mark.parametrize(("ranks", "transport"), few([(3, "shm")], [(3, "shm"), (4, "c10d")]))
def test_twins_train_as_plain_modules_do(rank, ranks, ring, transport):
    for in_place, recompute in product((False, True), repeat=2):
        for act_fn, gated, bias in ((nn.SiLU(), True, False), (F.relu, False, False), (F.gelu, True, True)):
            plain = PlainExperts(act_fn, gated, bias=bias)
            ring.in_place = in_place
            module = RotatedExperts.from_module(plain, ring, recompute=recompute)
            assert isinstance(module, RotatedExperts) and isinstance(module, PlainExperts)
            assert type(module).__name__ == "RotatedPlainExperts" and type(plain) is PlainExperts
            assert list(module.state_dict()) == list(plain.state_dict())
            check_trained(copy.deepcopy(module), copy.deepcopy(plain), rank, ranks)
            assert_same(full(module.down_proj), plain.down_proj, 0.0, "the copy's training")
    # in place of the class
    plain = PlainExperts(F.silu)
    module = copy.deepcopy(plain)
    module.__class__ = mixed_class(RotatedExperts, type(module))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    module._rotate(ring, name="layers.0.experts", recompute=True, mp_policy=policy)
    batch = make_batch(rank, dtype=torch.bfloat16)
    y = module(*batch)
    assert y.dtype == torch.bfloat16 and module.recompute and module.activation == "swiglu"
    expected = PlainExperts(F.silu)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.copy_(parameter.bfloat16())
    assert_same(y, expected(*[t.double() if t.is_floating_point() else t for t in batch]), 6 * 2.0**-8, "output")
    with pytest.raises(TypeError, match=r"layers\.0\.experts: expected an input of dtype torch.bfloat16"):
        module(*make_batch(rank))
    with pytest.raises(TypeError, match="RotatedPlainExperts cannot be pickled"):
        module.__reduce_ex__(2)


@on_ranks(3)
def test_constructor(rank, ranks, ring):
    for activation, (_, gated) in ACTIVATIONS.items():
        torch.manual_seed(0)
        bias = activation in ("gelu", "swiglu")
        options = {"activation": activation, "bias": bias, "ring": ring, "dtype": torch.float64}
        module = RotatedExperts(EXPERTS, FEATURES, HIDDEN, **options)
        up = "gate_up_proj" if gated else "up_proj"
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        rows = (2 if gated else 1) * HIDDEN
        expected = {up: (EXPERTS, rows, FEATURES), "down_proj": (EXPERTS, FEATURES, HIDDEN)}
        if bias:
            expected |= {f"{up}_bias": (EXPERTS, rows), "down_proj_bias": (EXPERTS, FEATURES)}
        assert shapes == expected
        whole = {name: full(parameter) for name, parameter in module.named_parameters()}
        torch.manual_seed(0)
        bounds = {up: FEATURES, f"{up}_bias": FEATURES, "down_proj": HIDDEN, "down_proj_bias": HIDDEN}
        for name in whole:
            features = bounds[name]
            expected = torch.empty_like(whole[name]).uniform_(-(features**-0.5), features**-0.5)
            assert_same(whole[name], expected, 0.0, f"initial {name}")
            shape = chunk(expected, ranks, rank).shape
            assert local(module.get_parameter(name)).shape == shape
        module.reset_parameters()
        assert not torch.equal(full(module.down_proj), whole["down_proj"])
        torch.manual_seed(0)
        module.reset_parameters()
        assert torch.equal(full(module.down_proj), whole["down_proj"]), "the same values under the same seed"
        functions = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "gelu_tanh": nn.GELU("tanh")}
        plain = PlainExperts(functions[ACTIVATIONS[activation][0]], gated, bias=bias)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(whole[name])
        check_trained(module, plain, rank, ranks, steps=1)
    text = repr(module)
    assert all(part in text for part in ("num_experts=5", "hidden_dim=6", "intermediate_dim=4", f"ring={ranks}"))
    meta = RotatedExperts(EXPERTS, FEATURES, HIDDEN, ring=ring, device="meta", dtype=torch.bfloat16)
    assert meta.gate_up_proj.is_meta and meta.down_proj.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"RotatedExperts: expected an activation of .*, got 'mish'"):
        RotatedExperts(EXPERTS, FEATURES, HIDDEN, activation="mish", ring=ring)


@on_ranks(2)
def test_experts_of_transformers(rank, ranks):
    """A random configuration of Mixtral; the rotated experts replace every implementation of its experts."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    for implementation in ("eager", "grouped_mm"):
        config = MixtralConfig(hidden_size=FEATURES, intermediate_size=HIDDEN, num_local_experts=EXPERTS)
        config._experts_implementation = implementation
        plain = MixtralExperts(config).double()
        with torch.no_grad():
            for seed, parameter in enumerate(plain.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=seed))
        with rtp_ext.Ring(timeout=TIMEOUT) as ring:
            swapped = copy.deepcopy(plain)
            swapped.__class__ = mixed_class(RotatedExperts, MixtralExperts)
            swapped._rotate(ring)
            modules = RotatedExperts.from_module(plain, ring), swapped
            expected = copy.deepcopy(plain)
            expected.config._experts_implementation = "eager"
            for module in modules:
                assert type(module).__name__ == "RotatedMixtralExperts" and isinstance(module, MixtralExperts)
                assert module.activation == "swiglu" and module.num_experts == EXPERTS
                hops = ring.hops("weight")
                check_trained(module, copy.deepcopy(expected), rank, ranks)
                assert ring.hops("weight") - hops == 2 * 2 * (ranks - 1), "the rotated forward runs"


@on_ranks([2, 3])
def test_experts_with_clamped_gates(rank, ranks, ring):
    """The two experts of transformers that have biases: transposed, GPT-OSS's interleaved, with a gate that clamps."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts

    config = GptOssConfig(hidden_size=FEATURES, intermediate_size=HIDDEN, num_local_experts=EXPERTS)
    config._experts_implementation = "batched_mm"  # the other one of the second class computes in float32
    config.swiglu_limit, config.swiglu_alpha = 0.9, 1.5
    for cls, interleaved in ((GptOssExperts, True), (OpenAIPrivacyFilterExperts, False)):
        plain = cls(config).double()
        assert plain.is_concatenated != interleaved and plain.is_transposed and plain.has_bias
        with torch.no_grad():
            for seed, parameter in enumerate(plain.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=seed))
        for recompute in (False, True):
            module = RotatedExperts.from_module(plain, ring, recompute=recompute)
            assert isinstance(module, cls) and module.activation == "clamped_swiglu"
            check_trained(module, copy.deepcopy(plain), rank, ranks, highest=EXPERTS - 1)
        assert "hidden_dim=6, intermediate_dim=4" in repr(module)
        torch.manual_seed(0)
        module.reset_parameters()
        torch.manual_seed(0)
        for name, features in zip(module._parameters, (FEATURES, FEATURES, HIDDEN, HIDDEN), strict=True):
            expected = torch.empty(plain.get_parameter(name).shape, dtype=torch.float64)
            expected.uniform_(-(features**-0.5), features**-0.5)
            assert_same(full(module.get_parameter(name)), expected, 0.0, name)
    plain.alpha = None
    assert "a gate of its own" in RotatedExperts.refusal(plain), "control: the gate is known by what it computes"


@on_ranks(few([2], [2, 3]))
def test_gpt_oss(rank, ranks):
    """The whole model: logits, gradients, and what became of its experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 10, "num_hidden_layers": 2, "vocab_size": 37, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4, "attn_implementation": "eager"}
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    config = GptOssConfig(**sizes, **heads, **experts, max_position_embeddings=32, initializer_range=0.2)
    plain = fill(GptOssForCausalLM(config).double().train())
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=TIMEOUT)
    assert isinstance(model.model.layers[0].mlp.experts, RotatedExperts)
    batches = [torch.randint(37, (2, 7 - r), generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    ours, theirs = model(batches[rank], labels=batches[rank]), [plain(batch, labels=batch) for batch in batches]
    # rotary embeddings and the softmax of attention compute in float32
    assert_same(ours.logits, theirs[rank].logits, 1e-5, "logits")
    ours.loss.backward()
    (sum(output.loss for output in theirs) / ranks).backward()
    for name, parameter in plain.named_parameters():
        assert_same(full(model.get_parameter(name).grad), parameter.grad, 1e-4, f"gradient of {name}")
    rtp_ext.ring_of(model).close()


def test_what_is_refused():
    ring = rtp_ext.Ring.emulated(2)

    def made(**attributes):
        module = PlainExperts(nn.SiLU())
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    class OtherGate(PlainExperts):
        def _apply_gate(self, gate_up):
            return gate_up

    class OtherForward(PlainExperts):
        def forward(self, hidden_states):
            return hidden_states

    wide, flat = (nn.Parameter(torch.zeros(shape)) for shape in ((EXPERTS, FEATURES, 2 * HIDDEN), (EXPERTS, FEATURES)))
    up_bias = nn.Parameter(torch.zeros(EXPERTS, 2 * HIDDEN))
    rotated = RotatedExperts.from_module(made(), ring)
    for module, reason in (
        (nn.Linear(2, 2), "expected the parameters gate_up_proj .* and down_proj, .*got weight, bias"),
        (nn.ReLU(), "expected the parameters gate_up_proj .* and down_proj, .*got none"),
        (made(gate_up_proj_bias=nn.Parameter(torch.zeros(1))), "got gate_up_proj, down_proj, gate_up_proj_bias"),
        (made(gate_up_proj_bias=flat, down_proj_bias=flat), r"and biases \[E, 2 H\] and \[E, D\], got .* and \(5, 6\)"),
        (made(up_proj_bias=flat, down_proj_bias=flat), "got gate_up_proj, down_proj, up_proj_bias, down_proj_bias"),
        (made(gate_up_proj_bias=up_bias, down_proj_bias=flat, has_bias=False), "expected has_bias True with .*_bias"),
        (made(is_transposed=True), r"expected gate_up_proj \[E, D, 2 H\] and down_proj \[E, H, D\], got .*\(5, 8, 6\)"),
        (made(is_concatenated=False), "expected is_concatenated True, got False"),
        (made(has_bias=True), "expected has_bias False with gate_up_proj, down_proj, got True"),
        (made(has_post_expert_norm=True), "expected has_post_expert_norm False, got True"),
        (made(_is_expert_parallel=True), "expected _is_expert_parallel False, got True"),
        (made(has_gate=False), "expected has_gate True with gate_up_proj, down_proj, got False"),
        (made(gate_up_proj=wide), r"expected gate_up_proj \[E, 2 H, D\] .* got shapes \(5, 6, 8\) and \(5, 6, 4\)"),
        (made(down_proj=nn.Parameter(torch.zeros(2, 2))), r"and \(2, 2\)"),
        (made(identity_expert=nn.Identity()), "expected no modules in it besides act_fn, got identity_expert"),
        (made(act_fn=nn.Mish()), r"expected an act_fn that computes one of silu, .*, got Mish\(\)"),
        (made(act_fn=None), "expected an act_fn .*, got None"),
        (OtherGate(nn.SiLU()), r"it has a gate of its own, .*OtherGate\._apply_gate"),
        (OtherForward(nn.SiLU()), "expected a forward of hidden states, .*, got one of hidden_states"),
        (rotated, "it already is"),
    ):
        with pytest.raises(ValueError, match=rf"RotatedExperts: {type(module).__name__} cannot be rotated: .*{reason}"):
            RotatedExperts.from_module(module, ring)
        assert RotatedExperts.refusal(module) is not None
    assert RotatedExperts.refusal(made()) is None
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got a Tensor"):
        RotatedExperts.from_module(torch.ones(1), ring)


def test_activations_are_known_by_what_they_compute():
    from transformers.activations import ACT2FN

    known = {
        "silu": ("silu", "swish"),
        "gelu": ("gelu", "gelu_python"),
        "gelu_tanh": ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"),
        "relu": ("relu",),
    }
    gated = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
    for name, others in known.items():
        for other in others:
            assert activation_of(ACT2FN[other], False) == name, other
            assert activation_of(ACT2FN[other], True) == gated[name], other
    for other in (
        "quick_gelu",
        "relu6",
        "relu2",
        "leaky_relu",
        "gelu_10",
        "linear",
        "tanh",
        "mish",
        "prelu",
        "laplace",
    ):
        assert activation_of(ACT2FN[other], False) is None, other
    assert activation_of(None, True) is None and activation_of(F.glu, True) is None and activation_of(len, True) is None
