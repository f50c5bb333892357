"""Models whose weights travel in 8 or 16 bits train like a single process that rounds them before every forward and
whose optimizer updates exact weights. Also checks the memory of the ring."""

import copy

import pytest
import torch
from grids import few
from harness import on_ranks
from models import batch_loss, make_model, mean_loss
from pretended_hosts import pretend_hosts
from reference import adamw, assert_same, differs, full
from rounded_travel import computing_with, cuts_of
from test_travel import TRAVELS, _check, _operations
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import rtp_ext
from rtp_ext.planner.rotation.operations import RotatedOperation, Weight, rtp_bytes

STEPS, TOLERANCE = 3, 1e-8


def _rotating(model):
    """Returns the cuts of each rotated weight, by name."""
    kinds = (nn.Linear, nn.Embedding)
    names = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)]
    return {name: cuts_of(model.get_parameter(name)) for name in names}


def _train_plain(model, cuts, ranks, travel):
    """Steps of AdamW on exact weights, with the gradients of rounded ones."""
    optimizer = adamw(model.parameters(), lr=0.01)
    for step in range(STEPS):
        with computing_with(model, cuts, travel):
            optimizer.zero_grad()
            mean_loss(model, ranks, step).backward()
        optimizer.step()
    return model


@on_ranks(few([3], [2, 3]))
def test_three_steps(rank, ranks, cases):
    rings = (
        {"transport": "c10d", "late_gradients": 1},
        {"transport": "shm", "gradient_halves": True, "route": "direct"},
        {"transport": "tcp", "prefetch": 0},
    )
    for travel in TRAVELS:
        for number, options in enumerate(rings):
            if travel == "bfloat16" and number > 1:
                continue
            build = {"checkpointed": (None, False, True)[number], "tied": number == 1}
            with rtp_ext.Ring(travel=travel, timeout=60.0, **options) as ring:
                model = rtp_ext.fully_rotate(make_model(**build), mesh=ring)
                cuts = _rotating(model)
                if build["tied"]:
                    del cuts["head.weight"]
                expected = _train_plain(make_model(**build), cuts, ranks, travel)
                unrounded = _train_plain(make_model(**build), cuts, ranks, None)
                optimizer = adamw(model.parameters(), lr=0.01)
                for step in range(STEPS):
                    optimizer.zero_grad()
                    batch_loss(model, rank, step).backward()
                    optimizer.step()
                with cases.case(f"{travel} {options}"):
                    wrong = 0
                    for name, parameter in expected.named_parameters():
                        found = full(model.get_parameter(name))
                        assert_same(found, parameter, TOLERANCE, name)
                        wrong += differs(unrounded.get_parameter(name), parameter, 100 * TOLERANCE)
                    assert wrong > 3, "control: weights that are not rounded"
                    assert ring.prefetched()[1] > 0 or number == 2
                    assert number > 0 or ring.landed_late() > 0


@on_ranks(2)
def test_policies(rank, cases):
    """The dtype of a policy's computation and the format of travelling weights are independent."""
    for dtype, tolerance in ((torch.bfloat16, 0.1), (None, 1e-4)):
        losses = {}
        for travel in (None, *TRAVELS):
            policy = MixedPrecisionPolicy(param_dtype=dtype)
            model = rtp_ext.fully_rotate(make_model(torch.float32), mp_policy=policy, travel=travel)
            ring = rtp_ext.ring_of(model)
            assert ring.options.travel == travel
            loss = batch_loss(model, rank, 0)
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            losses[travel] = loss.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
            sent = ring.bytes_sent("weight")
            losses[travel, "sent"] = sent
            ring.close()
        exact = losses[None]
        with cases.case(f"{dtype}"):
            for travel in TRAVELS:
                for mine, right in zip(losses[travel], exact, strict=True):
                    assert abs(mine - right) < 0.05 * abs(right) + tolerance, f"{travel}: {losses}"
            assert losses["int8", "sent"] < losses["bfloat16", "sent"] <= losses[None, "sent"]
            same = losses["bfloat16", "sent"] == losses[None, "sent"]
            assert same == (dtype == torch.bfloat16), "16 bits as computed with travel as ever"
            assert (losses["bfloat16"] == exact) == same


@on_ranks(4)
def test_two_levels(rank, cases):
    pretend_hosts(rank, 2)
    for travel in TRAVELS:
        buffers = "auto" if travel == "int8" else "lean"
        with rtp_ext.Ring(transport="c10d", timeout=60.0, travel=travel, buffers=buffers) as ring:
            assert ring.route == "two-level"
            for name, operation in _operations().items():
                with cases.case(f"{travel} {name}"):
                    _check(operation, ring)


STRAIGHT = {"gradient_route": "direct"}


@pytest.mark.parametrize(
    ("travel", "dtype", "reduce", "gradients"),
    [
        ("int8", None, None, {}),
        ("bfloat16", None, torch.bfloat16, STRAIGHT),
        ("int8", torch.bfloat16, None, STRAIGHT | {"gradient_travel": "int8"}),
        ("int8", torch.bfloat16, torch.bfloat16, {}),
        ("bfloat16", None, None, STRAIGHT),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_the_ring_holds(ranks, travel, dtype, reduce, gradients):
    """The slots and scratch of the ring match the planner's calculation, to the byte."""
    ring = rtp_ext.Ring.emulated(ranks, travel=travel, **gradients)
    sizes = [(24, 36), (48, 24), (12, 48)]
    model = nn.Sequential(*(nn.Linear(inputs, rows) for rows, inputs in [(24, 36), (48, 24), (12, 48)]))
    rtp_ext.fully_rotate(
        model, mesh=ring, bundle=False, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)
    )
    for _ in range(3):
        model(torch.ones(5, 36)).sum().backward()
    layers = [
        RotatedOperation("linear", (Weight(size), Weight(size[:1])), input_gradient=number > 0)
        for number, size in enumerate(sizes)
    ]
    compute = 4 if dtype is None else 2
    gradients = {**gradients, "reduce_bytes": 2 if reduce else 4}
    held = rtp_bytes(layers, ranks, compute_bytes=compute, travel=travel, **gradients)
    counts = [ring.slot_count(channel) for channel in ("weight", "gradient", "scratch")]
    assert counts[0].bytes == held.weight_slots_bytes == sum(held.weight_slot_sizes)
    assert counts[1].bytes == held.gradient_slots_bytes
    assert counts[2].bytes == counts[2].peak_bytes == held.scratch_bytes
    largest = max(rows * inputs for rows, inputs in sizes) // ranks
    assert held.scratch_bytes == largest * compute, "one shard as it is computed with"
    wide = rtp_bytes(layers, ranks, compute_bytes=compute)
    assert wide.scratch_bytes == 0 and wide.weight_slot_sizes[-1] > held.weight_slot_sizes[-1]
    ring.clear_slots()
    assert [ring.slot_count(channel).bytes for channel in ("weight", "gradient", "scratch")] == [0, 0, 0]


def test_a_single_rank_sends_nothing():
    ring = rtp_ext.Ring.emulated(1, travel="int8")
    model = nn.Linear(7, 5)
    plain = copy.deepcopy(model)
    x = torch.ones(3, 7)
    assert torch.equal(rtp_ext.fully_rotate(model, mesh=ring)(x), plain(x))
