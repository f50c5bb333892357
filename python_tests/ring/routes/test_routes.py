"""Routes of weights and gradients: gathered, in groups of every size, and in two halves. The results are the same."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from grids import few
from harness import Cases, run_ranks
from live_bytes import STEADY, assert_pool
from models import batch_loss, make_model, mean_loss, train
from operation_checks import assert_result, plain_results, rotated_result
from operations.layers import make_linear, make_linears
from reference import TOLERANCE, assert_same, chunk, differs, full, random
from torch.distributed.fsdp import MixedPrecisionPolicy

import rtp_ext
from rtp_ext.functional import rotated_linear, rotated_linear_cross_entropy

WAYS = {
    "gather": {"route": "gather"},
    "halves": {"gradient_halves": True},
    "halves direct": {"route": "direct", "gradient_halves": True},
}


def groups(ranks):
    """Groups of every size on every route of weights and gradients."""
    return {
        f"group {group}, {route}, {gradients}": {"group": group, "route": route, "gradient_route": gradients}
        for group, route, gradients in product(range(2, ranks + 1), ("ring", "direct"), ("chain", "direct"))
    } | {
        f"group {group}, halves": {"group": group, "route": "direct", "gradient_halves": True}
        for group in range(2, ranks + 1)
    }


SHAPES = [(7, 5), (2, 6), (13, 4)]  # out, in features


def _check_operations(cases, ring, way, transport):
    for dtype, forms in ((torch.float64, ("2d", "empty on rank 0")), (torch.bfloat16, ("2d",))):
        operations = {f"{o}x{i}": make_linear((i, o), dtype=dtype, bias=i != 6) for o, i in SHAPES}
        operations["q, k, v"] = make_linears({"q": 9, "k": 4, "v": 5}, dtype=dtype)
        for name, operation in operations.items():
            for form in forms:
                with cases.case(f"{way} {transport} {name} {form} {dtype}"):
                    expected = plain_results(operation, ring.size, form, 1)[ring.rank]
                    actual = rotated_result(operation, ring, form, 1, operation.shards(ring.rank, ring.size))
                    tolerance = TOLERANCE[dtype]
                    assert_result(actual, expected, ring, operation.cuts, tolerance, tolerance)
                    if ring.size > 1 and form == "2d":
                        wrong = plain_results(operation, ring.size, form, 1, skipped=ring.size - 1)[ring.rank]
                        weight = next(iter(operation.parameters))
                        assert differs(wrong.gradients[weight], expected.gradients[weight], tolerance), "control"


def _run(rank, ranks):
    cases = Cases()
    plain = make_model()
    train(plain, lambda step: mean_loss(plain, ranks, step), 2)
    for way, options in (WAYS | groups(ranks)).items():
        for transport in ("shm", "c10d") if way in WAYS else ("shm",) if options["route"] == "ring" else ("c10d",):
            ring = rtp_ext.Ring(transport=transport, timeout=60.0, **options)
            _check_operations(cases, ring, way, transport)
            assert all(plan.route == "gather" for plan in ring.gate.plans.values()) == (way == "gather")
            with cases.case(f"{way} {transport} cast"):
                x, weight = random(4, 6, dtype=torch.bfloat16, seed=5), random(9, 6, dtype=torch.float32, seed=6)
                local = chunk(weight, ranks, rank).clone()
                y = rotated_linear(x, local, ring=ring, compute_dtype=torch.bfloat16)
                assert_same(y, F.linear(x.double(), weight.bfloat16().double()), TOLERANCE[torch.bfloat16], "output")
            if transport == "c10d":
                model = rtp_ext.fully_rotate(make_model(), mesh=ring, in_place=way in WAYS)
                train(model, lambda step, model=model: batch_loss(model, rank, step), 2)
                with cases.case(f"{way} model"):
                    for name, parameter in plain.named_parameters():
                        assert_same(full(model.get_parameter(name)), parameter, 1e-9, name)
            ring.close()
    cases.finish()
    return cases.count


@pytest.mark.parametrize("ranks", few([1, 3], [1, 2, 3, 4]))
def test_the_plain_results(ranks):
    assert run_ranks(_run, ranks)[0] > 30


def test_hops_and_slots():
    """A gathered layer sends as much as a rotated one; halves take as many bytes in twice as many hops."""
    counts = {}
    for way, options in {"ring": {"prefetch": 0}, **WAYS}.items():
        ring = rtp_ext.Ring.emulated(4, **options)
        weight = torch.ones(6, 16, requires_grad=True)
        rotated_linear(torch.ones(3, 16, requires_grad=True), weight, ring=ring).sum().backward()
        counts[way] = (
            ring.hops("weight"),
            ring.hops("gradient"),
            ring.bytes_sent("weight"),
            ring.bytes_sent("gradient"),
        )
        slots = ring.slot_count("gradient")
        if way == "halves":
            assert (slots.slots, slots.bytes) == (2, 2 * 2 * 3 * 16 * 4), "two slots of two halves"
        if way == "gather":
            assert ring.slot_count("weight").bytes == 4 * 6 * 16 * 4, "all shards"
    weight_bytes = gradient_bytes = 3 * 6 * 16 * 4
    assert counts["ring"] == (6, 3, 2 * weight_bytes, gradient_bytes)
    assert counts["gather"] == counts["ring"]
    assert counts["halves"] == counts["halves direct"] == (6, 6, 2 * weight_bytes, gradient_bytes)


def test_what_cannot_be_gathered_rotates():
    ring = rtp_ext.Ring.emulated(3, route="gather")
    assert rotated_linear(torch.ones(2, 15), torch.ones(4, 5), ring=ring, shard_dim=1).shape == (2, 4)
    assert not ring.gate.plans
    assert (ring.route, ring.hop_route) == ("gather", "ring")


def test_what_takes_no_groups_is_computed_shard_by_shard():
    """Cuts along the inputs, and pieces: no slot holds more than a shard."""
    ring = rtp_ext.Ring.emulated(3, group=2)
    rotated_linear(torch.ones(2, 15), torch.ones(4, 5), ring=ring, shard_dim=1)
    ring.slot_cap = 4 * 5 * 2
    rotated_linear(torch.ones(2, 5), torch.ones(4, 5), ring=ring)
    rotated_linear_cross_entropy(torch.ones(2, 5), torch.ones(4, 5), torch.tensor([0, 11]), ring=ring)
    assert ring.slot_count("weight").peak_bytes <= 2 * 128
    control = rtp_ext.Ring.emulated(3, group=2)
    rotated_linear(torch.ones(2, 5), torch.ones(4, 5), ring=control)
    assert control.slot_count("weight").peak_bytes == 192, "two shards of 80 bytes"


def test_errors_of_groups():
    for group in (0, -1, True, 1.5):
        with pytest.raises(
            ValueError, match="expected group to be None or a number of shards from 1 to the ranks, got"
        ):
            rtp_ext.Ring.emulated(3, group=group)
    with pytest.raises(ValueError, match="expected group from 1 to 3, the ranks of the ring, got 4"):
        rtp_ext.Ring.emulated(3, group=4)
    for options in ({"route": "two-level", "hosts": 2}, {"travel": "int8"}, {"in_place": True}, {"route": "gather"}):
        with pytest.raises(ValueError, match=r"Ring: expected group None with \w+=.*, got 2"):
            rtp_ext.Ring.emulated(4, group=2, **options)


def _one_whole_product(rank, ranks):
    """All shards in one group: the bits are those of the product with the whole weight."""
    cases = Cases()
    for route in ("ring", "direct"):
        ring = rtp_ext.Ring(timeout=60.0, group=ranks, route=route)
        for out, features in ((48, 40), (7, 5), (2, 6)):
            x, weight, bias = (
                random(*size, dtype=torch.float32, seed=out) for size in ((9, features), (out, features), (out,))
            )
            x.requires_grad_()
            local = chunk(weight, ranks, rank).clone().requires_grad_()
            y = rotated_linear(x, local, chunk(bias, ranks, rank).clone(), ring=ring)
            dy = random(9, out, dtype=torch.float32, seed=3)
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            with cases.case(f"{route} {out}x{features}"):
                assert torch.equal(y, F.linear(x, weight, bias)) and torch.equal(dx, dy @ weight)
            (gradient,) = torch.autograd.grad(y, local, dy)
            with cases.case(f"{route} {out}x{features} wgrad"):
                assert_same(gradient, chunk(dy.t() @ x, ranks, rank), 1e-5, "gradient")
        ring.close()
    cases.finish()


@pytest.mark.parametrize("ranks", few([3], [2, 3, 4]))
def test_one_group_is_one_product(ranks):
    run_ranks(_one_whole_product, ranks)


def test_the_pool_is_the_footprint():
    """Slots of groups, to the byte: every size of a group, route, and route of gradients. Shards have odd rows."""
    layers = [(60, 11), (30, 60)]
    for ranks, route, (gradients, halves) in product(
        (2, 3, 5), ("ring", "direct"), (("chain", False), ("chain", True), ("direct", False))
    ):
        sizes = set()
        for group in range(1, ranks + 1):
            for dtype in (torch.float32, torch.bfloat16):
                ways = dict(group=group, route=route, gradient_route=gradients)
                ring = rtp_ext.Ring.emulated(ranks, **ways, gradient_halves=halves)
                model = torch.nn.Sequential(*(torch.nn.Linear(features, out) for out, features in layers))
                policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype) if dtype != torch.float32 else None
                rtp_ext.fully_rotate(model, mesh=ring, **({"mp_policy": policy} if policy else {}))
                for _ in range(STEADY):
                    model(torch.ones(3, 11, requires_grad=True)).sum().backward()
                planned = rtp_ext._native.footprint(
                    [
                        rtp_ext._native.OperationFacts(
                            "linear", [rtp_ext._native.ParameterFacts(shape) for shape in ((out, features), (out,))]
                        )
                        for out, features in layers
                    ],
                    **dict(ranks=ranks, in_place=False, sends_anywhere=True, receives_anywhere=True, slot_cap=0),
                    **dict(cast=dtype != torch.float32, compute_bytes=dtype.itemsize, reduce_bytes=dtype.itemsize),
                    **dict(ways, gradients_apart=True, halves=halves, look_ahead=None),
                )
                assert_pool(ring, planned, f"{ranks} ranks, {ways}, halves {halves}, {dtype}")
                sizes.add((planned.weight.bytes, dtype))
        assert len(sizes) > ranks, "control: groups are of other sizes"


def test_large_shards_go_in_pieces_instead():
    """A slot cap limits slots to less than a shard; a gathered layer would hold all of them."""
    ring = rtp_ext.Ring.emulated(2, route="gather")
    ring.slot_cap = 4 * 8 * 4
    weight, x = torch.randn(6, 8, requires_grad=True), torch.randn(3, 8)
    y = rotated_linear(x, weight, ring=ring)
    assert_same(y, F.linear(x, weight).repeat(1, 2), 1e-5, "output")
    assert ring.slot_count("weight").peak_bytes <= 2 * (4 * 8 * 4)


def test_two_lanes_leave_results_alone():
    """A CPU has one stream; a schedule with two streams still runs there."""
    plain = torch.nn.Linear(5, 7)
    ring = rtp_ext.Ring.emulated(1)
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
    x = torch.randn(3, 5)
    assert_same(model(x), plain(x), 1e-5, "output")
    assert not rtp_ext._native.wastes_last_wave(8192, 14336, 0)
    assert rtp_ext._native.wastes_last_wave(8192, 14336 // 8, 132)  # 64 x 7 tiles: 3.39 waves
    assert not rtp_ext._native.wastes_last_wave(128 * 132, 256, 132)  # one full wave
