"""Gradients on the direct route to their owners: the results are those of one process, each contribution is rounded
once, and fewer bytes travel."""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from grids import few
from harness import Cases, on_ranks, run_ranks
from models import batch_loss, make_model, mean_loss
from models import train as train_model
from operation_checks import check_pass, known_results, scale_of
from pretended_hosts import pretend_hosts
from reference import assert_same, chunk, differs, full, random
from test_two_level import PATIENT, _Convolved, _operations
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import rtp_ext
from rtp_ext.functional import rotated_linear, rotated_linear_cross_entropy, rotated_mlp
from rtp_ext.nn import Flyweight

HALF = torch.bfloat16
ROUNDING = 2.0**-8  # error of one number in bfloat16: at most half of the distance to the next one
BLOCK = 128


def _exact(cases, ring, what, **options):
    for name, operation in _operations().items():
        with cases.case(f"{what}, {name}"):
            check_pass(operation, ring, **options)
        if name in ("linear", "mlp", "embedding"):
            with cases.case(f"{what}, {name}, no tokens on rank 0"):
                check_pass(operation, ring, "empty on rank 0", **options)


def _narrow(cases, ring, what, tolerance):
    """Every operation with gradients in fewer bits: within their rounding, which the controls see."""
    rounded = seen = 0
    other = (ring.rank + 1) % ring.size
    for name, operation in _operations().items():
        with cases.case(f"{what}, {name}"):
            found = check_pass(operation, ring, tolerances=(1e-10, tolerance), reduce_dtype=HALF)
            for skipped in (-1, other) if ring.size > 1 else ():
                whole = known_results(operation, ring.size, "2d", 10, skipped)[ring.rank].gradients
                parts = {n: chunk(whole[n], ring.size, ring.rank, cut) for n, cut in operation.cuts.items()}
                rounded += skipped < 0 and any(differs(found.gradients[n], part, 1e-6) for n, part in parts.items())
                wide = {n: tolerance * scale_of(whole[n], part) for n, part in parts.items()}
                seen += skipped >= 0 and any(differs(found.gradients[n], parts[n], wide[n]) for n in parts)
    with cases.case(f"{what}, controls"):  # the gradient is zero if others have no tokens for a rank's experts or rows
        assert min(rounded, seen) > 6 or ring.size == 1, f"control: {rounded} rounded, {seen} that lack a rank refused"


# -- one layer, and the tolerance of its gradients -------------------------------------------------------------------


def _layer(ring, outputs, features, reduce_dtype, tokens=6):
    """Returns the gradients of a linear layer on this rank, and each rank's contribution to them in float64."""
    weight = random(outputs, features, dtype=torch.float32, seed=1)
    bias = random(outputs, dtype=torch.float32, seed=2)
    shards = [chunk(whole, ring.size, ring.rank).clone().requires_grad_() for whole in (weight, bias)]
    batches = [
        (random(tokens, features, dtype=torch.float32, seed=10 + r), random(tokens, outputs, dtype=HALF, seed=50 + r))
        for r in range(ring.size)
    ]
    x, dy = batches[ring.rank]
    y = rotated_linear(x.clone().requires_grad_(), *shards, ring=ring, reduce_dtype=reduce_dtype)
    (y * dy.float()).sum().backward()
    parts = [(dy.double().t() @ x.double() / ring.size, dy.double().sum(0) / ring.size) for x, dy in batches]
    mine = [[chunk(part, ring.size, ring.rank) for part in both] for both in parts]
    return [shard.grad for shard in shards], mine


def _blockmax(part):
    """Returns the largest magnitude of each number's block, along the flat shard."""
    flat = part.abs().reshape(-1)
    return (
        torch.cat([block.max().expand_as(block) for block in flat.split(BLOCK)]).view(part.shape) if len(flat) else part
    )


def _check_bound(ring, gradients, contributions, bound):
    """Each contribution of another rank has an error of at most bound(contribution)."""
    for index, gradient in enumerate(gradients):
        parts = [of_rank[index] for of_rank in contributions]
        others = [part for rank, part in enumerate(parts) if rank != ring.rank]
        error = (gradient.double() - sum(parts)).abs()
        allowed = sum(map(bound, others), torch.zeros_like(parts[0]))
        assert gradient.dtype == torch.float32
        if not len(gradient):
            continue
        slack = 1e-6 * sum(part.abs().max() for part in parts)  # of sums in float32
        assert (error <= allowed + slack).all(), f"part {index}: {(error - allowed).max()} beyond {allowed.max()}"
        if ring.size > 1 and index == 0 and gradient.numel() > 20:
            assert (error > 0.1 * allowed + slack).any(), "control: nothing was rounded"
            wrong = (error + others[0].abs() > allowed + slack).double().mean()
            assert wrong > 0.5, "control: a contribution that is missing passes"


def _bits(cases, ring, what):
    for outputs, features in ((7, 5), (2, 6), (13, 40)):
        with cases.case(f"{what} {outputs}x{features}"):
            gradients, parts = _layer(ring, outputs, features, HALF)
            if ring.gradient_travel == "int8":
                _check_bound(ring, gradients, parts, lambda part: _blockmax(part) / 254)
            else:
                _check_bound(ring, gradients, parts, lambda part: part.abs() * ROUNDING)


def _operations_on_rings(rank, ranks, transports):
    cases = Cases()
    for transport in transports:
        with rtp_ext.Ring(transport=transport, gradient_route="direct", timeout=PATIENT) as ring:
            assert (ring.gradient_route, ring.gradient_travel) == ("direct", None)
            _exact(cases, ring, transport)
            _bits(cases, ring, f"{transport} bfloat16")
            _narrow(cases, ring, f"{transport} bfloat16", 2 * ROUNDING)
            with cases.case(f"{transport} in place"):
                ring.in_place = True
                check_pass(_operations()["linear"], ring)
                check_pass(_operations()["mlp"], ring)
                ring.in_place = False
            with cases.case(f"{transport} collect"):
                total = ring.collect(lambda owner, partial: partial.add_(rank + 1.0), torch.zeros(3))
                assert torch.equal(total, torch.full((3,), ranks * (ranks + 1) / 2))
    with rtp_ext.Ring(gradient_route="direct", slot_cap=400, buffers="lean", timeout=PATIENT) as ring:
        _exact(cases, ring, "in pieces")
        _bits(cases, ring, "in pieces, bfloat16")
    with rtp_ext.Ring(gradient_travel="int8", slot_cap=400, timeout=PATIENT) as ring:
        _exact_elsewhere(cases, ring)
    with rtp_ext.Ring(gradient_travel="int8", timeout=PATIENT) as ring:
        assert (ring.gradient_route, ring.gradient_travel) == ("direct", "int8")
        assert ring.gradients.reason == "gradients travel in int8"
        _bits(cases, ring, "int8")
        _narrow(cases, ring, "int8", 2 / 127)
    with rtp_ext.Ring(group=min(2, ranks), gradient_route="direct", timeout=PATIENT) as ring:
        _narrow(cases, ring, "groups, bfloat16", 2 * ROUNDING)
    with rtp_ext.Ring(group=min(3, ranks), gradient_travel="int8", timeout=PATIENT) as ring:
        _narrow(cases, ring, "groups, int8", 2 / 127)
    for travel, tolerance in ((None, 2 * ROUNDING), ("int8", 2 / 127)):
        options = {"gradient_route": "direct", "gradient_travel": travel}
        with rtp_ext.Ring(route="gather", timeout=PATIENT, **options) as ring:
            assert ring.gradient_travel == travel
            _narrow(cases, ring, f"gathered, {travel}", tolerance)
    for group in range(1, min(3, ranks) + 1):
        with rtp_ext.Ring(gradient_halves=True, group=group, timeout=PATIENT) as ring:
            _exact(cases, ring, f"halves in groups of {group}")
            with cases.case(f"halves of an MLP, group {group}"):
                before = ring.hops("gradient")
                check_pass(_operations()["mlp"], ring)
                assert ring.hops("gradient") - before == 2 * (ranks - 1)
    with rtp_ext.Ring(timeout=PATIENT) as ring:
        assert ring.gradient_route == "by-dtype"
        _bits(cases, ring, "by dtype")
        with cases.case("by dtype, float32"):
            before = ring.hops("gradient")
            check_pass(_operations()["linear"], ring)
            assert ring.hops("gradient") - before == ranks - 1
    cases.finish()
    return cases.count


def _exact_elsewhere(cases, ring):
    """Blocks restart in each chunk: the error of every number is still below the bound by its row's largest number."""
    with cases.case("int8 in pieces"):
        gradients, parts = _layer(ring, 13, 40, HALF)
        _check_bound(ring, gradients[:1], parts, lambda part: part.abs().max() / 254 + 0 * part)


@pytest.mark.parametrize(("ranks", "transports"), [(1, ["shm"]), (3, ["shm", "tcp", "c10d"])])
def test_the_plain_results(ranks, transports):
    assert run_ranks(_operations_on_rings, ranks, transports, timeout=300.0)[0] > 30


# -- models ----------------------------------------------------------------------------------------------------------


@on_ranks(few([2], [2, 3]), timeout=300.0)
def test_models(rank, ranks, cases):
    steps = 3
    plain = _Convolved()
    expected = train_model(plain, lambda step: mean_loss(plain, ranks, step), steps)
    for options in ({}, {"transport": "tcp", "late_gradients": 2}, {"transport": "c10d", "late_gradients": 0}):
        late = options.pop("late_gradients", None)
        ring = rtp_ext.Ring(gradient_route="direct", late_gradients=late, timeout=PATIENT, **options)
        model = rtp_ext.fully_rotate(_Convolved(), mesh=ring)
        losses = train_model(model, lambda step, model=model: batch_loss(model, rank, step), steps)
        means = torch.tensor(ring.exchange(losses), dtype=torch.float64).mean(0)
        with cases.case(f"losses {options}"):
            assert_same(means, torch.tensor(expected, dtype=torch.float64), 1e-9, "losses")
        for name, parameter in plain.named_parameters():
            with cases.case(f"{name} {options}"):
                assert_same(full(model.get_parameter(name)), parameter, 1e-9, name)
        with cases.case(f"late {options}"):
            assert (ring.landed_late() > 0) == (late == 2)
        ring.close()
    for travel, tolerance in ((None, 2.0**-8), ("int8", 1 / 127)):
        whole = make_model(torch.float32)
        mean_loss(whole, ranks, 0).backward()
        policy = MixedPrecisionPolicy(reduce_dtype=HALF)
        model = rtp_ext.fully_rotate(
            make_model(torch.float32),
            mp_policy=policy,
            gradient_route="direct",
            gradient_travel=travel,
            timeout=PATIENT,
        )
        batch_loss(model, rank, 0).backward()
        ring = rtp_ext.convert.model.ring_of(model)
        assert (ring.gradient_route, ring.gradient_travel) == ("direct", travel)
        for name, parameter in whole.named_parameters():
            with cases.case(f"{travel} {name}"):
                assert_same(full(model.get_parameter(name).grad), parameter.grad, 2 * tolerance, name)
                assert model.get_parameter(name).grad.dtype == torch.float32
        with cases.case(f"{travel} flyweight"):
            layer = nn.Linear(6, 9)
            copies = Flyweight(copy.deepcopy(layer), ring, shard_dims={"weight": 0, "bias": 0}, mp_policy=policy)
            x = random(4, 6, dtype=torch.float32, seed=5)
            copies(x).square().sum().backward()
            with torch.no_grad():
                layer.weight.copy_(full(copies.module.weight)), layer.bias.copy_(full(copies.module.bias))
            layer(x).square().sum().backward()
            assert_same(full(copies.module.weight.grad), layer.weight.grad, tolerance, "gradient")
        if travel is None:
            with pytest.raises(
                ValueError, match="expected gradient_travel None, that of the ring, or none, got 'int8'"
            ):
                rtp_ext.fully_rotate(nn.Linear(8, 8), mesh=ring, gradient_travel="int8")
        ring.close()


# -- bits and bytes --------------------------------------------------------------------------------------------------


def _mlp_gradients(ring, dtype):
    """Tests an MLP and a vocabulary head: a bundle, and a bundle whose wgrad adds several times."""
    up = random(9, 16, dtype=dtype, seed=1).requires_grad_()
    down = random(16, 9, dtype=dtype, seed=2).requires_grad_()
    head = random(11, 16, dtype=dtype, seed=3).requires_grad_()
    x = random(300, 16, dtype=dtype, seed=20 + ring.rank).requires_grad_()
    options = {"ring": ring, "reduce_dtype": HALF}
    y = rotated_mlp(x, up, down, activation="gelu", **options)
    targets = torch.arange(300) % (11 * ring.size)
    rotated_linear_cross_entropy(y, head, targets, **options).backward()
    return up.grad, down.grad, head.grad


def _twice(rank, ranks):
    found = []
    for delay in (0, 3000):
        options = {"timeout": PATIENT, "transport_options": {"delay_us": delay}}
        with rtp_ext.Ring(gradient_route="direct", **options) as ring:
            found.append([*_layer(ring, 13, 40, HALF)[0], *_mlp_gradients(ring, torch.float32)])
    return all(torch.equal(*pair) for pair in zip(*found, strict=True)), len(found[0])


def test_two_runs_are_bitwise_equal():
    """For any late contribution: random times delay the hops of the second run."""
    assert run_ranks(_twice, 4) == [(True, 5)] * 4


@on_ranks(3)
def test_what_is_rounded_may_land_late(rank, cases):
    """Deferred gradients, in 16 and in 8 bits, are bitwise equal to gradients that arrive within their pass."""
    for travel, gradients in ((None, None), ("int8", "int8")):
        found = []
        for late in (0, 2):
            model, options = make_model(torch.float32), {"gradient_route": "direct", "gradient_travel": gradients}
            ring = rtp_ext.Ring(transport="tcp", late_gradients=late, travel=travel, timeout=PATIENT, **options)
            rtp_ext.fully_rotate(model, mesh=ring, mp_policy=MixedPrecisionPolicy(reduce_dtype=HALF))
            for step in range(2):
                model.zero_grad()
                batch_loss(model, rank, step).backward()
            assert (ring.landed_late() > 0) == (late > 0)
            found.append({name: full(parameter.grad).clone() for name, parameter in model.named_parameters()})
            ring.close()
        for name, gradient in found[0].items():
            with cases.case(f"{travel} {gradients} {name}"):
                assert gradient.any() and torch.equal(gradient, found[1][name])


def _sent(rank, ranks):
    found = {}
    for name, dtype, options in (
        ("chain", torch.float32, {"gradient_route": "chain"}),
        ("direct", torch.float32, {"gradient_route": "direct"}),
        ("lean", torch.float32, {"gradient_route": "direct", "buffers": "lean"}),
        ("room", torch.float32, {"gradient_route": "direct", "buffers": 4 * 8 * 96 * 4}),
        ("no room", torch.float32, {"gradient_route": "direct", "buffers": 4 * 8 * 96 * 4 - 1}),
        ("bfloat16", HALF, {}),
        ("int8", HALF, {"gradient_travel": "int8"}),
    ):
        with rtp_ext.Ring(timeout=PATIENT, **options) as ring:
            weight = torch.ones(8, 96, requires_grad=True)
            rotated_linear(torch.ones(2, 96), weight, ring=ring, reduce_dtype=dtype).sum().backward()
            slots = ring.slot_count("gradient")
            found[name] = ring.hops("gradient"), ring.bytes_sent("gradient"), slots.peak_slots, slots.peak_bytes
    return found


def test_bytes_on_the_wire():
    numbers = 8 * 96
    for found in run_ranks(_sent, 3):
        for route in ("chain", "direct", "lean"):
            assert found[route][:2] == (2, 2 * numbers * 4), "as many messages, as many bytes"
        assert found["bfloat16"][:2] == (2, 2 * numbers * 2)
        assert found["int8"][:2] == (2, 2 * (numbers + 4 * numbers // BLOCK)), "1 + 4 / 128 bytes a number"
        assert found["direct"] == found["room"] and found["lean"] == found["no room"]
        assert found["direct"][2:] == (3, 4 * numbers * 4), "two that leave, and one with a place for each arrival"
        assert found["lean"][2:] == (3, 3 * numbers * 4)
        assert found["bfloat16"][2:] == (4, numbers * (4 + 4 * 2)), "and one to sum a contribution in"
        assert found["int8"][2:] == (4, numbers * 4 + 2 * 832 + 1600), "792 bytes in slots of 64, and 1584"


# -- errors of long rings --------------------------------------------------------------------------------------------


def _relative_error(ranks, **options):
    """One rank's gradient in an emulated ring, its own neighbour, is the sum of its contributions to all owners."""
    ring = rtp_ext.Ring.emulated(ranks, rank=ranks // 2, **options)
    rows, features, tokens = 16, 96, 96
    weight = random(rows, features, dtype=torch.float32, seed=1).requires_grad_()
    x = random(tokens, features, dtype=torch.float32, seed=2)
    dy = random(tokens, rows * ranks, dtype=torch.float32, seed=3)
    y = rotated_linear(x, weight, ring=ring, reduce_dtype=HALF)
    y.backward(dy)
    exact = (dy.double().t() @ x.double()).view(ranks, rows, features).sum(0) / ranks
    return ((weight.grad.double() - exact).norm() / exact.norm()).item()


def test_the_error_does_not_grow_with_the_ring():
    sizes = (2, 3, 4, 8, 16)
    direct = [_relative_error(ranks, gradient_route="direct") for ranks in sizes]
    chain = [_relative_error(ranks, gradient_route="chain") for ranks in sizes]
    int8 = [_relative_error(ranks, gradient_route="direct", gradient_travel="int8") for ranks in sizes]
    for errors in (direct, int8):
        # R - 1 contributions of R ranks are rounded: sqrt((R - 1) / R) of the error if all were
        scaled = [error / (1 - 1 / ranks) ** 0.5 for error, ranks in zip(errors, sizes, strict=True)]
        assert max(scaled) < 1.1 * min(scaled), scaled
    assert chain[-1] > 2 * direct[-1] and chain[-1] > 1.5 * chain[1], f"control: {chain}, {direct}"
    assert 1e-4 < direct[-1] < ROUNDING and direct[-1] < int8[-1] < 0.01


# -- choices and refusals --------------------------------------------------------------------------------------------


def test_what_no_ring_takes():
    for options, message in (
        ({"gradient_route": "scenic"}, "gradient_route one of auto, chain, direct, got 'scenic'"),
        ({"gradient_travel": "int4"}, "gradient_travel None or 'int8', got 'int4'"),
        ({"gradient_route": "chain", "gradient_travel": "int8"}, "quantized again at every rank.*got gradient_travel"),
        ({"gradient_route": "direct", "route": "two-level"}, "gradient_route auto or chain with route two-level"),
        ({"gradient_route": "direct", "gradient_halves": True}, "gradient_halves None or False with gradient_route"),
    ):
        for make in (rtp_ext.Ring, lambda **given: rtp_ext.Ring.emulated(2, **given)):
            with pytest.raises(ValueError, match=message):
                make(**options)
    with pytest.raises(ValueError, match="gradient_route"):
        rtp_ext.Ring.emulated(2, gradient_route="auto")


def test_gathered_layers_send_what_was_asked_for():
    for travel, each in ((None, 2), ("int8", 1 + 4 / BLOCK)):
        ring = rtp_ext.Ring.emulated(3, route="gather", gradient_route="direct", gradient_travel=travel)
        weight = torch.ones(4, 128, requires_grad=True)
        rotated_linear(torch.ones(2, 128), weight, ring=ring, reduce_dtype=HALF).sum().backward()
        assert ring.bytes_sent("gradient") == 2 * 4 * 128 * each


@on_ranks(4, timeout=300.0)
def test_what_is_chosen(rank, cases):
    def ring(**options):
        return rtp_ext.Ring(timeout=PATIENT, **options)

    with pytest.raises(ValueError, match=r"ranks disagree: .*gradient_route chain.*gradient_route direct"):
        ring(gradient_route="direct" if rank else "chain")
    with ring(route="ring") as one_host:
        assert (one_host.gradient_route, one_host.gradient_travel) == ("by-dtype", None)
        assert one_host.gradients.reason == "every rank reaches every other at the cost of a neighbour"
    pretend_hosts(rank, 2)
    with ring() as levels:
        assert (levels.route, levels.gradient_route) == ("two-level", "chain")
        assert levels.gradients.reason == "gradients of two levels are summed inside hosts first"
    for options in ({}, {"gradient_travel": "int8"}):
        with pytest.raises(ValueError, match=r"on two levels \(2 hosts of 2 ranks\).*with route='ring' they take it"):
            ring(gradient_route="direct", **options)
    with pytest.raises(ValueError, match="here they take the chain, because gradients of two levels"):
        ring(gradient_travel="int8")
    for transport in ("shm+c10d", "shm+tcp"):
        with ring(route="ring", transport=transport) as flat:
            assert flat.gradient_route == "chain"
            assert flat.gradients.reason == "the ranks of a host share its link to others"
        with ring(route="ring", transport=transport, gradient_route="direct") as flat:
            assert (flat.gradient_route, flat.gradients.reason) == ("direct", "it was asked for")
            _bits(cases, flat, transport)
            with cases.case(transport):
                check_pass(_operations()["mlp"], flat)
    with pytest.raises(ValueError, match="because the ranks of a host share its link to others"):
        ring(route="ring", gradient_travel="int8")
    os.environ["RTP_DEBUG_HOST"] = str(rank)
    with ring(transport="tcp") as apart:
        assert (apart.per_host, apart.gradient_route) == (1, "by-dtype")


def test_a_linear_layer_of_one_process_is_the_same():
    """Both routes give the same sum on the emulated ring."""
    gradients = []
    for options in ({}, {"gradient_route": "direct"}):
        ring = rtp_ext.Ring.emulated(3, **options)
        weight = random(4, 6, dtype=torch.float64, seed=1).requires_grad_()
        x = random(5, 6, dtype=torch.float64, seed=2)
        y = rotated_linear(x, weight, ring=ring)
        (F.gelu(y) * random(5, 12, dtype=torch.float64, seed=3)).sum().backward()
        gradients.append(weight.grad)
    assert_same(*gradients, 1e-12, "gradient")
