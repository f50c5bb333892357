"""rotated_mlp gives what its plain layers give in one process: see operation_checks.py for what is compared and how.

In bfloat16 the hidden values are rounded on the way. An output depends on five roundings (gate, up, activation, their
product, the sum), a gradient on seven (gate, up, and of gradients: of the hidden value, times up, through the
activation, times the activated gate, the sum): each of at most 2**-8.
"""

from itertools import product

import pytest
import torch
from grids import RINGS, pairs
from harness import Cases, run_ranks
from operation_checks import (
    EXACT,
    FORMS,
    ROUNDING,
    Operation,
    assert_result,
    check_checkpointing,
    check_controls,
    check_frozen,
    check_pass,
    loss,
    make_features,
    plain_results,
    rotated_result,
    saved_tensors,
    train,
)
from reference import assert_same, chunk, differs, random
from torch.nn import functional as F

import rtp_ext
from rtp_ext.functional import rotated_mlp
from rtp_ext.functional.mlp import ACTIVATIONS
from rtp_ext.parameters.sharding import shard_parameter

TIMEOUT = 30.0
SIZES = [(5, 7, 6), (16, 17, 9), (6, 3, 2)]  # in, hidden, out features; the last has fewer of some than ranks
TOLERANCES = {
    torch.float64: (EXACT, EXACT),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (5 * ROUNDING, 7 * ROUNDING),
}
FUNCTIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def make_mlp(
    size=SIZES[0], activation="swiglu", dtype=torch.float64, bias=True, transposed=False, **rotation
) -> Operation:
    inputs, hidden, outputs = size
    function, gated = ACTIVATIONS[activation]
    names = ("gate", "up") if gated else ("up",)
    shapes = {name: (hidden, inputs) for name in names}
    shapes["down"] = (outputs, hidden)
    parameters, cuts = {}, {}
    for seed, (name, shape) in enumerate(shapes.items()):
        stored = random(*shape, dtype=dtype, seed=seed, scale=shape[1] ** -0.5)
        parameters[name] = stored.t().contiguous() if transposed else stored
        cuts[name] = int((name == "down") != transposed)
        if bias:
            parameters[f"{name}_bias"] = random(shape[0], dtype=dtype, seed=seed + 5)
            cuts[f"{name}_bias"] = 0

    def linear(x, p, name):
        return F.linear(x, p[name].t() if transposed else p[name], p.get(f"{name}_bias"))

    def plain(p, batch):
        hidden_values = linear(batch[0], p, "up")
        if gated:
            hidden_values = FUNCTIONS[function](linear(batch[0], p, "gate")) * hidden_values
        else:
            hidden_values = FUNCTIONS[function](hidden_values)
        return linear(hidden_values, p, "down")

    def rotated(p, batch, **options):
        biases = {f"{name}_bias": p.get(f"{name}_bias") for name in ("gate", "up", "down")}
        return rotated_mlp(
            batch[0],
            p["up"],
            p["down"],
            p.get("gate"),
            **biases,
            activation=activation,
            transposed=transposed,
            **{**rotation, **options},
        )

    return Operation(
        parameters, cuts, plain, rotated, lambda form, rank, seed: [make_features(form, rank, inputs, dtype, seed)]
    )


def _passes(rank, ranks, transport):
    """Over c10d the shards themselves travel."""
    cases = Cases()
    in_place = transport == "c10d"
    for route in ("ring",) if in_place else ("ring", "direct"):
        with rtp_ext.Ring(transport=transport, route=route, timeout=TIMEOUT) as ring:
            activations = ACTIVATIONS if route == "ring" and not in_place else ("gelu", "swiglu")
            for activation, recompute, plain in product(activations, (False, True), (False, True)):
                with cases.case(f"{route} {activation} recompute={recompute} plain={plain}"):
                    bias = transposed = not plain
                    operation = make_mlp(activation=activation, bias=bias, transposed=transposed, recompute=recompute)
                    check_pass(operation, ring, in_place=in_place)
            dtypes = TOLERANCES if route == "ring" else (torch.float64,)
            for size, dtype, activation, form in pairs(SIZES, dtypes, ("gelu", "swiglu"), forms=FORMS):
                with cases.case(f"{route} {size} {dtype} {activation} {form}"):
                    operation = make_mlp(size, activation, dtype)
                    check_pass(operation, ring, form, TOLERANCES[dtype], in_place=in_place)
            if in_place:
                with cases.case("c10d out of place"):
                    check_pass(make_mlp(), ring)
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport"), RINGS)
def test_one_pass(ranks, transport):
    run_ranks(_passes, ranks, transport)


def _controls(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for dtype, activation in product(TOLERANCES, ("gelu", "swiglu")):
            operation = make_mlp((16, 17, 9), activation, dtype, bias=False)
            check_controls(operation, ring, TOLERANCES[dtype])


def test_tolerances_refuse_wrong_results():
    run_ranks(_controls, 2)
    run_ranks(_controls, 4)


def _behaviours(rank, ranks, transport, in_place):
    """Training with evaluations and doubled forwards, frozen parameters, checkpointing, DTensors; recomputed or not."""
    cases = Cases()
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        for recompute in (False, True):
            operation = make_mlp(recompute=recompute)
            rotation = {"ring": ring, "in_place": in_place}
            with cases.case(f"training recompute={recompute}"):
                train(operation, rank, ranks, True, torch.float64, **rotation)
            with cases.case(f"training float32 recompute={recompute}"):
                operation32 = make_mlp(dtype=torch.float32, activation="gelu", recompute=recompute)
                train(operation32, rank, ranks, False, torch.float32, **rotation)
            check_checkpointing(cases, operation, ring, in_place=in_place)
            check_frozen(cases, make_mlp(recompute=recompute, bias=False), ring, in_place=in_place)
            check_frozen(cases, make_mlp(activation="relu", recompute=recompute), ring, in_place=in_place)
            with cases.case(f"DTensor recompute={recompute}"):
                shards = {
                    name: shard_parameter(torch.nn.Parameter(whole.clone()), ring, operation.cuts[name])
                    for name, whole in operation.parameters.items()
                }
                actual = rotated_result(operation, ring, "3d", 10, shards, in_place=in_place)
                assert all(type(gradient) is type(shards["up"].data) for gradient in actual.gradients.values())
                actual.gradients = {name: gradient.to_local() for name, gradient in actual.gradients.items()}
                expected = plain_results(operation, ranks, "3d", 10)[rank]
                assert_result(actual, expected, ring, operation.cuts, EXACT, EXACT)
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport", "in_place"), [(1, "shm", False), (3, "shm", False), (4, "c10d", True)])
def test_training_freezing_and_checkpointing(ranks, transport, in_place):
    run_ranks(_behaviours, ranks, transport, in_place)


def _recompute(rank, ranks):
    """Recomputed hidden values give the same, take no hop more, and are not kept."""
    tokens, size = 40, (5, 64, 7)
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for activation, dtype in product(("swiglu", "gelu"), (torch.float64, torch.bfloat16)):
            operation = make_mlp(size, activation, dtype)
            results, hops, kept = [], [], []
            for recompute in (False, True):
                shards = operation.shards(rank, ranks)
                before = ring.hops("weight") + ring.hops("gradient")
                results.append(rotated_result(operation, ring, "2d", 10, shards, recompute=recompute))
                hops.append(ring.hops("weight") + ring.hops("gradient") - before)
                x = random(tokens, size[0], dtype=dtype, seed=rank).requires_grad_()

                def forward(x=x, shards=shards, recompute=recompute, operation=operation):
                    return operation.rotated(shards, [x], ring=ring, recompute=recompute)

                saved = [tensor for tensor in saved_tensors(forward) if tensor.shape[:1] == (tokens,)]
                kept.append(sum(tensor.numel() for tensor in saved))
            first, second = results
            tolerance = 1e-14 if dtype == torch.float64 else 0.0
            assert_same(second.output, first.output, tolerance, "output")
            assert_same(second.input_gradients[0], first.input_gradients[0], tolerance, "input gradient")
            for name, gradient in first.gradients.items():
                if gradient.any():
                    assert_same(second.gradients[name], gradient, tolerance, name)
            assert hops == [3 * (ranks - 1)] * 2
            layers = 2 if ACTIVATIONS[activation][1] else 1
            assert kept == [tokens * (size[0] + layers * size[1]), tokens * size[0]], kept


def test_recomputed_hidden_values():
    run_ranks(_recompute, 3)


def _precision(rank, ranks):
    """Float32 parameters: autocast to bfloat16, and a compute and a reduce dtype of their own."""
    cases = Cases()
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for activation, recompute in product(("swiglu", "gelu"), (False, True)):
            rounded = make_mlp((16, 17, 9), activation, torch.bfloat16, recompute=recompute)
            parameters = {name: whole.float() for name, whole in rounded.parameters.items()}
            expected = plain_results(rounded, ranks, "2d", 10)[rank]
            forward, backward = TOLERANCES[torch.bfloat16]

            def autocast(shards, inputs, rounded=rounded, **options):
                with torch.autocast("cpu", torch.bfloat16):
                    y = rounded.rotated(shards, inputs, **options)
                assert y.dtype == torch.bfloat16
                return y

            with cases.case(f"autocast {activation} recompute={recompute}"):
                wide = Operation(
                    parameters,
                    rounded.cuts,
                    rounded.plain,
                    autocast,
                    lambda form, r, seed, rounded=rounded: [x.float() for x in rounded.inputs(form, r, seed)],
                )
                sent = ring.bytes_sent("weight")
                actual = rotated_result(wide, ring, "2d", 10, wide.shards(rank, ranks))
                sent = ring.bytes_sent("weight") - sent
                assert sent <= 2 * 2 * sum(whole.numel() for whole in parameters.values()), "float32 travelled"
                assert all(gradient.dtype == torch.float32 for gradient in actual.gradients.values())
                assert actual.input_gradients[0].dtype == torch.float32
                assert_result(actual, expected, ring, wide.cuts, forward, backward)
            for reduce_dtype in (None, torch.bfloat16):
                with cases.case(f"reduce {reduce_dtype} {activation} recompute={recompute}"):
                    mixed = Operation(parameters, rounded.cuts, rounded.plain, rounded.rotated, rounded.inputs)
                    dtypes = {"compute_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
                    actual = rotated_result(mixed, ring, "2d", 10, mixed.shards(rank, ranks), **dtypes)
                    assert all(gradient.dtype == torch.float32 for gradient in actual.gradients.values())
                    # in bfloat16 every rank rounds its product and the sum
                    rounds = 2 * ranks if reduce_dtype else 0
                    assert_result(actual, expected, ring, mixed.cuts, forward, backward + rounds * ROUNDING)
    cases.finish()


@pytest.mark.parametrize("ranks", [2, 3])
def test_autocast_and_mixed_precision(ranks):
    run_ranks(_precision, ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_emulated_ring_is_an_mlp_of_repeated_shards(ranks):
    ring = rtp_ext.Ring.emulated(ranks)
    operation = make_mlp((5, 4, 6), "swiglu", bias=False)
    shards = {name: whole.clone().requires_grad_() for name, whole in operation.parameters.items()}
    plain = {name: whole.clone().requires_grad_() for name, whole in operation.parameters.items()}
    x = random(3, 5, dtype=torch.float64, seed=3)
    y = operation.rotated(shards, [x], ring=ring)
    expected = operation.plain({name: p.repeat(*_repeats(name, ranks)) for name, p in plain.items()}, [x])
    loss(y, 0, 0).backward()
    loss(expected, 0, 0).backward()
    assert_same(y, expected, 1e-12, "output")
    for name, shard in shards.items():
        assert_same(shard.grad, plain[name].grad / ranks, 1e-12, name)
        if ranks > 1:
            assert differs(shard.grad, plain[name].grad, 1e-12)


def _repeats(name, ranks):
    return (1, ranks) if name == "down" else (ranks, 1)


def _errors(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        operation = make_mlp((5, 7, 6), "swiglu")
        shards = operation.shards(rank, ranks)
        x = operation.inputs("2d", rank, 0)[0]
        good = {"ring": ring, "activation": "swiglu", "name": "block.mlp"}

        def call(x=x, up="up", down="down", gate="gate", **options):
            get = {**shards, "wide": random(3, 8, dtype=torch.float64, seed=1)}
            get["swapped"] = chunk(operation.parameters["up"], ranks, 1 - rank)
            get["narrow"] = chunk(random(7, 4, dtype=torch.float64, seed=1), ranks, rank)
            return rotated_mlp(x, get[up], get[down], get.get(gate), **{**good, **options})

        for error, message, wrong in (
            (ValueError, "block.mlp: expected an activation of .*swiglu.*, got 'tanh'", {"activation": "tanh"}),
            (ValueError, "block.mlp: activation gelu expected a gate: False, got one: True", {"activation": "gelu"}),
            (ValueError, "block.mlp: activation swiglu expected a gate: True, got one: False", {"gate": None}),
            (ValueError, "block.mlp: .*biases of both gate and up", {"up_bias": shards["up_bias"]}),
            (ValueError, r"block.mlp: expected an input of 5 features, got shape \(2, 4\)", {"x": x.new_ones(2, 4)}),
            (TypeError, "block.mlp: expected an input of dtype torch.float64, got torch.float32", {"x": x.float()}),
            (TypeError, "block.mlp: expected an input tensor .*got None", {"x": None}),
            (ValueError, "block.mlp: up weight shards do not belong together.*7, 5", {"up": "swapped"}),
            (ValueError, r"block.mlp: expected a whole gate weight of shape \(7, 5\).*\(7, 4\)", {"gate": "narrow"}),
            (ValueError, r"block.mlp: expected a whole down weight of shape \(3, 7\).*\(3, 16\)", {"down": "wide"}),
            (ValueError, r"block.mlp: expected a down weight of 2 dim.*got shape \(\d,\)", {"down": "down_bias"}),
        ):
            with pytest.raises(error, match=message):
                call(**wrong)
        check_pass(operation, ring)  # the ring lives on


def test_wrong_arguments():
    run_ranks(_errors, 2)
