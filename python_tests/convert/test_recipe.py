"""Models whose linear layers compute in 8 bits, against the same layers in one process."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from code_reference import scaled
from harness import on_ranks
from hf_models import close_ring, inputs_of, make_batch
from hf_models import make as make_hf
from reference import assert_same, differs, full, local, random
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP

import rtp_ext
from rtp_ext.recipes import RECIPES

# Of the largest magnitude. A sum in another order now and then rounds an activation to the code beside it, which
# changes a number by 1/16 at most, one of hundreds in a sum; products in 8 bits themselves differ by some 1/30.
TOLERANCE = 6e-3
WIDTH, HIDDEN, CLASSES = 256, 512, 10


class Net(nn.Module):
    """A head that no recipe takes whole, an MLP, and a layer with a bias."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.checkpointed = checkpointed

    def inner(self, x):
        return x + self.mlp(self.norm(self.first(x)))

    def forward(self, x):
        x = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return self.last(x)


def make(**options):
    torch.manual_seed(0)
    return Net(**options)


def batch(rank, step):
    return random(2, 9, WIDTH, dtype=torch.float32, seed=100 * rank + step)


def loss_of(model, rank, step):
    return model(batch(rank, step)).square().mean()


def train_plain(model, ranks, steps, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for step in range(first, first + steps):
        for rank in range(ranks):
            for micro in (2 * step, 2 * step + 1):
                (loss_of(model, rank, micro) / ranks / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(model, rank, steps, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for step in range(first, first + steps):
        for micro in (2 * step, 2 * step + 1):
            (loss_of(model, rank, micro) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def check(model, plain, rank, what, tolerance=TOLERANCE):
    with torch.no_grad():
        assert_same(model(batch(rank, 90)), plain(batch(rank, 90)), tolerance, f"{what}: outputs")
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(ours), theirs, tolerance, f"{what}: {name}")


def wide_layers(name, ranks):
    """Layers whose sizes do not fit the blocks."""
    fits = {"float8_blockwise": 128, "mxfp8": 32, "mxfp8_rceil": 32}.get(name, 1)
    sizes = {"first": WIDTH, "mlp.0": HIDDEN, "mlp.2": WIDTH, "last": CLASSES}
    return tuple(path for path, size in sizes.items() if -(-size // ranks) % fits or size % fits)


@on_ranks(2)
def test_training(rank, ranks, cases):
    """Five steps of two micro-batches with every recipe; a recomputation takes the codes of its forward."""
    for name in RECIPES:
        for checkpointed in (False, True) if name == "float8_rowwise" else (False,):
            with cases.case(f"{name}, checkpointed {checkpointed}"):
                model = rtp_ext.fully_rotate(make(checkpointed=checkpointed), recipe=name, timeout=30.0)
                rows, wide = rtp_ext.explain(model).parameters, wide_layers(name, ranks)
                weights = [row for row in rows if len(row.shape) == 2]
                assert tuple(row.module for row in weights if row.travel != name) == wide
                assert all((row.wide is not None) == (row.module in wide) for row in weights)
                plain = train_plain(scaled(make(), name, ranks, wide), ranks, 5)
                check(train(model, rank, 5), plain, rank, name)
    with cases.case("control: products in 8 bits are not those in float32"):
        wide = train_plain(make(), ranks, 5)
        with torch.no_grad():
            assert differs(wide(batch(rank, 90)), plain(batch(rank, 90)), TOLERANCE)
        assert differs(wide.first.weight, make().first.weight, TOLERANCE), "training changes the weights"


@on_ranks(3)
def test_dtypes(rank, ranks, cases):
    """Parameters in float32, computes in bfloat16: the shard is rounded before it is quantized."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = scaled(make().bfloat16(), "float8_rowwise", ranks)
    ways = {
        "mp_policy": (rtp_ext.fully_rotate(make(), recipe="float8_rowwise", mp_policy=policy, timeout=30.0), False),
        "autocast": (rtp_ext.fully_rotate(make(), recipe="float8_rowwise", timeout=30.0), True),
    }
    for what, (model, autocast) in ways.items():
        with cases.case(what), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            x = model.first(batch(rank, 1))
            assert x.dtype == torch.bfloat16
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                expected = plain.first(batch(rank, 1).bfloat16())
            assert_same(x.float(), expected.float(), 8e-3, what)
            x.float().sum().backward()
            assert local(model.first.weight.grad).dtype == torch.float32


def changes(model, saved):
    """Changes of the first weight, by name."""
    weight = model.first.weight
    for name, kind, options in (
        ("foreach SGD", torch.optim.SGD, {"foreach": True}),
        ("AdamW", torch.optim.AdamW, {"foreach": False}),
        ("fused AdamW", torch.optim.AdamW, {"fused": True}),
    ):
        yield name, kind([weight], lr=0.1, **options).step
    yield "load_state_dict", lambda: model.load_state_dict(saved)

    def write():
        with torch.no_grad():
            weight.mul_(1.5)

    yield "an operator in place", write

    def write_data():
        weight.data.mul_(1.5)

    yield "an operator in place on data", write_data
    yield "assigned data", lambda: setattr(weight, "data", weight.detach() * 1.5)

    def write_shard():
        with torch.no_grad():
            weight.to_local().mul_(1.5)

    yield "an operator in place on the shard", write_shard
    for name, operator, given in (
        ("_foreach_mul_", torch._foreach_mul_, (1.5,)),
        ("_foreach_lerp_", torch._foreach_lerp_, ([weight.detach() * 2], 0.5)),
    ):

        def write_all(operator=operator, given=given):
            with torch.no_grad():
                operator([weight.detach()], *given)

        yield name, write_all

    def average():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        torch.optim.SGD([weight], lr=1000.0).step()

    yield "a clipped step", average


@on_ranks(2)
def test_codes_follow_every_change(rank, ranks, cases):
    model = rtp_ext.fully_rotate(make(), recipe="float8_rowwise", timeout=30.0)
    saved = {name: value.detach().clone() * 2 for name, value in model.state_dict().items()}
    plain = scaled(make(), "float8_rowwise", ranks)
    x = batch(rank, 1)
    for what, change in changes(model, saved):
        with cases.case(what):
            model.zero_grad()
            stale = model.first(x)
            stale.square().mean().backward()
            change()
            with torch.no_grad():
                for ours, theirs in zip(model.first.parameters(), plain.first.parameters(), strict=True):
                    theirs.copy_(full(ours))
                assert_same(model.first(x), plain.first(x), 2e-6, what)
                assert differs(model.first(x), stale.detach(), 1e-3), "control: stale codes"


@on_ranks(2)
def test_checkpoints_hold_wide_shards(rank, ranks, cases, tmp_path):
    """They load with another recipe and without one, and so do whole state dicts."""
    model = train(rtp_ext.fully_rotate(make(), recipe="mxfp8", timeout=30.0), rank, 1)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=str(tmp_path))
    values = [full(parameter) for parameter in model.parameters()]
    for recipe in (None, "float8_rowwise"):
        with cases.case(f"into {recipe}"):
            other = rtp_ext.fully_rotate(nn.Module.to(make(), torch.float32), recipe=recipe, timeout=30.0)
            state = {"model": get_model_state_dict(other)}
            dcp.load(state, checkpoint_id=str(tmp_path))
            assert all(map(torch.equal, map(full, other.parameters()), values))
            wide = wide_layers(recipe, ranks) if recipe else ("first", "mlp.0", "mlp.2", "last")
            plain = scaled(make(), recipe or "mxfp8", ranks, wide)
            with torch.no_grad():
                for parameter, value in zip(plain.parameters(), values, strict=True):
                    parameter.copy_(value)
                assert_same(other(batch(rank, 3)), plain(batch(rank, 3)), TOLERANCE, "outputs")


@on_ranks(2)
def test_llama(rank, ranks):
    """q, k and v travel together, and gate and up; the head stays wide. Explain says the same before and after."""
    plain = make_hf("llama")
    model = copy.deepcopy(plain)
    before = rtp_ext.explain(model, ranks=ranks, rank=rank, recipe="float8_rowwise", device="cpu")
    model = rtp_ext.fully_rotate(model, recipe="float8_rowwise", timeout=30.0)
    after = rtp_ext.explain(model)
    keys = ("name", "bundle", "travel", "held_bytes", "wide", "cut")
    rows = [[getattr(row, key) for key in keys] for row in before.parameters]
    assert rows == [[getattr(row, key) for key in keys] for row in after.parameters]
    bundles = {row.name.partition("layers.0.")[2]: row.bundle for row in after.parameters if "layers.0" in row.name}
    assert len({bundles[f"self_attn.{name}_proj.weight"] for name in "qkv"}) == 1
    assert bundles["mlp.gate_proj.weight"] == bundles["mlp.up_proj.weight"] != bundles["mlp.down_proj.weight"]
    scaled(plain, "float8_rowwise", ranks, ("lm_head",))
    inputs = inputs_of(make_batch("llama", rank, 0))
    ring = rtp_ext.ring_of(model)
    with torch.no_grad():
        sent = ring.bytes_sent("weight")
        logits = model(**inputs).logits
        assert ring.bytes_sent("weight") - sent == after.totals["forward_bytes"]
        assert_same(logits, plain(**inputs).logits, TOLERANCE, "logits")
    close_ring(model)


def test_frozen_mlps_stay_bundles():
    """Where all layers of an MLP are in blocks, no product of it is in 8 bits; a control without blocks."""
    config = SimpleNamespace(hidden_size=64, intermediate_size=128, mlp_bias=False, hidden_act="silu")
    model = nn.Sequential(LlamaMLP(config).requires_grad_(False), nn.Linear(64, 64))
    for frozen, bundles in (("int8", 1), (None, 2)):
        plan = rtp_ext.explain(model, ranks=2, rank=0, device="cpu", recipe="float8_rowwise", frozen=frozen)
        assert len({row.bundle for row in plan.parameters if row.name.startswith("0.")}) == bundles


def test_explain_says_why_a_product_has_one_shard():
    column = "each column of a shard has a scale"
    whole, lies = "a shard has one scale", "columns of a shard lie together"
    backward = dict.fromkeys(RECIPES, column) | {"float8_blockwise": None, "mxfp8": lies, "mxfp8_rceil": lies}
    single = ("float8_tensorwise", "float8_tensorwise_whole", "float8_rowwise_with_gw_hp")
    backward |= dict.fromkeys(single, whole)
    for name, why in backward.items():
        options = {"ranks": 2, "rank": 0, "device": "cpu", "recipe": name}
        plan = rtp_ext.explain(nn.Linear(256, 256, bias=False), group=2, **options)
        expected = None if why is None else f"1 in backward: {why}"
        assert plan.parameters[0].apart == expected
        assert f"2 shards a product{f' ({expected})' if expected else ''}, slots" in " ".join(str(plan).split())
        alone = rtp_ext.explain(nn.Linear(256, 256, bias=False), group=1, **options)
        assert alone.parameters[0].apart is None, "control"
    options |= {"device": "cuda"}
    plan = rtp_ext.explain(nn.Linear(256, 256, bias=False, device="meta"), group=2, **options)
    assert plan.parameters[0].apart == f"1 in forward: exponents of a shard lie in tiles, 1 in backward: {lies}"


@on_ranks(2)
def test_refusals(rank, ranks, cases):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "ring"))
    dims = rtp_ext.RotationDims(ring="ring", replicate="replicate")
    for error, options in (
        ("expected recipe to be None, 'float8_tensorwise'", {"recipe": "fp8"}),
        ("recipe='mxfp8' cannot be combined with in_place=True", {"in_place": True}),
        (
            "recipe='mxfp8' cannot be combined with outer.ZeroOuter",
            {"outer": rtp_ext.outer.ZeroOuter(), "mesh": mesh, "dims": dims},
        ),
        (
            "recipe='mxfp8' expected linear layers whose sizes fit it, or experts, got none in a L",
            {"model": nn.Linear(5, 4)},
        ),
        ("recipe='mxfp8' expected a compute dtype of 16 or 32 bits, got float64", {"model": make().double()}),
    ):
        with cases.case(error), pytest.raises(ValueError, match=error):
            model = options.pop("model", None) or make()
            rtp_ext.fully_rotate(model, **{"recipe": "mxfp8", "timeout": 30.0, **options})
