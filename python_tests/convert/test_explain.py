"""`rtp_ext.explain`: the plan before a conversion is that of the converted modules, and its bytes are those sent."""

import contextlib
import copy
import dataclasses
import json
import time

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import on_ranks
from hf_models import LENGTH, VOCABULARY, make
from models import LanguageModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import rtp_ext
from rtp_ext import RotationDims, outer
from rtp_ext.__main__ import main

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Norms(nn.Module):
    """Modules that do not rotate: norms, a stray parameter, a scalar, an unknown subclass; and two layers that do."""

    class Loud(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.loud = nn.LayerNorm(7), nn.Linear(7, 5), self.Loud(5, 5)
        self.last = nn.Linear(5, 7, bias=False)
        self.scale, self.factor = nn.Parameter(torch.ones(5)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.last(self.loud(self.first(self.norm(x))) * self.scale) * self.factor


class Attends(nn.Module):
    """Attention of all kinds, which torch's fused weights, separate weights and appended rows make."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(6, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(6, 3, kdim=5, vdim=4, add_bias_kv=True, batch_first=True)

    def forward(self, x):
        y = self.own(x, x, x, need_weights=False)[0]
        return self.cross(y, y[..., :5], y[..., :4], need_weights=False)[0]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 1, bias=False)

    def forward(self, x):
        return self.second(self.first(x))


class Tables(nn.Module):
    """Embeddings whose tables stay whole, one beside them that rotates."""

    def __init__(self) -> None:
        super().__init__()
        self.bounded = nn.Embedding(11, 4, max_norm=1.0)
        self.sparse = nn.Embedding(11, 4, sparse=True)
        self.free = nn.Embedding(11, 4)

    def forward(self, ids):
        return self.bounded(ids) + self.sparse(ids) + self.free(ids)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 11), nn.GELU(), nn.Linear(11, 6))


def features(*shape):
    return lambda: torch.randn(*shape, requires_grad=True)


def tokens(count):
    return lambda: torch.randint(0, count, (2, 5))


def text():
    return {"input_ids": torch.randint(0, VOCABULARY, (2, LENGTH)), "labels": torch.randint(0, VOCABULARY, (2, LENGTH))}


# name: (model, its input, options of fully_rotate)
MODELS = {
    "linears": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False)), features(4, 5), {}),
    "MLP": (mlp, features(4, 6), {}),
    "MLP layer by layer": (mlp, features(4, 6), {"bundle": False}),
    "MLP recomputed": (mlp, features(4, 6), {"bundle": "recompute"}),
    "frozen": (lambda: mlp().requires_grad_(False), features(4, 6), {"bundle": False}),
    "tied": (lambda: LanguageModel(tied=True), tokens(19), {}),
    "norms": (Norms, features(4, 7), {}),
    "convolutions": (Images, features(2, 3, 6, 6), {}),
    "tables": (Tables, tokens(11), {}),
    "llama": (lambda: make("llama"), text, {}),
    "gpt2": (lambda: make("gpt2"), text, {}),
    "mixtral": (lambda: make("mixtral"), text, {}),
    "qwen2, tied": (lambda: make("qwen2"), text, {}),
    "fused head": (lambda: make("llama"), text, {"loss_head": "fused"}),
    "bfloat16": (lambda: make("llama"), text, {"mp_policy": BF16}),
    "float32 sums of bfloat16": (
        lambda: make("llama"),
        text,
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    ),
    "int8": (lambda: make("gpt2"), text, {"travel": "int8", "gradient_route": "direct", "gradient_travel": "int8"}),
    "int8, experts": (lambda: make("mixtral"), text, {"travel": "int8"}),
    "direct gradients": (mlp, features(4, 6), {"gradient_route": "direct", "bundle": False}),
    "ring": (lambda: make("gpt2"), text, {"route": "ring", "transport": "c10d"}),
    "in place": (mlp, features(4, 6), {"in_place": True, "bundle": False, "transport": "c10d"}),
    "gathered layers": (lambda: make("llama"), text, {"route": "gather"}),
    "offload": (mlp, features(4, 6), {"offload_policy": CPUOffloadPolicy()}),
    "groups": (mlp, features(4, 6), {"group": 2, "bundle": False, "buffers": "lean"}),
}

# The same on a ring that was made before, with options of the ring. A hop that is sent ahead in vain, as for attention
# with weights of its own for query, key and value, comes on top of a plan.
ON_RINGS = {
    "attention": (Attends, features(2, 3, 6), {"prefetch": 0}),
    "chunks": (lambda: make("gpt2"), text, {"slot_cap": 1 << 9}),
    "chunks of int8": (lambda: make("gpt2"), text, {"slot_cap": 1 << 9, "travel": "int8", "gradient_route": "direct"}),
    "halves": (lambda: make("llama"), text, {"gradient_halves": True, "gradient_route": "chain"}),
    "gathered, in chunks": (lambda: LanguageModel(tied=True), tokens(19), {"route": "gather", "slot_cap": 1 << 8}),
}


def loss_of(model: nn.Module, batch) -> torch.Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    return (output.loss if isinstance(batch, dict) else output).float().mean()


def rows(plan) -> dict:
    return {row.name: row for row in plan.parameters}


def assert_same_plan(before, after) -> None:
    """Names what differs: equality alone would not."""
    for left, right in zip(before.parameters, after.parameters, strict=True):
        assert left == right
    for left, right in zip(before.modules, after.modules, strict=True):
        assert left == right
    assert before.ring == after.ring
    assert before == after


def assert_counted(model: nn.Module, batch, seed: int, steps: int = 2) -> None:
    """The bytes of a step are those that the ring counts."""
    ring, totals = rtp_ext.ring_of(model), rtp_ext.explain(model).totals
    for step in range(steps):
        torch.manual_seed(seed + step)
        before = ring.bytes_sent("weight"), ring.bytes_sent("gradient")
        loss_of(model, batch()).backward()
        weights, gradients = (
            ring.bytes_sent(channel) - then for channel, then in zip(("weight", "gradient"), before, strict=True)
        )
        assert weights == totals["forward_bytes"] + totals["backward_bytes"], (weights, totals)
        assert gradients == totals["gradient_bytes"], (gradients, totals)


def assert_held(plan, model: nn.Module) -> None:
    """Shapes, placements and bytes at home are those of the parameters."""
    named = dict(model.named_parameters(remove_duplicate=False))
    assert named.keys() == rows(plan).keys()
    for name, row in rows(plan).items():
        parameter = named[name]
        assert row.placements == tuple(map(repr, getattr(parameter, "placements", ())))
        assert row.shape == tuple(parameter.shape)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert row.tied_to is not None or row.held_bytes == local.nbytes, row


@on_ranks(few([2], [2, 3]))
def test_plans_before_and_after(rank, cases):
    for name, (build, batch, options) in MODELS.items():
        with cases.case(name):
            torch.manual_seed(0)
            model = build()
            classes = [type(part) for part in model.modules()]
            with no_communication():
                before = rtp_ext.explain(model, **options)
            assert [type(part) for part in model.modules()] == classes, "nothing is changed"
            rtp_ext.fully_rotate(model, **options)
            assert_same_plan(before, rtp_ext.explain(model))
            assert_same_plan(before, rtp_ext.explain(copy.deepcopy(model)))
            assert_held(before, model)
            assert_counted(model, batch, seed=rank)
            assert_same_plan(before, rtp_ext.explain(model))
            rtp_ext.ring_of(model).close()
    for name, (build, batch, options) in ON_RINGS.items():
        with cases.case(name), rtp_ext.Ring(**options) as ring:
            model = build()
            before = rtp_ext.explain(model, mesh=ring)
            rtp_ext.fully_rotate(model, mesh=ring)
            assert_same_plan(before, rtp_ext.explain(model))
            assert_held(before, model)
            assert_counted(model, batch, seed=rank)


@on_ranks([2, 3])
def test_slots_are_those_of_the_operation(rank, cases):
    """One layer on a ring: the slots that its passes took, to the byte, and no more in groups than were said."""
    ways = {
        **{f"group {group}": {"group": group} for group in range(1, torch.distributed.get_world_size() + 1)},
        "direct": {"gradient_route": "direct", "group": 2},
        "lean": {"gradient_route": "direct", "buffers": "lean"},
        "a budget": {"gradient_route": "direct", "buffers": 1},
    }
    found = {}
    with cases.case("slots"):
        for name, options in ways.items():
            found[name] = _peak(name, options)
        assert found["group 1"] < found["group 2"] and found["lean"] == found["a budget"] <= found["direct"]


def _peak(name, options) -> int:
    with rtp_ext.Ring(prefetch=0, **options) as ring:
        model = rtp_ext.fully_rotate(nn.Linear(70, 33, bias=False), mesh=ring)
        (before,) = rtp_ext.explain(model).parameters
        for _ in range(2):
            model(torch.randn(4, 70, requires_grad=True)).sum().backward()
        (row,) = rtp_ext.explain(model).parameters
        peak = sum(ring.slot_count(channel).peak_bytes for channel in ("weight", "gradient"))
        assert row.slots_bytes == before.slots_bytes == peak, (name, row, peak)
        assert row.group == options.get("group", 1) and row.predicted_seconds is None, (name, row)
        shards = "1 shard" if row.group == 1 else f"{row.group} shards"
        assert f"{shards} a product, slots of" in " ".join(str(rtp_ext.explain(model)).split())
        return peak


def test_the_prediction_of_an_mlp_is_shown():
    """All parameters of the bundle have the decision on it; before a ring there is none."""
    ring, build = rtp_ext.Ring.emulated(4), lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    before = rtp_ext.explain(build(), mesh=ring)
    assert {(row.group, row.predicted_seconds) for row in before.parameters} == {(1, None)}
    model = rtp_ext.fully_rotate(build(), mesh=ring)
    model(torch.randn(2, 8))
    (name,) = ring.gate.plans
    plan = ring.gate.plans[name]
    ring.gate.plans[name] = dataclasses.replace(plan, seconds={"groups of 2": 1e-4}, group=2, halves=True)
    after = rtp_ext.explain(model)
    assert {(row.group, row.predicted_seconds) for row in after.parameters} == {(2, 1e-4)}
    slots = [{row.slots_bytes for row in rows.parameters} for rows in (before, after)]
    assert len(slots[0]) == len(slots[1]) == 1 and min(slots[0]) < min(slots[1])


def test_the_prediction_of_a_layer_is_shown():
    """As the route planner has decided, in the model that has rotated."""
    ring = rtp_ext.Ring.emulated(4)
    model = rtp_ext.fully_rotate(nn.Linear(8, 8), mesh=ring)
    model(torch.randn(2, 8))
    (name,) = ring.gate.plans
    plan = ring.gate.plans[name]
    ring.gate.plans[name] = dataclasses.replace(plan, seconds={"rotate": 3e-4, "groups of 2": 1.25e-4}, group=2)
    found = rtp_ext.explain(model)
    assert {(row.group, row.predicted_seconds) for row in found.parameters} == {(2, 1.25e-4)}
    assert "2 shards a product" in str(found) and "predicted 125 us forward and backward" in " ".join(
        str(found).split()
    )
    rows_of = rtp_ext.explain(LanguageModel(tied=False), ranks=4, embedding="rows").parameters
    assert [row.route for row in rows_of if row.module_class == "Embedding"] == ["rows"], "as asked, before a ring"
    ring.gate.plans[name] = dataclasses.replace(plan, route="gather", seconds={"rotate": 3e-4, "gather": 2e-4})
    assert {(row.group, row.predicted_seconds) for row in rtp_ext.explain(model).parameters} == {(4, 2e-4)}


@contextlib.contextmanager
def no_communication():
    """Every collective and every new process group is an error."""

    def refuse(*_, **__):
        raise AssertionError("explain communicates")

    with pytest.MonkeyPatch.context() as patch:
        for name in dist.distributed_c10d.__all__:
            if name.startswith(("all_", "broadcast", "reduce", "barrier", "gather", "scatter", "send", "recv", "new_")):
                patch.setattr(dist, name, refuse)
                patch.setattr(dist.distributed_c10d, name, refuse)
        yield


@on_ranks(4)
def test_meshes(rank, cases):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dims = RotationDims(ring="b", replicate="a")
    policies = (None, outer.ZeroOuter(), outer.LocalSGD(2), outer.AllReduce())
    for policy in policies:
        with cases.case(f"replicas {policy}"):
            torch.manual_seed(0)
            model = LanguageModel(tied=True)
            with no_communication():
                before = rtp_ext.explain(model, mesh=grid, dims=dims, outer=policy)
            rtp_ext.fully_rotate(model, mesh=grid, dims=dims, outer=policy)
            assert_same_plan(before, rtp_ext.explain(model))
            assert_held(before, model)
            if isinstance(policy, outer.LocalSGD):
                rtp_ext.outer_of(model).attach(torch.optim.SGD(model.parameters()))
            assert_counted(model, tokens(19), seed=rank, steps=1)
    with cases.case("tensor parallelism"):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ring"))
        dims = RotationDims(ring="ring")
        styles = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        model = nn.ModuleDict({"norm": nn.LayerNorm(6), "up": nn.Linear(6, 10), "down": nn.Linear(10, 6)})
        parallelize_module(model, grid["tp"], styles)
        with no_communication():
            before = rtp_ext.explain(model, mesh=grid, dims=dims)
        rtp_ext.fully_rotate(model, mesh=grid, dims=dims)
        after = rtp_ext.explain(model)
        assert_same_plan(before, after)
        assert_held(before, model)
        assert rows(after)["up.weight"].placements == ("Shard(dim=0)", "Shard(dim=0)")
        assert rows(after)["norm.weight"].reason == "tensor parallelism has replicated it"


@on_ranks(2)
def test_details(rank, ring, cases):
    with cases.case("ignored parameters"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        options = {"mesh": ring, "ignored_params": iter([model[0].weight, *model[2].parameters()])}
        kept = [model[0].weight, *model[2].parameters()]
        before = rtp_ext.explain(model, **options)
        rtp_ext.fully_rotate(model, mesh=ring, ignored_params=kept)
        after = rtp_ext.explain(model)
        assert_same_plan(before, after)
        assert [row.moved for row in after.parameters] == ["ignored", "replicated", *["rotated"] * 2, *["ignored"] * 2]
        assert rows(after)["0.weight"].reason == "in ignored_params" and rows(after)["0.weight"].sent_bytes == 0
        assert_counted(model, features(3, 4), seed=rank)
    with cases.case("parts and lists"):
        model = LanguageModel(tied=True)
        rtp_ext.fully_rotate(model.blocks[0], mesh=ring, mp_policy=BF16)
        before = rtp_ext.explain(model, mesh=ring)
        assert rows(before)["blocks.0.up.weight"].travel == "bfloat16"
        rtp_ext.fully_rotate(model, mesh=ring)
        assert_same_plan(before, rtp_ext.explain(model))
        pair = [nn.Linear(3, 4), nn.Linear(4, 3)]
        before = rtp_ext.explain(pair, mesh=ring)
        assert str(rtp_ext.explain(tuple(pair), mesh=ring)) == str(before)
        assert list(rows(before)) == ["Linear.weight", "Linear.bias", "Linear_2.weight", "Linear_2.bias"]
        rtp_ext.fully_rotate(pair, mesh=ring)
        assert rows(rtp_ext.explain(pair[1]))["weight"].sent_bytes == rows(before)["Linear_2.weight"].sent_bytes
    with cases.case("layers that were there before"):
        model = nn.Sequential(
            rtp_ext.nn.RotatedMLP(4, 6, ring=ring),
            rtp_ext.nn.Flyweight(nn.Linear(4, 6), ring, shard_dims={"weight": 0, "bias": 0}),
            nn.Linear(6, 4),
        )
        before = rtp_ext.explain(model, mesh=ring)
        rtp_ext.fully_rotate(model, mesh=ring)
        assert_same_plan(before, rtp_ext.explain(model))
        assert rows(before)["0.up_proj.weight"].bundle == "0 (up_proj, down_proj)"
        assert_counted(model, features(3, 4), seed=rank)
    with cases.case("what became of a model since"):
        model = rtp_ext.fully_rotate(mlp(), mesh=ring)
        assert rows(rtp_ext.explain(model))["0.weight"].bundle == "Sequential (0, 2)"
        model[1].register_forward_hook(lambda *_: None)
        model[1].adapter = nn.Parameter(torch.ones(2))
        after = rtp_ext.explain(model)
        assert rows(after)["0.weight"].bundle == "0" and rows(after)["1.adapter"].reason == "added after fully_rotate"
        model = rtp_ext.fully_rotate(nn.Sequential(nn.Bilinear(4, 4, 6)), mesh=ring)
        assert rows(rtp_ext.explain(model))["0.bias"].moved == "gathered"
        model[0].bias = nn.Parameter(torch.ones(6))
        bias = rows(rtp_ext.explain(model))["0.bias"]
        assert (bias.moved, bias.shape) == ("replicated", (6,)), "a plain parameter is no shard"
    with cases.case("what is refused"):
        tied = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 5, bias=False))
        tied[1].weight = tied[0].weight
        for call in (rtp_ext.explain, rtp_ext.fully_rotate):
            with pytest.raises(ValueError, match="1 shares a parameter with 0"):
                call(tied, mesh=ring)
            with pytest.raises(ValueError, match="expected route to be one of"):
                call(mlp(), route="left")
            with pytest.raises(ValueError, match="in_place=False on a ring of travel='int8'"):
                call(mlp(), travel="int8", in_place=True)
        lazy = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(4))
        with pytest.raises(ValueError, match=r"got the uninitialized weight of 1 \(LazyLinear\): call the plain model"):
            rtp_ext.fully_rotate(lazy, mesh=ring)
        assert type(lazy[0]) is nn.Linear, "before, it had been converted when the second layer failed"
        with pytest.raises(ValueError, match="inside a converted model: pass that model"):
            rtp_ext.explain(model[0])
        assert type(tied[1]) is nn.Linear
        with pytest.raises(ValueError, match=r"ranks=4, rank=0, got a \w*Sequential that fully_rotate has converted"):
            rtp_ext.explain(model, ranks=4)


def test_without_other_ranks(capsys, tmp_path):
    assert not dist.is_initialized()
    with torch.device("meta"):
        model = make("llama")
    plan = rtp_ext.explain(model, ranks=4, rank=1, mp_policy=BF16)
    assert plan.ring.device == "cuda" and plan.ring.ranks == 4
    row = rows(plan)["model.layers.0.mlp.up_proj.weight"]
    assert row.shard_sizes == (10, 10, 10, 7) and row.bundle == "model.layers.0.mlp (gate_proj, up_proj, down_proj)"
    assert row.held_bytes == 10 * 24 * 4 and row.forward_bytes == 3 * 10 * 24 * 2, "direct: its own shard to all others"
    assert rows(rtp_ext.explain(model, ranks=4, rank=1, route="ring"))[row.name].forward_bytes == (37 - 10) * 24 * 4
    assert rows(plan)["model.norm.weight"].moved == "gathered"
    text = str(plan)
    assert "LlamaForCausalLM: 21 parameters on a ring of 4, seen from rank 1" in text
    assert "it is not a layer that rotates" in text and "total" in text
    model.config.save_pretrained(tmp_path)
    assert main(["explain", "--hf-config", str(tmp_path), "--ranks", "4", "--rank", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["totals"] == rtp_ext.explain(model, ranks=4, rank=1).totals
    assert main(["explain", "--hf-config", str(tmp_path / "config.json"), "--ranks", "2"]) == 0
    assert "on a ring of 2" in capsys.readouterr().out
    assert main(["explain", "--hf-config", str(tmp_path), "--ranks", "2", "--frozen", "nf4"]) == 0
    assert (
        "Wide, although blocks or products in 8 bits were asked for:\n  model.embed_tokens.weight"
        in capsys.readouterr().out
    )
    assert main(["explain", "--hf-config", str(tmp_path / "nothing"), "--ranks", "2"]) == 1
    assert main(["explain", "--model", "gpt-3-small", "--ranks", "2", "--param-dtype", "bf16", "--json"]) == 0
    shapes = {each["name"]: each["shape"] for each in json.loads(capsys.readouterr().out)["parameters"]}
    assert (
        shapes["transformer.h.11.mlp.c_fc.weight"] == [768, 3072] and "transformer.h.12.mlp.c_fc.weight" not in shapes
    )
    for wrong in ({"ranks": 2, "rank": 2}, {"ranks": 0}, {"ranks": 2, "dims": RotationDims()}, {"rank": 1}):
        with pytest.raises(ValueError, match="explain: expected"):
            rtp_ext.explain(model, **wrong)
    for wrong in ({"module": 5}, {"module": [model, 5]}, {"ranks": 2.5}, {"ignored_params": ["lm_head.weight"]}):
        with pytest.raises(TypeError, match="expected"):
            rtp_ext.explain(**{"module": model, "ranks": 2, **wrong})
    with pytest.raises(ValueError, match=r"got torch.int32 for 0.weight of a Linear"):
        whole = nn.Linear(2, 2)
        whole.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int32), requires_grad=False)
        rtp_ext.explain(nn.Sequential(whole), ranks=2)


@on_ranks(2)
def test_a_refusal_on_one_rank_reaches_the_others(rank):
    model = nn.Sequential(nn.EmbeddingBag(8, 4, sparse=rank == 0), nn.Linear(4, 4))
    began = time.monotonic()
    with pytest.raises(ValueError) as caught:
        rtp_ext.fully_rotate(model, timeout=30.0)
    assert time.monotonic() - began < 20, "no rank waits for the timeout"
    assert "sparse" in str(caught.value) and (rank > 0 or type(model[1]) is nn.Linear), caught.value


def test_emulated_ring():
    for hosts, route in ((1, "ring"), (1, "gather"), (2, "two-level")):
        ring = rtp_ext.Ring.emulated(4, route=route, hosts=hosts)
        model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 4, bias=False))
        before = rtp_ext.explain(model, mesh=ring)
        rtp_ext.fully_rotate(model, mesh=ring)
        assert_same_plan(before, rtp_ext.explain(model))
        assert rows(before)["1.weight"].reason == "an emulated ring has no other ranks to shard it over"
        assert_counted(model, features(3, 8), seed=0)
