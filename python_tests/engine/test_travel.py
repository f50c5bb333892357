"""Weights that travel in 8 or 16 bits: the owner rounds them once, so every rank computes with the same weights, and
the results are those of a single process with weights rounded in the same way."""

from dataclasses import replace

import pytest
import torch
from grids import few
from harness import on_ranks
from operation_checks import (
    EXACT,
    Operation,
    assert_result,
    check_checkpointing,
    plain_results,
    rotated_result,
)
from operations.bundles import BOTH, make_experts, make_head, make_mlp
from operations.layers import make_convolution, make_embedding, make_linear, make_linears
from reference import assert_same, chunk, differs, random
from rounded_travel import arrived, most_in_block, rebuilt, reckoned
from torch import nn
from torch.nn import functional as F

import rtp_ext
from rtp_ext.functional import rotated_linear
from rtp_ext.nn import Flyweight

TRAVELS = ("int8", "bfloat16")
INPUTS, OUTPUTS = 23, 37  # shards of 13 x 23 numbers at R = 3: blocks go over the ends of rows, the last is not full


def _ring(travel, **options):
    return rtp_ext.Ring(travel=travel, **{"transport": "c10d", "timeout": 60.0, **options})


def _operations() -> dict[str, Operation]:
    return {
        "linear": make_linear((INPUTS, OUTPUTS)),
        "linear, fewer rows than ranks": make_linear((INPUTS, 2)),
        "linear, cut along inputs": make_linear((INPUTS, OUTPUTS), dim=1),
        "q, k, v": make_linears({"q": 17, "k": 5, "v": 6}, 11),
        "embedding": make_embedding((29, 15)),
        "embedding, columns": make_embedding((29, 15), dim=1),
        "convolution": make_convolution("2d"),
        "mlp": make_mlp(),
        "mlp, recomputed": make_mlp(recompute=True),
        "experts": make_experts(biases=BOTH),
        "cross entropy": make_head(settings={"reduction": "sum", "label_smoothing": 0.1}),
        "cross entropy, transposed": make_head(tokens=300, transposed=True),
    }


def is_bias(name: str) -> bool:
    return "bias" in name


def _rounded(operation: Operation, ranks: int, travel: str | None, rows: int | None = None) -> Operation:
    """Computes with the same weights as the ranks."""
    parameters = {
        name: whole if is_bias(name) else rebuilt(whole, operation.cuts[name], ranks, travel, rows)
        for name, whole in operation.parameters.items()
    }
    return replace(operation, parameters=parameters)


def _check(operation, ring, rows=None, tolerance=EXACT, **options):
    """Returns output and gradients; the shards are still exact. Controls: with exact weights, or with exact weights of
    the owner, the results differ."""
    shards = operation.shards(ring.rank, ring.size)
    actual = rotated_result(operation, ring, "2d", 10, shards, **options)
    rounded = _rounded(operation, ring.size, ring.options.travel, rows)
    expected = plain_results(rounded, ring.size, "2d", 10)[ring.rank]
    assert_result(actual, expected, ring, operation.cuts, tolerance, tolerance)
    exact = plain_results(operation, ring.size, "2d", 10)[ring.rank]
    assert differs(actual.output, exact.output, 10 * tolerance), "control: exact weights"
    mixed = {name: whole.clone() for name, whole in rounded.parameters.items()}
    for name, whole in operation.parameters.items():
        dim = operation.cuts[name]
        chunk(mixed[name], ring.size, ring.rank, dim).copy_(chunk(whole, ring.size, ring.rank, dim))
    own = plain_results(replace(operation, parameters=mixed), ring.size, "2d", 10)[ring.rank]
    weights = [name for name in operation.parameters if not is_bias(name)]
    if any(chunk(operation.parameters[n], ring.size, ring.rank, operation.cuts[n]).numel() > 8 for n in weights):
        same = torch.equal(own.output, expected.output)  # no token of this rank meets its own experts or rows
        assert same or differs(actual.output, own.output, tolerance), "control: the owner computes with its exact shard"
    for name, shard in shards.items():
        assert torch.equal(shard, chunk(operation.parameters[name], ring.size, ring.rank, operation.cuts[name])), name


@on_ranks(few([3], [2, 3, 4]))
def test_a_single_process_that_rounds_in_the_same_way(ranks, cases):
    for travel in TRAVELS:
        for options in ({}, {"transport": "shm", "route": "direct", "gradient_halves": True}):
            if ranks > 3 and options:
                continue
            with _ring(travel, **options) as ring:
                for name, operation in _operations().items():
                    with cases.case(f"{travel} {options} {name}"):
                        _check(operation, ring)
                if not options:
                    check_checkpointing(cases, _Rounded(make_linear((INPUTS, OUTPUTS)), ranks, travel), ring)


class _Rounded(Operation):
    """The model on the ring starts from exact weights, its reference from rounded ones."""

    def __init__(self, operation, ranks, travel):
        rounded = _rounded(operation, ranks, travel)
        super().__init__(*(getattr(rounded, name) for name in ("parameters", "cuts", "plain", "rotated", "inputs")))
        object.__setattr__(self, "exact", operation)

    def shards(self, *arguments):
        return self.exact.shards(*arguments)


BY_OUTPUTS = ("linear", "q, k, v", "embedding", "convolution")


@on_ranks(few([2, 3], [2, 3, 4]))
def test_every_rank_computes_with_the_same_weights(rank, ranks, cases):
    """The same input on every rank: where weights are cut by outputs, bitwise the same output; elsewhere, where shards
    are summed in another order on each rank, the same to rounding."""
    for travel in TRAVELS:
        with _ring(travel) as ring:
            for name, operation in _operations().items():
                single = replace(
                    operation,
                    parameters={n: p.float() for n, p in operation.parameters.items()},
                    inputs=lambda form, rank, seed, inputs=operation.inputs: [
                        x.float() if x.is_floating_point() else x for x in inputs(form, 0, seed)
                    ],
                )
                shards = single.shards(rank, ranks)
                with torch.no_grad():
                    mine = single.rotated(shards, single.inputs("2d", rank, 10), ring=ring)
                told = ring.exchange(mine)
                with cases.case(f"{travel} {name}"):
                    if name.split(", fewer")[0] in BY_OUTPUTS or name == "embedding, columns":
                        assert all(torch.equal(theirs, told[0]) for theirs in told)
                    else:
                        assert_same(mine, told[0], 1e-6, "output")
                    assert mine.any()


@pytest.mark.parametrize("compute", [torch.float64, torch.float32, torch.bfloat16])
def test_the_nearest_of_255_values_in_every_block(compute):
    """Products with the identity show the weights that are computed with."""
    local = torch.float64 if compute == torch.float64 else torch.float32
    shard = random(29, 31, dtype=local, seed=3)
    shard[3] *= 1e-6
    shard[7] = 0
    shard.view(-1)[2 * 128 : 3 * 128] = 0
    for travel in (None, *TRAVELS):
        ring = rtp_ext.Ring.emulated(3, rank=1, travel=travel)
        y = rotated_linear(torch.eye(31, dtype=compute), shard, ring=ring, compute_dtype=compute)
        for owner in range(3):
            found = y[:, 29 * owner : 29 * (owner + 1)].t()
            assert torch.equal(found, arrived(shard, travel, dtype=compute)), "the owner of these computes with others"
        error = (found.double() - shard.double()).abs()
        if travel == "int8" and compute != torch.bfloat16:
            most = most_in_block(shard)
            assert (error <= most / 254 * (1 + 1e-5)).all()
            assert (error > 0.98 * most / 254).any(), "control: the bound is reached"
            assert not (error <= most / 255.5).all(), "control"
            nearest, clear = reckoned(shard)
            assert_same(found[clear > 1e-4], nearest[clear > 1e-4], 1e-6, "values")
            assert (clear > 1e-4).double().mean() > 0.99
            assert not found.flatten()[2 * 128 : 3 * 128].any()
        elif travel is None:
            assert torch.equal(found, shard.to(compute))


def test_what_is_not_finite_is_seen():
    for value in (torch.inf, -torch.inf, torch.nan):
        shard = random(4, 128, dtype=torch.float32, seed=1)
        shard[2, 5] = value
        y = rotated_linear(torch.eye(128), shard, ring=rtp_ext.Ring.emulated(2, travel="int8"))
        assert y[:, 2].isnan().all() and y[:, 6].isnan().all(), "its block"
        assert y[:, [0, 1, 3]].isfinite().all()


@on_ranks([2, 3])
def test_bytes_on_the_wire(rank, ranks, cases):
    sizes = {"int8": 1 + 4 / 128, "bfloat16": 2, None: 4}
    for travel, each in sizes.items():
        for dtype, bias in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True)):
            with _ring(travel, prefetch=0) as ring, cases.case(f"{travel} {dtype} bias={bias}"):
                weight = torch.ones(32, 64, requires_grad=True)  # of this rank, a multiple of a block
                parameters = [torch.ones(32, requires_grad=True)] if bias else []
                x = torch.ones(3, 64, dtype=dtype, requires_grad=True)
                y = rotated_linear(x, weight, *parameters, ring=ring, compute_dtype=dtype)
                forward = ring.bytes_sent("weight")
                y.sum().backward()
                number = min(each, dtype.itemsize)
                assert forward == (ranks - 1) * (32 * 64 * number + 32 * dtype.itemsize * bias), forward
                assert ring.bytes_sent("weight") - forward == (ranks - 1) * 32 * 64 * number, "biases are not sent back"
                assert ring.bytes_sent("gradient") == (ranks - 1) * (32 * 64 + 32 * bias) * 4
    with _ring("int8") as ring:
        seen = {owner: view.clone() for owner, view in ring.rotate(torch.full((5,), 0.1 + rank))}
        with cases.case("primitives"):
            assert all(torch.equal(view, torch.full((5,), 0.1 + owner)) for owner, view in seen.items())
            total = ring.collect(lambda owner, partial: partial.add_(0.1), torch.zeros(5, dtype=torch.float64))
            assert_same(total, torch.full((5,), 0.1 * ranks, dtype=torch.float64), EXACT, "sum")
            assert ring.bytes_sent("weight") == (ranks - 1) * 20


@on_ranks([2, 3])
def test_pieces_precisions_and_refusals(rank, ranks, cases):
    """Chunks, precisions, a generic wrapper, and refused options."""
    row = 8 * (INPUTS + 1)  # bytes of a row and its bias in float64
    for travel in TRAVELS:
        with _ring(travel, slot_cap=4 * row) as ring, cases.case(f"{travel}, pieces"):
            _check(make_linear((INPUTS, OUTPUTS)), ring, rows=4)
        with _ring(travel) as ring:
            local = random(33, 40, dtype=torch.float32, seed=1, scale=0.2)
            x = random(5, 40, dtype=torch.bfloat16, seed=2 + rank)
            with cases.case(f"{travel}, computed in bfloat16"):
                mine = chunk(local, ranks, rank).clone()
                y = rotated_linear(x, mine, ring=ring, compute_dtype=torch.bfloat16)
                shards = [arrived(chunk(local, ranks, j), travel, dtype=torch.bfloat16) for j in range(ranks)]
                expected = F.linear(x.double(), torch.cat(shards).double())
                assert_same(y, expected, 2.0**-8, "output")
            torch.manual_seed(0)
            plain = nn.Linear(11, 26).double()
            bias = plain.bias.detach().clone()
            few = x[:, :11].double()
            exact, expected = (F.linear(few, rebuilt(plain.weight, 0, ranks, t), bias) for t in (None, travel))
            cut = Flyweight(plain, ring, shard_dims={"weight": 0, "bias": 0})
            with cases.case(f"{travel}, flyweight"):
                assert_same(cut(few), expected, EXACT, "output")
                assert differs(expected, exact, 1e-4), "control: exact weights"
            with pytest.raises(ValueError, match=f"in_place=False on a ring of travel='{travel}'"):
                rtp_ext.fully_rotate(nn.Linear(4, 4), mesh=ring, in_place=True)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            rtp_ext.fully_rotate(model[0], mesh=ring, travel=travel)
            other = "int8" if travel == "bfloat16" else "bfloat16"
            with pytest.raises(ValueError, match=f"expected travel '{travel}', that of the ring"):
                rtp_ext.fully_rotate(model, travel=other)
            rtp_ext.fully_rotate(model)
            assert rtp_ext.ring_of(model) is ring
    with pytest.raises(ValueError, match="ranks disagree"):
        _ring("int8" if rank == 0 else None)


def test_what_is_unknown_is_refused():
    with pytest.raises(ValueError, match="travel to be None, 'bfloat16' or 'int8', got 'int4'"):
        rtp_ext.Ring.emulated(2, travel="int4")
    with pytest.raises(ValueError, match="travel None with route gather"):
        rtp_ext.Ring.emulated(2, travel="int8", route="gather")
