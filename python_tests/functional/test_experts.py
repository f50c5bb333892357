"""rotated_experts gives what routed experts give in one process: see operation_checks.py for what is compared and how.

In bfloat16 values are rounded on the way. An output depends on six roundings (gate, up, activation, their product, the
expert's output, the sum), a gradient on nine (gate, up, activation, and of gradients: of the hidden value, times the
router's weight, times up or the activated gate, through the activation, of the rows, the sum): each of at most 2**-8.
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
    leaves,
    loss,
    make_features,
    plain_results,
    rotated_result,
    saved_tensors,
    token_shape,
    train,
)
from reference import assert_same, chunk, differs, random
from torch.nn import functional as F

import rtp_ext
from rtp_ext.functional import rotated_experts
from rtp_ext.functional.mlp import ACTIVATIONS
from rtp_ext.parameters.sharding import shard_parameter

TIMEOUT = 30.0
SIZES = [
    (5, 6, 4),
    (3, 5, 1),
    (8, 16, 12),
]  # experts, features, hidden features; the second has fewer experts than ranks
TOLERANCES = {
    torch.float64: (EXACT, EXACT),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (6 * ROUNDING, 9 * ROUNDING),
}
FUNCTIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
# How tokens choose: experts at random (the same one twice, too), distinct ones, all the first or the last, none of
# those at home on this rank, only those, nobody, nobody for some.
ROUTINGS = ["random", "distinct", "first", "last", "away", "home", "nobody", "sentinel"]


def make_index(routing: str, shape: tuple[int, ...], experts: int, choices: int, rank: int, ranks: int, seed: int):
    generator = torch.Generator().manual_seed(seed + rank)
    size = (*shape, choices)
    anyone = torch.randint(experts, size, generator=generator)
    per_rank = -(-experts // ranks)
    if routing == "distinct":
        return torch.rand(*shape, experts, generator=generator).argsort(-1)[..., :choices]
    if routing in ("first", "last", "nobody"):
        return torch.full(size, {"first": 0, "last": experts - 1, "nobody": experts}[routing])
    if routing == "home":
        return anyone % per_rank + min(rank * per_rank, experts - per_rank)
    if routing == "away":
        return (per_rank * ((rank + 1) % ranks)) % experts + torch.zeros_like(anyone)
    if routing == "sentinel":
        anyone = torch.randint(experts + 1, size, generator=generator)
        anyone.view(-1, choices)[:1] = experts
    return anyone


def make_experts(
    size=SIZES[0],
    choices=2,
    activation="swiglu",
    dtype=torch.float64,
    routing="random",
    weights_dtype=None,
    ranks=1,
    **rotation,
) -> Operation:
    experts, features, hidden = size
    function, gated = ACTIVATIONS[activation]
    rows = 2 * hidden if gated else hidden
    parameters = {
        "up": random(experts, rows, features, dtype=dtype, seed=1, scale=features**-0.5),
        "down": random(experts, features, hidden, dtype=dtype, seed=2, scale=hidden**-0.5),
    }

    def plain(p, batch):
        x, index, weights = batch
        y = torch.zeros_like(x)
        for expert in range(experts):
            values = x @ p["up"][expert].t()
            if gated:
                gate, values = values.chunk(2, -1)
                values = FUNCTIONS[function](gate) * values
            else:
                values = FUNCTIONS[function](values)
            share = (weights * (index == expert)).sum(-1, keepdim=True)
            y = y + share * (values @ p["down"][expert].t())
        return y

    def rotated(p, batch, **options):
        x, index, weights = batch
        return rotated_experts(x, index, weights, p["up"], p["down"], activation=activation, **{**rotation, **options})

    def inputs(form, rank, seed):
        shape = token_shape(form, rank)
        index = make_index(routing, shape, experts, choices, rank, ranks, seed)
        weights = random(*shape, choices, dtype=weights_dtype or dtype, seed=seed + rank + 50).abs()
        if form == "strided":
            index, weights = (torch.stack([t, t], -1)[..., 0] for t in (index, weights))
        return [make_features(form, rank, features, dtype, seed), index, weights]

    return Operation(parameters, {"up": 0, "down": 0}, plain, rotated, inputs)


def _passes(rank, ranks, transport):
    """Over c10d the shards themselves travel."""
    cases = Cases()
    in_place = transport == "c10d"
    for route in ("ring",) if in_place else ("ring", "direct"):
        with rtp_ext.Ring(transport=transport, route=route, timeout=TIMEOUT) as ring:
            every = route == "ring" and not in_place
            for activation, recompute in product(ACTIVATIONS if every else ("gelu", "swiglu"), (False, True)):
                with cases.case(f"{route} {activation} recompute={recompute}"):
                    operation = make_experts(activation=activation, recompute=recompute)
                    check_pass(operation, ring, in_place=in_place)
            for routing, choices, size in pairs(ROUTINGS, (1, 2, 3) if every else (2,), SIZES[:2]):
                with cases.case(f"{route} {routing} K={choices} {size}"):
                    operation = make_experts(size, choices, routing=routing, ranks=ranks)
                    check_pass(operation, ring, in_place=in_place)
            dtypes = TOLERANCES if route == "ring" else (torch.float64,)
            for size, dtype, activation, form in pairs(SIZES, dtypes, ("gelu", "swiglu"), forms=FORMS):
                with cases.case(f"{route} {size} {dtype} {activation} {form}"):
                    operation = make_experts(size, activation=activation, dtype=dtype)
                    check_pass(operation, ring, form, TOLERANCES[dtype], in_place=in_place)
            with cases.case(f"{route} float32 weights of a bfloat16 router"):
                operation = make_experts(dtype=torch.bfloat16, weights_dtype=torch.float32)
                check_pass(operation, ring, tolerances=TOLERANCES[torch.bfloat16], in_place=in_place)
            if in_place:
                with cases.case("c10d out of place"):
                    check_pass(make_experts(), ring)
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport"), RINGS)
def test_one_pass(ranks, transport):
    run_ranks(_passes, ranks, transport)


def _controls(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for dtype, activation in product(TOLERANCES, ("gelu", "swiglu")):
            operation = make_experts((4, 16, 12), 3, activation, dtype)
            check_controls(operation, ring, TOLERANCES[dtype])


def test_tolerances_refuse_wrong_results():
    run_ranks(_controls, 2)
    run_ranks(_controls, 4)


def _behaviours(rank, ranks, transport, in_place):
    """Training with evaluations and doubled forwards, frozen parameters, checkpointing, DTensors; recomputed or not."""
    cases = Cases()
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        rotation = {"ring": ring, "in_place": in_place}
        for recompute in (False, True):
            operation = make_experts((3, 6, 4), recompute=recompute)
            with cases.case(f"training recompute={recompute}"):
                train(operation, rank, ranks, True, torch.float64, **rotation)
            with cases.case(f"training float32 recompute={recompute}"):
                operation32 = make_experts((3, 6, 4), 1, "gelu", torch.float32, recompute=recompute)
                train(operation32, rank, ranks, False, torch.float32, **rotation)
            operation = make_experts(recompute=recompute)
            check_checkpointing(cases, operation, ring, in_place=in_place)
            check_frozen(cases, operation, ring, in_place=in_place)
            expected = plain_results(operation, ranks, "2d", 10)[rank]
            for needs_x, needs_weights, trained in product((True, False), (True, False), ((), ("down",))):
                if not (needs_x or needs_weights or trained):
                    continue
                with cases.case(f"x {needs_x} weights {needs_weights} {trained} recompute={recompute}"):
                    shards = operation.shards(rank, ranks, trained)
                    x, index, weights = leaves(operation.inputs("2d", rank, 10))
                    x.requires_grad_(needs_x)
                    weights.requires_grad_(needs_weights)
                    loss(operation.rotated(shards, [x, index, weights], **rotation), rank, 10).backward()
                    gradients = expected.input_gradients
                    assert_same(x.grad, gradients[0] if needs_x else None, EXACT, "input gradient")
                    assert_same(weights.grad, gradients[2] if needs_weights else None, EXACT, "weights gradient")
                    assert shards["up"].grad is None and (shards["down"].grad is not None) == bool(trained)
            with cases.case(f"DTensor recompute={recompute}"):
                shards = {
                    name: shard_parameter(torch.nn.Parameter(whole.clone()), ring, 0)
                    for name, whole in operation.parameters.items()
                }
                actual = rotated_result(operation, ring, "3d", 10, shards, in_place=in_place)
                actual.gradients = {name: gradient.to_local() for name, gradient in actual.gradients.items()}
                expected = plain_results(operation, ranks, "3d", 10)[rank]
                assert_result(actual, expected, ring, operation.cuts, EXACT, EXACT)
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport", "in_place"), [(1, "shm", False), (3, "shm", False), (4, "c10d", True)])
def test_training_freezing_and_checkpointing(ranks, transport, in_place):
    run_ranks(_behaviours, ranks, transport, in_place)


def _recompute(rank, ranks):
    """Recomputed hidden values give the same, take no hop more, and are not kept."""
    tokens, choices, (experts, features, hidden) = 40, 2, (6, 5, 64)
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for activation, dtype in product(("swiglu", "gelu"), (torch.float64, torch.bfloat16)):
            operation = make_experts((experts, features, hidden), choices, activation, dtype)
            results, hops, kept = [], [], []
            for recompute in (False, True):
                shards = operation.shards(rank, ranks)
                before = ring.hops("weight") + ring.hops("gradient")
                results.append(rotated_result(operation, ring, "2d", 10, shards, recompute=recompute))
                hops.append(ring.hops("weight") + ring.hops("gradient") - before)
                x = random(tokens, features, dtype=dtype, seed=rank).requires_grad_()
                index = make_index("sentinel", (tokens,), experts, choices, rank, ranks, 0)
                weights = random(tokens, choices, dtype=dtype, seed=rank)

                def forward(batch=(x, index, weights), shards=shards, recompute=recompute, operation=operation):
                    return operation.rotated(shards, batch, ring=ring, recompute=recompute)

                local_shards = {shard.data_ptr() for shard in shards.values()}
                saved = [
                    t for t in saved_tensors(forward) if t.is_floating_point() and t.data_ptr() not in local_shards
                ]
                kept.append(sum(tensor.numel() for tensor in saved))
            first, second = results
            tolerance = 1e-14 if dtype == torch.float64 else 0.0
            assert_same(second.output, first.output, tolerance, "output")
            for number in (0, 2):
                assert_same(second.input_gradients[number], first.input_gradients[number], tolerance, f"input {number}")
            for name, gradient in first.gradients.items():
                if gradient.any():
                    assert_same(second.gradients[name], gradient, tolerance, name)
            assert hops == [3 * (ranks - 1)] * 2
            rows = (2 if ACTIVATIONS[activation][1] else 1) * hidden
            least = tokens * (features + choices)  # x and the router's weights
            routed = int(index.lt(experts).sum())
            assert kept == [least + routed * rows, least], kept


def test_recomputed_hidden_values():
    run_ranks(_recompute, 3)


def _precision(rank, ranks):
    """Float32 parameters: autocast to bfloat16, and a compute and a reduce dtype of their own."""
    cases = Cases()
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for activation, recompute in product(("swiglu", "gelu"), (False, True)):
            rounded = make_experts((4, 16, 12), 2, activation, torch.bfloat16, recompute=recompute)
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
                    lambda form, r, seed, rounded=rounded: [
                        t.float() if t.is_floating_point() else t for t in rounded.inputs(form, r, seed)
                    ],
                )
                actual = rotated_result(wide, ring, "2d", 10, wide.shards(rank, ranks))
                assert all(gradient.dtype == torch.float32 for gradient in actual.gradients.values())
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


def test_the_plain_experts_are_those_of_transformers():
    """The reference of this file, and the gradient of the router's weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=6, intermediate_size=4, num_local_experts=5, num_experts_per_tok=3)
    config._experts_implementation = "eager"
    for routing in (each for each in ROUTINGS if each != "nobody"):
        operation = make_experts((5, 6, 4), 3, routing=routing)
        module = MixtralExperts(config).double()
        with torch.no_grad():
            module.gate_up_proj.copy_(operation.parameters["up"])
            module.down_proj.copy_(operation.parameters["down"])
        expected = Operation(
            operation.parameters,
            operation.cuts,
            lambda p, batch, module=module: torch.func.functional_call(
                module, {"gate_up_proj": p["up"], "down_proj": p["down"]}, (batch[0], batch[1], batch[2])
            ),
            operation.rotated,
            operation.inputs,
        )
        ours, theirs = (plain_results(each, 2, "2d", 3) for each in (operation, expected))
        for mine, right in zip(ours, theirs, strict=True):
            assert_same(mine.output, right.output, 1e-12, "output")
            for name, gradient in right.gradients.items():
                assert_same(mine.gradients[name], gradient, 1e-12, name)
            for number in (0, 2):
                assert_same(mine.input_gradients[number], right.input_gradients[number], 1e-12, f"input {number}")


def _errors(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        operation = make_experts((5, 6, 4))
        shards = operation.shards(rank, ranks)
        x, index, weights = operation.inputs("2d", rank, 0)
        swapped = chunk(operation.parameters["up"], ranks, 1 - rank)
        thin = chunk(random(5, 6, 3, dtype=torch.float64, seed=1), ranks, rank)
        odd = chunk(random(5, 7, 6, dtype=torch.float64, seed=1), ranks, rank)
        for error, message, wrong in (
            (ValueError, "moe: expected an activation of .*swiglu.*, got 'tanh'", {"activation": "tanh"}),
            (IndexError, r"moe: expected an index in \[0, 5\], got -1 to -1", {"index": index.clone().fill_(-1)}),
            (IndexError, r"moe: expected an index in \[0, 5\], got 6 to 6", {"index": index.clone().fill_(6)}),
            (TypeError, "moe: expected an index of integers, got torch.float64", {"index": weights}),
            (TypeError, "moe: expected an index of integers, got torch.bool", {"index": index > 0}),
            (TypeError, "moe: expected weights of floating-point numbers, got torch.int64", {"weights": index}),
            (ValueError, r"moe: expected index and weights of shape \([34], K\), got \(2, 2\)", {"index": index[:2]}),
            (ValueError, r"moe: expected index and weights of .*and \([34], 1\)", {"weights": weights[:, :1]}),
            (ValueError, r"moe: expected an input of 6 features, got shape \([34], 5\)", {"x": x[:, :5]}),
            (TypeError, "moe: expected an input of dtype torch.float64, got torch.float32", {"x": x.float()}),
            (ValueError, "moe: up weight shards do not belong together.*5, 8, 6", {"up": swapped}),
            (ValueError, r"moe: expected a whole down weight of shape \(5, 6, 4\), got \(5, 6, 3\)", {"down": thin}),
            (ValueError, "moe: expected an even number of rows of gate and up, got 7", {"up": odd}),
            (ValueError, "moe: expected a down weight of 3 dimensions, got shape", {"down": shards["down"][0]}),
        ):
            arguments = {"x": x, "index": index, "weights": weights, "up": shards["up"], "down": shards["down"]}
            with pytest.raises(error, match=message):
                rotated_experts(**{**arguments, **wrong}, ring=ring, name="moe")
        check_pass(operation, ring)  # the ring lives on


def test_wrong_arguments():
    run_ranks(_errors, 2)


@pytest.mark.parametrize("ranks", [1, 3])
def test_emulated_ring_repeats_the_experts(ranks):
    ring = rtp_ext.Ring.emulated(ranks)
    operation = make_experts((4, 6, 5), 2, routing="distinct")
    shards = {name: whole.clone().requires_grad_() for name, whole in operation.parameters.items()}
    plain = {name: whole.clone().requires_grad_() for name, whole in operation.parameters.items()}
    x, index, weights = operation.inputs("2d", 0, 3)
    spread = index + 4 * (torch.arange(index.numel()).view(index.shape) % ranks)
    y = operation.rotated(shards, [x, spread, weights], ring=ring)
    expected = operation.plain(plain, [x, index, weights])
    loss(y, 0, 0).backward()
    loss(expected, 0, 0).backward()
    assert_same(y, expected, 1e-12, "output")
    for name, shard in shards.items():
        assert_same(shard.grad, plain[name].grad / ranks, 1e-12, name)
        if ranks > 1:
            assert differs(shard.grad, plain[name].grad, 1e-12)
