"""rotated_experts with biases, transposed and interleaved weights and GPT-OSS's gate: see test_experts.py."""

from itertools import product

import pytest
import torch
from grids import pairs
from harness import Cases, run_ranks
from operation_checks import (
    FORMS,
    Operation,
    check_checkpointing,
    check_controls,
    check_frozen,
    check_pass,
    make_features,
    rotated_result,
    token_shape,
    train,
)
from reference import assert_same, chunk, random
from test_experts import FUNCTIONS, ROUTINGS, SIZES, TIMEOUT, TOLERANCES, make_index

import rtp_ext
from rtp_ext.functional import rotated_experts
from rtp_ext.functional.mlp import ACTIVATIONS

ALPHA, LIMIT = 1.3, 0.6  # so small a limit that values reach it
BOTH = ("up_bias", "down_bias")


def gate_of(activation):
    """What is made of up(x), with the gate's half first, in plain torch."""

    def compute(values):
        if activation == "clamped_swiglu":
            gate, up = values.chunk(2, -1)
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            return (up + 1) * gate * torch.sigmoid(ALPHA * gate)
        function, gated = ACTIVATIONS[activation]
        if not gated:
            return FUNCTIONS[function](values)
        gate, up = values.chunk(2, -1)
        return FUNCTIONS[function](gate) * up

    return compute


def make_biased(
    size=SIZES[0],
    activation="swiglu",
    dtype=torch.float64,
    biases=BOTH,
    routing="random",
    choices=2,
    ranks=1,
    transposed=False,
    interleaved=False,
    **rotation,
) -> Operation:
    experts, features, hidden = size
    gated = activation not in ACTIVATIONS or ACTIVATIONS[activation][1]
    rows = 2 * hidden if gated else hidden
    shapes = {
        "up": (experts, features, rows) if transposed else (experts, rows, features),
        "up_bias": (experts, rows),
        "down": (experts, hidden, features) if transposed else (experts, features, hidden),
        "down_bias": (experts, features),
    }
    scales = {"up": features**-0.5, "down": hidden**-0.5}
    parameters = {
        name: random(*shape, dtype=dtype, seed=seed, scale=scales.get(name, 0.5))
        for seed, (name, shape) in enumerate(shapes.items(), 1)
        if name in ("up", "down", *biases)
    }
    of_hidden = gate_of(activation)

    def plain(p, batch):
        x, index, weights = batch
        y = torch.zeros_like(x)
        for expert in range(experts):
            up, down = p["up"][expert], p["down"][expert]
            values = x @ (up if transposed else up.t())
            if "up_bias" in p:
                values = values + p["up_bias"][expert]
            if interleaved:
                values = torch.cat([values[..., ::2], values[..., 1::2]], -1)
            out = of_hidden(values) @ (down if transposed else down.t())
            if "down_bias" in p:
                out = out + p["down_bias"][expert]
            y = y + (weights * (index == expert)).sum(-1, keepdim=True) * out
        return y

    def rotated(p, batch, **options):
        given = {name: p[name] for name in biases}
        layout = {"transposed": transposed, "interleaved": interleaved, "alpha": ALPHA, "limit": LIMIT}
        options = {**rotation, **options}
        return rotated_experts(*batch, p["up"], p["down"], activation=activation, **given, **layout, **options)

    def inputs(form, rank, seed):
        shape = token_shape(form, rank)
        index = make_index(routing, shape, experts, choices, rank, ranks, seed)
        weights = random(*shape, choices, dtype=dtype, seed=seed + rank + 50).abs()
        return [make_features(form, rank, features, dtype, seed), index, weights]

    return Operation(parameters, dict.fromkeys(parameters, 0), plain, rotated, inputs)


def _passes(rank, ranks, transport):
    """Over c10d the shards themselves travel. The second size has fewer experts than ranks."""
    cases = Cases()
    in_place = transport == "c10d"
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        for biases, activation, recompute in pairs(
            (BOTH, BOTH[:1], BOTH[1:]), ("gelu", "swiglu", "clamped_swiglu"), (False, True)
        ):
            with cases.case(f"{biases} {activation} recompute={recompute}"):
                operation = make_biased(activation=activation, biases=biases, recompute=recompute)
                check_pass(operation, ring, in_place=in_place)
        for routing, size in product(ROUTINGS, SIZES[:2]):
            with cases.case(f"{routing} {size}"):
                check_pass(make_biased(size, routing=routing, ranks=ranks), ring, in_place=in_place)
        kinds = [*product(("reglu", "clamped_swiglu"), (False, True)), ("gelu", False)]
        for transposed, kind, biases, recompute in pairs((False, True), kinds, (BOTH, ()), (False, True)):
            activation, interleaved = kind
            with cases.case(f"{transposed=} {interleaved=} {activation} {biases} {recompute=}"):
                layout = {"transposed": transposed, "interleaved": interleaved, "recompute": recompute}
                operation = make_biased(activation=activation, biases=biases, **layout)
                check_pass(operation, ring, in_place=in_place)
        layouts = ({}, {"activation": "clamped_swiglu", "transposed": True, "interleaved": True})
        for size, dtype, layout, form in pairs(SIZES, TOLERANCES, layouts, forms=FORMS):
            with cases.case(f"{size} {dtype} {layout} {form}"):
                operation = make_biased(size, dtype=dtype, **layout)
                check_pass(operation, ring, form, TOLERANCES[dtype], in_place=in_place)
    cases.finish()


@pytest.mark.parametrize(
    ("ranks", "transport"), [(1, "shm"), (2, "shm"), (2, "c10d"), (3, "shm"), (3, "c10d"), (4, "shm")]
)
def test_one_pass(ranks, transport):
    run_ranks(_passes, ranks, transport)


def _controls(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for dtype, activation in product(TOLERANCES, ("gelu", "swiglu")):
            check_controls(make_biased((4, 16, 12), activation, dtype), ring, TOLERANCES[dtype])


def test_tolerances_refuse_wrong_results():
    run_ranks(_controls, 2)


def _behaviours(rank, ranks, transport, in_place):
    """Training, every subset of frozen parameters, checkpointing; biases add no hop."""
    cases = Cases()
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        rotation = {"ring": ring, "in_place": in_place}
        for recompute in (False, True):
            operation = make_biased((3, 6, 4), recompute=recompute)
            with cases.case(f"training recompute={recompute}"):
                train(operation, rank, ranks, True, torch.float64, **rotation)
            check_checkpointing(cases, operation, ring, in_place=in_place)
        check_frozen(cases, make_biased(recompute=True), ring, in_place=in_place)
        hops = []
        for biases in ((), BOTH):
            operation = make_biased(biases=biases)
            before = ring.hops("weight"), ring.hops("gradient")
            rotated_result(operation, ring, "2d", 10, operation.shards(rank, ranks), in_place=in_place)
            hops.append((ring.hops("weight") - before[0], ring.hops("gradient") - before[1]))
        assert hops[0] == hops[1] and (ranks == 1) == (hops[0] == (0, 0)), hops
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport", "in_place"), [(2, "shm", False), (3, "c10d", True)])
def test_training_freezing_and_checkpointing(ranks, transport, in_place):
    run_ranks(_behaviours, ranks, transport, in_place)


def _errors(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        operation = make_biased()
        shards = operation.shards(rank, ranks)
        batch = operation.inputs("2d", rank, 0)
        other = {
            name: chunk(random(*shape, dtype=torch.float64, seed=3), ranks, rank)
            for name, shape in (("up_bias", (5, 4)), ("down_bias", (5, 7)), ("more", (9, 6)))
        }
        for message, wrong in (
            (r"moe: expected a whole up bias of shape \(5, 8\), got \(5, 4\)", {"up_bias": other["up_bias"]}),
            (r"moe: expected a whole down bias of shape \(5, 6\), got \(5, 7\)", {"down_bias": other["down_bias"]}),
            (r"moe: expected a whole down bias of shape \(5, 6\), got \(9, 6\)", {"down_bias": other["more"]}),
            (r"moe: expected a down bias of 2 dimensions, got shape", {"down_bias": shards["down_bias"][0]}),
            (r"moe: expected a whole up bias of shape \(5, 6\), got \(5, 8\)", {"transposed": True}),
            ("moe: interleaved expected an activation with a gate, got 'gelu'", {"activation": "gelu"}),
        ):
            given = {name: shards[name] for name in BOTH} | {"interleaved": "activation" in wrong}
            with pytest.raises(ValueError, match=message):
                rotated_experts(*batch, shards["up"], shards["down"], ring=ring, name="moe", **{**given, **wrong})
        mine = {"limit": 1.0 + rank}
        with pytest.raises(ValueError, match=r"the ranks of the ring disagree.*clamped \(1.702, 2.0\) on rank 1"):
            rotated_experts(*batch, shards["up"], shards["down"], ring=ring, activation="clamped_swiglu", **mine)
        check_pass(operation, ring)  # the ring lives on


def test_wrong_arguments():
    run_ranks(_errors, 2)


def test_an_expert_without_tokens_adds_no_bias():
    ring = rtp_ext.Ring.emulated(1)
    operation = make_biased(routing="first")
    shards = operation.shards(0, 1)
    actual = rotated_result(operation, ring, "2d", 10, shards)
    for name in BOTH:
        assert actual.gradients[name][0].abs().min() > 0
        assert_same(actual.gradients[name][1:], torch.zeros_like(shards[name][1:]), 0.0, name)
