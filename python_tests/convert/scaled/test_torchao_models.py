"""Models that torchao has converted, taken as they are: each linear layer rotates with its recipe, and what matches no
recipe is gathered. Skipped where torchao is not installed."""

import copy
import dataclasses
import importlib.util

import pytest
import torch
import transformers as hf
from code_reference import scaled
from harness import on_ranks
from hf_models import close_ring, fill, inputs_of, make_batch
from hf_models import make as make_hf
from logs import logged
from reference import assert_same, differs, full, random
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import rtp_ext

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the package torchao")

WIDTH, HIDDEN = 64, 128
TOLERANCE = 6e-3  # see python_tests/convert/test_recipe.py


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False))
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x):
        return self.last(x + self.mlp(self.norm(self.first(x))))


LAYERS = ("first", "mlp.0", "mlp.2")


def make():
    torch.manual_seed(0)
    return Net()


def config(name, **changes):
    from torchao.float8 import Float8LinearConfig

    made = Float8LinearConfig.from_recipe_name(name)
    return dataclasses.replace(made, emulate=True, **changes)


def by_torchao(name, model=None, layers=LAYERS, **changes):
    """A model with layers of torchao's float8 training."""
    from torchao.float8 import convert_to_float8_training

    model = model or make()
    convert_to_float8_training(model, config=config(name, **changes), module_filter_fn=lambda _, path: path in layers)
    return model


def mx(name):
    """A model with layers of torchao's MX training, which run on GPUs alone."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    mode = ScaleCalculationMode.RCEIL if name == "mxfp8_rceil" else ScaleCalculationMode.FLOOR
    model = make()
    for path in LAYERS:
        layer = model.get_submodule(path)
        layer.__class__, layer.scale_calculation_mode, layer.wgrad_with_hp = MXFP8Linear, mode, False
    return model


def wrapped(name):
    """A model whose weights torchao has wrapped."""
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.quantization import quantize_

    model = make()
    given = Float8TrainingOpConfig(float8_linear_recipe=name.removeprefix("float8_"))
    quantize_(model, given, filter_fn=lambda _, path: path in LAYERS)
    return model


MODELS = {
    "tensorwise": (by_torchao, "tensorwise", "float8_tensorwise"),
    "rowwise": (by_torchao, "rowwise", "float8_rowwise"),
    "rowwise_with_gw_hp": (by_torchao, "rowwise_with_gw_hp", "float8_rowwise_with_gw_hp"),
    "mxfp8": (mx, "mxfp8", "mxfp8"),
    "mxfp8_rceil": (mx, "mxfp8_rceil", "mxfp8_rceil"),
    "wrapped weights": (wrapped, "float8_rowwise", "float8_rowwise"),
}


def gathered_in_8_bits(name):
    return by_torchao(name, enable_fsdp_float8_all_gather=True)


def batch(rank, step):
    return random(4, 8, WIDTH, dtype=torch.float32, seed=100 * rank + step)


def step_of(model, ranks, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for step in range(steps):
        for rank in ranks:
            (model(batch(rank, step)).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def travels(model, **options):
    rows = rtp_ext.explain(model, **options).parameters
    return {row.module: row.travel for row in rows if row.name.endswith("weight") and row.module != "norm"}


def check(model, plain, rank, what):
    with torch.no_grad():
        assert_same(model(batch(rank, 90)), plain(batch(rank, 90)), TOLERANCE, f"{what}: outputs")
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(ours), theirs, TOLERANCE, f"{what}: {name}")


@on_ranks([1, 2])
def test_models_are_taken_as_they_are(rank, ranks, cases):
    """Their layers keep class, names and values; training is that of the recipe in one process, and torchao's where
    scales are the same."""
    keys = set(make().state_dict())
    with rtp_ext.Ring(timeout=30.0) as ring:
        for what, (build, given, recipe) in {
            **MODELS,
            "gathered in 8 bits": (gathered_in_8_bits, "tensorwise", "float8_tensorwise"),
        }.items():
            with cases.case(what):
                theirs = build(given)
                kinds = {path: type(theirs.get_submodule(path)) for path in LAYERS}
                planned = travels(theirs, mesh=ring)
                model = rtp_ext.fully_rotate(theirs, mesh=ring)
                expected = {**dict.fromkeys(LAYERS, recipe), "last": planned["last"]}
                assert planned == expected == travels(model) and planned["last"] != recipe
                for path, kind in kinds.items():
                    layer = model.get_submodule(path)
                    assert isinstance(layer, kind) and isinstance(layer, rtp_ext.nn.RotatedLinear)
                    assert isinstance(layer, nn.Linear) and layer.recipe.name == recipe
                assert set(get_model_state_dict(model)) == set(model.state_dict()) == keys
                for name, parameter in model.named_parameters():
                    assert torch.equal(full(parameter), make().get_parameter(name)), f"{name}: values"
                plain = step_of(scaled(make(), recipe, ranks, ("last",)), range(ranks))
                check(step_of(model, [rank]), plain, rank, what)
                if build is by_torchao and (ranks == 1 or given != "tensorwise"):
                    check(model, step_of(by_torchao(given), range(ranks)), rank, f"{what}: torchao")
                wide = step_of(make(), range(ranks))
                with torch.no_grad():
                    assert differs(wide(batch(rank, 90)), plain(batch(rank, 90)), TOLERANCE), "control: wide products"
        with cases.case("saved and loaded by another model"):
            model, other = (rtp_ext.fully_rotate(by_torchao("rowwise"), mesh=ring) for _ in range(2))
            step_of(model, [rank])
            other.load_state_dict(model.state_dict())
            with torch.no_grad():
                assert torch.equal(other(batch(rank, 5)), model(batch(rank, 5)))
            copied = copy.deepcopy(model)
            with torch.no_grad():
                assert torch.equal(copied(batch(rank, 5)), model(batch(rank, 5)))


def untaken():
    """Models whose float8 layers are gathered, with the reason."""
    yield "another config", by_torchao("tensorwise", round_scales_to_power_of_2=True), {}, "by none of the recipes"
    own = by_torchao("rowwise")
    for path in LAYERS:
        part = own.get_submodule(path)
        kind = type(part)
        part.__class__ = type("Own", (kind,), {"forward": lambda self, x, kind=kind: 2 * kind.forward(self, x)})
    yield "a forward of its own", own, {}, "by none of the recipes"
    yield "pulled shards", by_torchao("rowwise"), {"in_place": True}, "cannot be combined with in_place=True"
    tied = by_torchao("rowwise")
    tied.mlp[0].weight = nn.Parameter(torch.randn(HIDDEN, WIDTH))
    tied.other = nn.Linear(WIDTH, HIDDEN)
    tied.other.weight = tied.mlp[0].weight
    yield "a tied weight", tied, {}, "it is shared with another module"


@on_ranks(2)
def test_what_is_not_taken_is_gathered_with_a_reason(rank, ranks, cases):
    for what, model, options, reason in untaken():
        with cases.case(what):
            plain = copy.deepcopy(model)
            model, lines = logged(rtp_ext.fully_rotate, model, timeout=30.0, **options)
            rows = {row.module: row for row in rtp_ext.explain(model).parameters if row.name.endswith("weight")}
            kept = rows["mlp.0"]
            assert kept.moved == "gathered" and reason in kept.reason, kept
            assert sum(reason in line for _, line in lines) == 1, lines
            with torch.no_grad():
                assert_same(model(batch(rank, 1)), plain(batch(rank, 1)), 2e-6, what)
            rtp_ext.ring_of(model).close()


def everything_but(*names):
    return lambda part, path: not any(name in path for name in names)


@on_ranks(2)
def test_models_of_packages(rank, ranks, cases):
    """Layers with one input travel together; heads are in 8 bits if torchao says so."""
    from torchao.float8 import convert_to_float8_training

    with cases.case("llama"):
        plain = make_hf("llama")
        convert_to_float8_training(plain, config=config("rowwise"), module_filter_fn=everything_but("v_proj"))
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=30.0)
        rows = {row.name.removeprefix("model.layers.0."): row for row in rtp_ext.explain(model).parameters}
        rows = {name: row for name, row in rows.items() if "layers" not in name}
        recipes = {name: row.travel for name, row in rows.items() if "proj" in name or "head" in name}
        wide = recipes.pop("self_attn.v_proj.weight")
        assert set(recipes.values()) == {"float8_rowwise"} and wide != "float8_rowwise"
        together = [rows[f"{name}_proj.weight"].bundle for name in ("mlp.gate", "mlp.up", "mlp.down")]
        assert together[0] == together[1] != together[2]
        inputs = inputs_of(make_batch("llama", rank, 0))
        with torch.no_grad():
            assert_same(model(**inputs).logits, plain(**inputs).logits, TOLERANCE, "logits")
        close_ring(model)
    with (
        cases.case("llama, the loss with its head"),
        pytest.raises(ValueError, match="got a Float8Linear"),
    ):
        rtp_ext.fully_rotate(plain, loss_head="fused", timeout=30.0)
    with cases.case("attention of torch"):
        torch.manual_seed(0)
        plain = nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, dropout=0.0, batch_first=True)
        convert_to_float8_training(plain, config=config("rowwise"))
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=30.0)
        rows = {row.name: row for row in rtp_ext.explain(model).parameters}
        assert rows["linear1.weight"].travel == rows["linear2.weight"].travel == "float8_rowwise"
        assert rows["self_attn.out_proj.weight"].moved == "gathered", rows["self_attn.out_proj.weight"]
        assert_same(model(batch(rank, 0)), plain(batch(rank, 0)), TOLERANCE, "outputs")


@on_ranks(2)
def test_refusals(rank, ranks, cases):
    for error, model, options in (
        ("expected recipe='mxfp8', got a Float8Linear, which torchao computes by float8_rowwise", "rowwise", {}),
    ):
        with cases.case(error), pytest.raises(ValueError, match=error):
            rtp_ext.fully_rotate(by_torchao(model), recipe="mxfp8", timeout=30.0, **options)
    with cases.case("the same recipe for the rest"):
        model = rtp_ext.fully_rotate(by_torchao("rowwise", layers=("first",)), recipe="float8_rowwise", timeout=30.0)
        assert set(travels(model).values()) == {"float8_rowwise"}


class Mixture(nn.Module):
    def __init__(self, implementation="grouped_mm"):
        super().__init__()
        config = hf.MixtralConfig(hidden_size=WIDTH, intermediate_size=32, num_local_experts=4)
        config._experts_implementation = implementation
        self.experts = hf.models.mixtral.modeling_mixtral.MixtralExperts(config)
        fill(self).bfloat16()

    def forward(self, *operands):
        return self.experts(*operands)


def experts_of(config, implementation="grouped_mm"):
    """A model whose experts torchao has converted for training."""
    from torchao.quantization import quantize_

    model = Mixture(implementation)
    quantize_(model, config, filter_fn=lambda _, path: path == "experts")
    return model


def routed(rank):
    index = torch.stack([torch.arange(64) % 4, (torch.arange(64) + 1 + rank) % 4], 1)
    weights = random(64, 2, dtype=torch.bfloat16, seed=40 + rank).abs()
    return random(64, WIDTH, dtype=torch.bfloat16, seed=30 + rank), index, weights


@on_ranks(2)
def test_experts(rank, ranks, cases):
    """Rotate with the recipe of torchao's weights; those of other settings are gathered."""
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    emulated = {"kernel_preference": KernelPreference.EMULATED}
    x, index, weights = routed(rank)
    for name, config in (
        ("float8_rowwise", Float8TrainingOpConfig()),
        ("mxfp8_rceil", MXFP8TrainingOpConfig(**emulated)),
    ):
        with cases.case(name):
            model = rtp_ext.fully_rotate(experts_of(config), timeout=60.0)
            asked = rtp_ext.fully_rotate(Mixture(), recipe=name, timeout=60.0)
            for each in (model, asked):
                assert {row.travel for row in rtp_ext.explain(each).parameters} == {name}
                each(x, index, weights).float().square().sum().backward()
            y = model(x, index, weights)
            assert torch.equal(y, asked(x, index, weights))
            for ours, theirs in zip(model.parameters(), asked.parameters(), strict=True):
                assert torch.equal(full(ours.grad), full(theirs.grad))
            if name == "mxfp8_rceil":  # which torchao can compute on CPUs, in bfloat16
                expected, wide = experts_of(config)(x, index, weights), Mixture()(x, index, weights)
                error, other = ((each - expected).float().norm() / expected.float().norm() for each in (y, wide))
                assert error < 5e-3 and other > 2e-2, f"error {error}, control {other}"
            for each in (model, asked):
                close_ring(each)
    with cases.case("others"):
        options = {"ranks": 2, "rank": 0, "device": "cpu"}
        for other, how in (
            (MXFP8TrainingOpConfig(wgrad_with_hp=True), "grouped_mm"),
            (Float8TrainingOpConfig(), "eager"),
        ):
            rows = rtp_ext.explain(experts_of(other, how), **options).parameters
            assert all(row.moved == "gathered" and "TrainingWeightWrapperTensor says" in row.reason for row in rows)
        with pytest.raises(ValueError, match=r"recipe='mxfp8'.*torchao computes by float8_rowwise"):
            rtp_ext.explain(experts_of(Float8TrainingOpConfig()), recipe="mxfp8", **options)


@on_ranks(2)
def test_one_scale_of_tensorwise_layers(rank, ranks):
    """Asked for, the values are torchao's own; a control: scales of shards."""
    x = random(6 + rank, WIDTH, dtype=torch.float32, seed=rank)
    with torch.no_grad():
        expected = by_torchao("tensorwise").first(x)
        for recipe, same in (("float8_tensorwise_whole", True), (None, False)):
            model = rtp_ext.fully_rotate(by_torchao("tensorwise"), recipe=recipe, timeout=60.0)
            assert differs(model.first(x), expected, 1e-6) != same
            close_ring(model)
