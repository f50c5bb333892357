"""Products in 8 bits: bytes and memory of rings against the engine, times worked by hand, other plans, refusals."""

import dataclasses
import json

import pytest
from shared.card import RESULTS

from rtp_ext.planner import (
    Cluster,
    ModelSpec,
    RotatedOperation,
    Strategy,
    TimeConstants,
    Weight,
    estimate_memory,
    estimate_time,
    rotations_of,
    rtp_bytes,
)
from rtp_ext.planner.native import engine
from rtp_ext.planner.plans.when import cluster_of, compare, recipe_table, recipe_tokens
from rtp_ext.planner.rotation.family import BlockPlan, Sizes, block_time
from rtp_ext.planner.rotation.seconds import casts_s, step_seconds
from rtp_ext.planner.time.links import Group, gather_s
from rtp_ext.planner.time.stage import StageClock
from rtp_ext.planner.time.work import Product, product_s, scaled_weight_bytes
from rtp_ext.recipe_planes import RECIPES, recipe

CONSTANTS = TimeConstants.default()
H100 = Cluster.preset("h100-80gb")
LLAMA = ModelSpec.preset("llama-3-8b", seq=8192)
SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 512, "vocab_size": 132, "max_position_embeddings": 24}


@pytest.mark.parametrize("name", ["float8_rowwise", "float8_tensorwise", "float8_blockwise", "mxfp8"])
def test_bytes_and_memory_are_the_engine_s(name):
    """Keys and values of 64 outputs a shard do not fit blocks of 128: they stay wide, and travel apart from queries."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from live_bytes import STEADY

    import rtp_ext

    ranks, config = 2, transformers.LlamaConfig(**SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config)
    spec = ModelSpec.from_hf_config(config.to_dict())
    ids = torch.randint(0, 132, (2, 12), generator=torch.Generator().manual_seed(0))
    with rtp_ext.Ring.emulated(ranks) as ring:
        rtp_ext.fully_rotate(model, mesh=ring, recipe=name, loss_head="fused")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(STEADY):
            before = ring.bytes_sent("weight")
            model(input_ids=ids, labels=ids).loss.backward()
            sent = ring.bytes_sent("weight") - before
            optimizer.step()
        counted = [ring.slot_count(channel).peak_bytes for channel in ("weight", "gradient")]
        codes = ring.communicator.executor.codes()[0]
    ways = {"recipe": recipe(name), "ranks": ranks, "gpu": False}
    rotations, others = rotations_of(spec, fused_loss=True, **ways)
    held = rtp_bytes(rotations, ranks, others=others, optimizer_moments=0)
    assert [held.weight_slots_bytes, held.gradient_slots_bytes] == counted
    assert held.codes_bytes == codes > 0
    size = {"ranks": ranks, "in_place": False, "sends_anywhere": True, "receives_anywhere": True, "cast": False}
    size |= {"compute_bytes": 4, "reduce_bytes": 4, "slot_cap": engine().SLOT_CAP}
    traffic = [engine().traffic(each.facts, 0, **size) for each in rotations]
    assert sum(forward + backward for each in traffic for forward, backward, _ in each) == sent
    for rotation, each in zip(rotations, traffic, strict=True):
        if rotation.recipe is not None:
            weight = rotation.weights[0]
            told = [(ranks - 1) * weight.travelling_bytes(ranks, 4, backward=backward) for backward in (False, True)]
            assert told == list(each[0][:2])
    layer = [[weight.recipe is not None for weight in each.weights] for each in rotations[1:6]]
    whole = [[True] * 3, [True], [True] * 2, [True], [True] * 3]
    assert layer == ([[True], [False], [False], [True], [True] * 2] if name == "float8_blockwise" else whole)
    plain, _ = rotations_of(spec, fused_loss=True)
    assert rtp_bytes(plain, ranks).weight_slots_bytes != counted[0], "control: wide"


@pytest.mark.parametrize("name", ["float8_rowwise", "float8_blockwise"])
def test_bytes_and_memory_of_experts_are_the_engine_s(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from live_bytes import STEADY

    import rtp_ext

    ranks, config = 2, transformers.MixtralConfig(num_local_experts=4, **SMALL, experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config)
    spec = ModelSpec.from_hf_config(config.to_dict())
    ids = torch.randint(0, 132, (2, 12), generator=torch.Generator().manual_seed(0))
    with rtp_ext.Ring.emulated(ranks) as ring:
        rtp_ext.fully_rotate(model, mesh=ring, recipe=name, loss_head="fused")
        for _ in range(STEADY):
            before = ring.bytes_sent("weight")
            model(input_ids=ids, labels=ids).loss.backward()
            sent = ring.bytes_sent("weight") - before
        counted = [ring.slot_count(channel).peak_bytes for channel in ("weight", "gradient")]
        told = rtp_ext.explain(model).parameters
        codes = ring.communicator.executor.codes()[0]
    assert sum(row.forward_bytes + row.backward_bytes for row in told) == sent
    rotations, others = rotations_of(spec, fused_loss=True, recipe=recipe(name), ranks=ranks, gpu=False)
    held = rtp_bytes(rotations, ranks, others=others, optimizer_moments=0)
    assert [held.weight_slots_bytes, held.gradient_slots_bytes] == counted
    assert held.codes_bytes == codes > 0
    bundles = [each for each in rotations if each.kind == "bundle"]
    assert len(bundles) == 2 and all(each.recipe is not None for each in bundles)
    wide, _ = rotations_of(spec, fused_loss=True, recipe=recipe(name), ranks=ranks, gpu=False, bundle="recompute")
    assert all(each.recipe is None for each in wide if each.kind == "bundle")
    size = {"ranks": ranks, "in_place": False, "sends_anywhere": True, "receives_anywhere": True, "cast": False}
    size |= {"compute_bytes": 4, "reduce_bytes": 4, "slot_cap": engine().SLOT_CAP}
    for each in bundles:
        for weight, found in zip(each.weights, engine().traffic(each.facts, 0, **size), strict=True):
            told = [(ranks - 1) * weight.travelling_bytes(ranks, 4, backward=backward) for backward in (False, True)]
            assert told == list(found[:2])
    plain, _ = rotations_of(spec, fused_loss=True)
    assert rtp_bytes(plain, ranks).weight_slots_bytes != held.weight_slots_bytes, "control: wide"


def test_products_of_experts_by_hand():
    """8 experts of [4096, 14336] and back, 2 a token: on 8 ranks one of each in a shard, a call each."""
    tokens, ranks, bandwidth = 8192, 8, 3.35e12 * 0.7
    shapes = ((8, 14336, 4096), (8, 4096, 14336))

    def operation(name):
        return RotatedOperation("bundle", tuple(Weight(shape, recipe=name and recipe(name)) for shape in shapes))

    launches = dataclasses.replace(CONSTANTS, kernel_s=4e-6)
    ways = (tokens, ranks, H100, launches, False, 2, 2)
    found, wide = (step_seconds(operation(name), *ways) for name in ("float8_rowwise", None))
    alone = [
        product_s(Product("", tokens // 4, outputs, inputs, element_bytes=1), H100, launches)
        + 4 * (tokens // 4) * outputs / bandwidth
        for _, outputs, inputs in shapes
    ]
    assert found["forward"] == pytest.approx(sum(alone) + 2 * 4e-6)
    assert found["wgrad"] < wide["wgrad"]
    twice = step_seconds(operation("float8_rowwise"), *ways, shards=2)
    assert twice["forward"] == pytest.approx(2 * found["forward"]), "experts of two shards are not one product"
    made = casts_s(operation("float8_rowwise"), tokens, ranks, 2, True, H100, CONSTANTS, experts_per_token=2)
    # codes of x and hidden values; of both gradients twice, and of both operands again; each value is read twice
    assert made[0] == pytest.approx(5 * 2 * tokens * (4096 + 14336) / bandwidth)
    assert made[1] == pytest.approx(5 * 2 * tokens * 3 * (4096 + 14336) / bandwidth)
    mixtral = ModelSpec.preset("mixtral-8x7b", seq=2048)
    for each in ({}, {"bundle": "recompute"}, {"ep": 2, "rtp": 4}):
        plan = Strategy(**{"rtp": 8, "recipe": "float8_rowwise", **each})
        assert estimate_time(mixtral, Cluster.preset("h100-80gb", gpus=8), plan, 8).step_seconds > 0


def _operation(outputs, inputs, name):
    return RotatedOperation("linear", (Weight((outputs, inputs), recipe=name and recipe(name)),))


def test_products_of_a_shard_by_hand():
    """float8_rowwise, 8 ranks, [14336, 4096] and 8192 tokens: y is copied, products add to dx and dW, at 70 % of 3.35
    TB."""
    tokens, ranks, outputs, inputs, shard = 8192, 8, 14336, 4096, 1792
    launches = dataclasses.replace(CONSTANTS, kernel_s=4e-6)
    bandwidth = 3.35e12 * 0.7
    ways = (tokens, ranks, H100, launches, False, 2, 0, (8.0, 8.0))
    found = step_seconds(_operation(outputs, inputs, "float8_rowwise"), *ways)

    def product(rows, columns, depth, moved):
        alone = product_s(Product("", rows, columns, depth, element_bytes=1), H100, launches)
        return alone + (moved - 2) * rows * columns / bandwidth

    assert found["forward"] == pytest.approx(product(tokens, shard, inputs, 2 + 2 + 2) + 4e-6)
    assert found["dgrad"] == pytest.approx(product(tokens, inputs, shard, 8))
    assert found["wgrad"] == pytest.approx(product(shard, inputs, tokens, 8))
    wide = step_seconds(_operation(outputs, inputs, "float8_rowwise_with_gw_hp"), *ways)["wgrad"]
    plain = step_seconds(_operation(outputs, inputs, None), *ways)["wgrad"]
    assert wide == pytest.approx(plain), "16 bits"
    made = casts_s(_operation(outputs, inputs, "float8_rowwise"), tokens, ranks, 2, True, H100, CONSTANTS)
    # codes of x; of dy twice, and of x again, for dW; each value is read twice; the sum of dx is cast
    assert made[0] == pytest.approx(5 * tokens * inputs / bandwidth)
    assert made[1] == pytest.approx((5 * tokens * (2 * outputs + inputs) + 6 * tokens * inputs) / bandwidth)
    turned = casts_s(_operation(outputs, inputs, "float8_tensorwise"), tokens, ranks, 2, True, H100, CONSTANTS)
    assert turned[1] - made[1] == pytest.approx(2 * outputs * inputs / bandwidth), "codes are transposed on arrival"


def test_groups_are_of_passes_whose_planes_stack():
    def launches(name):
        operations, group = (_operation(4096, 4096, name),), Group(H100, 8)
        plan = BlockPlan((8,), "chain", 0)
        time = block_time(operations, ((0.0,), (0.0,)), 8192, group, CONSTANTS, Sizes(), plan)
        hops = time.host_s - time.host_calls * CONSTANTS.driver_call_s
        return round(hops / CONSTANTS.engine_product_s)

    # forward, dgrad, wgrad
    assert launches(None) == 1 + 1 + 8
    assert launches("float8_blockwise") == 1 + 1 + 8
    assert launches("float8_rowwise") == launches("float8_tensorwise") == 1 + 8 + 8
    assert launches("mxfp8") == 8 + 8 + 8


def test_layers_with_one_input_are_one_product_where_their_codes_join():
    def seconds(name, *outputs, joined=True):
        weights = tuple(Weight((each, 4096), recipe=recipe(name)) for each in outputs)
        ways = (8192, 8, H100, CONSTANTS, False, 2, 0, (8.0, 8.0))
        return step_seconds(RotatedOperation("linear", weights), *ways, joined=joined)

    joins = {"float8_blockwise": "all", "float8_rowwise": "forward, wgrad", "float8_tensorwise": "forward", "mxfp8": ""}
    for name, kinds in joins.items():
        both, one, wide = seconds(name, 8192, 8192), seconds(name, 8192), seconds(name, 16384)
        for kind, time in both.items():
            expected = wide if kinds == "all" or kind in kinds else {kind: 2 * one[kind]}
            assert time == pytest.approx(expected[kind]) != 2 * wide[kind], (name, kind)
            assert seconds(name, 8192, 8192, joined=False)[kind] == pytest.approx(2 * one[kind])


def test_rates_are_near_those_that_were_measured():
    """Whole weights within 10 % of the measured ratio to 16 bits; products of a shard within 45 %, and none is faster
    in 8 bits than in 16 where it was not."""
    rows = [json.loads(line) for line in (RESULTS / "h100-80gb-hbm3-1gpu" / "products8.jsonl").read_text().splitlines()]
    plain = {(row["n"], row["k"], row["tokens"]): row["t_us"] for row in rows if row["recipe"] == "bfloat16"}
    eights = [row for row in rows if row["recipe"] != "bfloat16"]
    for row in eights:
        shape = (row["n"], row["k"], row["tokens"])
        product = Product("", row["tokens"], row["n"], row["k"])
        one, two = (product_s(dataclasses.replace(product, element_bytes=size), H100, CONSTANTS) for size in (1, 2))
        whole = min(row["n"], row["k"]) == 4096
        if shape[0] > 1792:
            assert whole and one / two == pytest.approx(row["t_us"] / plain[shape], rel=0.1), row["case"]
        else:
            assert 1e6 * one == pytest.approx(row["t_us"], rel=0.26), row["case"]
        assert (one > two) == (row["t_us"] > plain[shape]), row["case"]
    assert len(eights) == 16


def test_time_and_memory_of_a_ring():
    plan = Strategy(rtp=8, fused_loss=True, recompute="full", recipe="float8_rowwise")
    plain = dataclasses.replace(plan, recipe=None)

    def seconds(strategy, link, tokens):
        model = dataclasses.replace(LLAMA, seq=tokens)
        return estimate_time(model, cluster_of(link, 8), strategy, 8).step_seconds

    for link in ("NVLink", "PCIe"):
        times = [seconds(plan, link, tokens) for tokens in (1024, 2048, 4096, 8192, 16384)]
        assert times == sorted(times)
    few = seconds(plan, "PCIe", 1024) / seconds(plain, "PCIe", 1024)
    assert 0.75 < few < 0.95, "half the bytes of weights, but for a backward what its forward kept in 16 bits"
    assert seconds(plan, "NVLink", 16384) > seconds(plain, "NVLink", 16384), "control: products, not hops"

    scaled, wide = (estimate_memory(LLAMA, H100, dataclasses.replace(each, bundle=False), 8) for each in (plan, plain))
    values = sum(outputs * inputs for outputs, inputs in LLAMA.linear_shapes) * LLAMA.layers / 8
    more = scaled.components["parameters"] - wide.components["parameters"]
    assert 2 * values < more < 2.01 * values, "two planes of codes, scales of rows and columns"


def test_plans_without_rotation():
    """fully_shard gathers one byte a weight with one scale, two with a scale a row; each rank quantizes all weights, or
    with one scale its shard, before each pass."""
    numbers = sum(outputs * inputs for outputs, inputs in LLAMA.linear_shapes)
    one = Strategy(dp=8, zero=3, fp8=True, stack="torch")
    rows, ddp = dataclasses.replace(one, fp8_scaling="rowwise"), dataclasses.replace(one, zero=0)
    assert scaled_weight_bytes(LLAMA, one) == (9 * numbers / 8, 9 * numbers / 8 + 2 * numbers)
    assert scaled_weight_bytes(LLAMA, rows) == scaled_weight_bytes(LLAMA, ddp) == (5 * numbers, 5 * numbers)
    assert scaled_weight_bytes(LLAMA, dataclasses.replace(one, fp8=False)) == (0, 0)
    slow, model = cluster_of("400 Gb/s", 8), dataclasses.replace(LLAMA, seq=256)

    def exposed(strategy):
        clock = StageClock(model, slow, strategy, CONSTANTS)
        return clock.per_layer["unsharding"] + clock.layer.forward + clock.layer.backward

    group = Group(slow, 8)
    saved = gather_s(group, 2 * numbers, CONSTANTS) - gather_s(group, numbers, CONSTANTS)
    assert exposed(rows) - exposed(one) == pytest.approx(2 * saved, rel=0.01)
    assert exposed(dataclasses.replace(one, fp8=False)) == pytest.approx(exposed(rows), rel=0.01)


def test_questions_and_the_command(capsys):
    from rtp_ext.__main__ import main

    tokens = recipe_tokens(LLAMA, 8, "h100-80gb", "float8_rowwise")["PCIe"]
    wide, scaled, until = tokens.values()
    assert scaled < until < wide
    assert f"| {wide} " in recipe_table([("llama-3-8b", 8)], "h100-80gb", "float8_rowwise")
    cell = compare("gpt-3-xl", 8, "NVLink", 2048, recipe="float8_rowwise")
    rings = [plan.strategy for name, plan in cell.plans.items() if plan and name.startswith("rtp")]
    assert rings and all(each.recipe == "float8_rowwise" for each in rings)
    assert cell.plans["fsdp"].strategy.fp8 and cell.plans["fsdp"].strategy.fp8_scaling == "rowwise"
    asked = ["plan", "--model", "llama-3-8b", "--recipe", "float8_tensorwise", "--plan", "rtp=8", "--plan", "zero=3"]
    assert main([*asked, "--json"]) == 0
    plans = [each["strategy"] for each in json.loads(capsys.readouterr().out)["plans"]]
    assert [(each["recipe"], each["fp8"]) for each in plans] == [("float8_tensorwise", False), (None, True)]
    assert main([*asked, "--explain"]) == 0
    assert "codes and scales of the own shards, float8_tensorwise" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "gpu", "words"),
    [
        ({"in_place": True}, "h100-80gb", "expected in_place False with recipe"),
        ({"frozen": "nf4", "lora_rank": 8}, "h100-80gb", "expected frozen None with recipe"),
        ({"lora_rank": 8}, "h100-80gb", "expected lora_rank 0 with recipe"),
        ({"tp": 2}, "h100-80gb", "expected tp 1 with recipe"),
        ({"offload": True}, "h100-80gb", "expected offload False with recipe"),
        ({"outer": "zero", "dp": 2}, "h100-80gb", "no outer zero"),
        ({"collective": "yes"}, "h100-80gb", "expected collective auto or no"),
        ({"recipe": "float8"}, "h100-80gb", "expected recipe of"),
        ({"recipe": None, "fp8": True}, "h100-80gb", "fp8 is of plans without rotation"),
        ({"rtp": 1, "dp": 8}, "h100-80gb", "recipe needs rtp"),
        ({}, "a100-80gb", "float8_rowwise needs GPUs .* got none for a100-80gb"),
        ({}, "xeon-8452y-512gb", "got none for xeon"),
        ({"recipe": "mxfp8"}, "h100-80gb", "exponents of blocks"),
    ],
)
def test_refusals(change, gpu, words):
    with pytest.raises(ValueError, match=words):
        strategy = Strategy(**{"rtp": 8, "recipe": "float8_rowwise", **change})
        estimate_memory(LLAMA, Cluster.preset(gpu, gpus=16), strategy)


def test_what_can_be_combined():
    for change in ({"travel": "int8"}, {"pp": 2}, {"dp": 2}, {"buffers": "lean"}, {"bundle": "recompute"}):
        plan = Strategy(rtp=8, recipe="float8_rowwise", **change)
        assert estimate_time(LLAMA, Cluster.preset("h100-80gb", gpus=16), plan).step_seconds > 0
    for name in RECIPES:
        plan = Strategy(rtp=8, recipe=name)
        assert estimate_time(LLAMA, Cluster.preset("b200-180gb"), plan, 8).step_seconds > 0
    narrow = dataclasses.replace(LLAMA, hidden=24, heads=4, kv_heads=4, ffn=40, head_dim=6)
    with pytest.raises(ValueError, match="expected linear layers whose sizes fit it, got none"):
        estimate_time(narrow, H100, Strategy(rtp=8, recipe="float8_rowwise"), 8)
