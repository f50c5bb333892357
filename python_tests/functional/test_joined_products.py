"""Weights that multiply the same input are one operand: the products of each pass are counted, and their results are
those of the plain layers in one process."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from grids import few
from harness import on_ranks
from operation_checks import EXACT, Operation, check_controls, check_frozen, check_pass
from operations.bundles import make_mlp
from operations.layers import make_linear, make_linears
from reference import random
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import rtp_ext
from rtp_ext.functional import rotated_linears

GROUPED = {"q": 17, "k": 9, "v": 9}  # uneven on every ring of 2 to 4 ranks
WIDE = 64  # features whose rows leave no gap between the tensors of a slot
NARROW = 61
TOLERANCES = {torch.float64: (EXACT, EXACT), torch.float32: (2e-6, 5e-6), torch.bfloat16: (2e-2, 2e-2)}


def many(operation: Operation) -> Operation:
    return replace(operation, inputs=lambda form, rank, seed: operation.inputs("many", rank, seed))


def products(operation: Operation, ring: rtp_ext.Ring, form: str = "many") -> tuple[int, int]:
    """The matrix products of a forward, and of a backward with all gradients."""
    shards = operation.shards(ring.rank, ring.size)
    (x,) = operation.inputs(form, ring.rank, 0)
    return counted(lambda: operation.rotated(shards, [x.requires_grad_()], ring=ring))


def counted(call: Callable[[], torch.Tensor]) -> tuple[int, int]:
    counts = []
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        y = call()
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        y.sum().backward()
    for profiled in (forward, backward):
        events = Counter(event.name for event in profiled.events())
        counts.append(events["aten::addmm"] + events["aten::mm"])
    return counts[0], counts[1]


QKV = {
    "grouped queries": partial(make_linears, GROUPED, WIDE),
    "gaps in the slots": partial(make_linears, GROUPED, NARROW),
    "biases": partial(make_linears, GROUPED, WIDE, biased=GROUPED),
    "some biases": partial(make_linears, GROUPED, WIDE, biased=("q", "v")),
    "even": partial(make_linears, {"q": 24, "k": 12, "v": 12}, WIDE, biased=GROUPED),
    "last shards empty": partial(make_linears, {"q": 5, "k": 2, "v": 1}, WIDE),
}


@on_ranks(few([1, 3], [1, 2, 3, 4]))
def test_results(cases, ring):
    for name, make in QKV.items():
        for dtype, tolerances in TOLERANCES.items():
            with cases.case(f"{name} {dtype}"):
                check_pass(make(dtype=dtype), ring, "many", tolerances)
        with cases.case(f"{name}, few tokens"):
            check_pass(make(), ring)
        with cases.case(f"{name}, an output that nothing depends on"):
            check_unused(make(used=("q", "v")), ring)
    for activation, bias in (("swiglu", False), ("geglu", True)):
        for dtype, tolerances in TOLERANCES.items():
            with cases.case(f"{activation} bias={bias} {dtype}"):
                check_pass(make_mlp((WIDE, 17, 5), activation, dtype, bias), ring, "many", tolerances)
        with cases.case(f"{activation} recomputed"):
            check_pass(make_mlp((WIDE, 17, 5), activation, bias=bias, recompute=True), ring, "many")


def check_unused(operation: Operation, ring: rtp_ext.Ring) -> None:
    """The weight of the unused output has a gradient of zeros."""
    actual = check_pass(operation, ring, "many")
    assert not actual.gradients["k"].any()


@on_ranks([3])
def test_a_shard_gives_the_same_bits_at_its_owner(rank, ranks, cases, ring):
    for name, make in QKV.items():
        operation = make(dtype=torch.float32)
        (x,) = operation.inputs("many", 0, 0)
        y = operation.rotated(operation.shards(rank, ranks), [x], ring=ring)
        with cases.case(name):
            assert len(set(ring.exchange(y.detach().numpy().tobytes().hex()))) == 1


@on_ranks([2, 3])
def test_tolerances_refuse_wrong_results(ring):
    for dtype, tolerances in TOLERANCES.items():
        check_controls(many(make_linears(GROUPED, WIDE, dtype)), ring, tolerances)
        check_controls(many(make_mlp((WIDE, 17, 5), dtype=dtype)), ring, tolerances)


@on_ranks([2, 3])
def test_frozen_weights_and_inputs(cases, ring):
    check_frozen(cases, many(make_linears(GROUPED, WIDE)), ring)
    check_frozen(cases, many(make_mlp((WIDE, 17, 5), bias=False)), ring)


WAYS = [
    ({"gradient_halves": True}, EXACT),
    ({"in_place": True, "transport": "c10d"}, EXACT),
    ({"route": "direct"}, EXACT),
    ({"route": "gather"}, EXACT),
    ({"gradient_route": "direct"}, EXACT),
    ({"travel": "bfloat16"}, 2e-2),
    ({"travel": "int8"}, 3e-2),
]


@on_ranks(few([3], [2, 3, 4]))
def test_ways_to_travel(ranks, cases):
    operations = {name: make() for name, make in QKV.items()}
    for options, tolerance in WAYS:
        with rtp_ext.Ring(timeout=30.0, **options) as ring:
            shards = 1 if "route" in options and options["route"] == "gather" else ranks
            wgrads = 2 * shards if "gradient_halves" in options else shards
            for name, operation in operations.items():
                with cases.case(f"{name} {options}"):
                    check_pass(operation, ring, "many", (tolerance, tolerance))
                if name != "last shards empty":
                    with cases.case(f"products of {name} {options}"):
                        assert products(operation, ring) == (shards, shards + wgrads)


@on_ranks(few([3], [2, 3, 4]))
def test_groups(rank, ranks, cases):
    """Joined operands of several shards: ceil(R / g) products, one more where the owners of a group wrap around."""
    for group in range(2, ranks + 1):
        for gradients in ("chain", "direct"):
            with rtp_ext.Ring(timeout=30.0, group=group, gradient_route=gradients) as ring:
                for name, make in QKV.items():
                    with cases.case(f"{name}, group {group}, {gradients}"):
                        check_pass(make(), ring, "many")
                forward, backward = (_wrapped(ranks, rank, group, up) for up in (-1, 1))
                with cases.case(f"products, group {group}, {gradients}"):
                    assert products(make_linears(GROUPED, WIDE), ring) == (forward, 2 * backward)


def _wrapped(ranks: int, rank: int, group: int, up: int) -> int:
    owners = [(rank + up * step) % ranks for step in range(ranks)]
    first = ranks - (-(-ranks // group) - 1) * group
    groups = [owners[:first], *(owners[at : at + group] for at in range(first, ranks, group))]
    return sum(1 + (len(each) < ranks and {0, ranks - 1} <= {*each}) * (len(each) > 1) for each in groups)


@on_ranks([1, 2, 3, 4])
def test_products_of_a_block(ranks, cases, ring):
    """Four products a shard forward and eight backward; three times those of q, k and v where tokens are few."""
    block = [
        make_linears(GROUPED, WIDE),
        make_linear((WIDE, WIDE), bias=False),
        make_mlp((WIDE, 24, WIDE), bias=False),
    ]
    counts = [products(each, ring) for each in block]
    with cases.case("block"):
        assert [sum(each) for each in zip(*counts, strict=True)] == [4 * ranks, 8 * ranks], counts
    with cases.case("few tokens"):
        nonempty = sum(size > shard * -(-size // ranks) for size in GROUPED.values() for shard in range(ranks))
        assert products(block[0], ring, "1d")[0] == nonempty


class Layer(nn.Module):
    """A decoder layer of Llama with grouped queries."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            hidden_size=WIDE, intermediate_size=8 * WIDE, num_attention_heads=4, num_key_value_heads=1, head_dim=16
        )
        config._attn_implementation = "sdpa"
        self.layer, self.rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)

    def forward(self, x):
        return self.layer(x, position_embeddings=self.rotary(x, torch.arange(x.shape[1])[None]))


@on_ranks([2])
def test_products_of_a_converted_layer(ranks, cases, ring):
    """Trained; frozen; frozen in blocks: without wgrads."""
    x = random(2, 300, WIDE, dtype=torch.float32, seed=1).requires_grad_()
    for trained, options in ((True, {}), (False, {}), (False, {"frozen": "nf4"}), (False, {"frozen": "mxfp4"})):
        model = rtp_ext.fully_rotate(Layer().requires_grad_(trained), mesh=ring, **options)
        with cases.case(f"trained={trained} {options}"):
            assert counted(lambda: model(x)) == (4 * ranks, (8 if trained else 4) * ranks)  # noqa: B023


@on_ranks([2, 3])
def test_projections_of_one_weight(ranks, cases):
    """Attention with one weight for q, k and v, which travels in chunks; keys and values of an input of their own."""
    rows, features = 3 * 7, WIDE
    weight, bias = (random(*size, dtype=torch.float64, seed=len(size)) for size in ((rows, features), (rows,)))
    for cap in (0, 4 * features * 8):
        for sources in ((0, 0, 0), (0, 1, 1)):
            projections = [(source, 0, 7 * part, 7 * part + 7) for part, source in enumerate(sources)]

            def plain(p, x, sources=sources):
                parts = zip(sources, p["weight"].chunk(3), p["bias"].chunk(3), strict=True)
                return torch.cat([F.linear(x[source], w, b) for source, w, b in parts], -1)

            def rotated(p, x, projections=projections, **options):
                return torch.cat(rotated_linears(x, [p["weight"]], [p["bias"]], projections=projections, **options), -1)

            operation = Operation(
                {"weight": weight, "bias": bias},
                {"weight": 0, "bias": 0},
                plain,
                rotated,
                lambda form, rank, seed, sources=sources: [
                    random(150 + rank, features, dtype=torch.float64, seed=seed + rank + 7 * which)
                    for which in set(sources)
                ],
            )
            with rtp_ext.Ring(timeout=30.0, slot_cap=cap) as ring, cases.case(f"cap {cap} {sources}"):
                check_pass(operation, ring)
