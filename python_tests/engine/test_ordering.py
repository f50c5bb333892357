"""The executor's waits order every two conflicting uses of a piece of memory: see recording_transport.

A CPU computes in order, so its results cannot show a missing wait; a recording can. Each control removes one kind of
wait.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import recording_transport
import torch
from recording_transport import any_conflict, conflicts
from reference import assert_same, local, random
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import rtp_ext
from rtp_ext import _native
from rtp_ext.functional import (
    rotated_embedding,
    rotated_linear,
    rotated_linear_cross_entropy,
    rotated_linears,
    rotated_mlp,
)

RANKS = 4
TOKENS = 6


def leaf(*shape: int, seed: int = 0, compute_dtype: torch.dtype = torch.float32, **_: Any) -> torch.Tensor:
    return random(*shape, dtype=compute_dtype, seed=seed).requires_grad_()


def linear(ring, **options):
    weight, bias = leaf(4, 6), leaf(4, seed=1)
    for step in range(2):
        x = leaf(TOKENS, 6, seed=step, **options)
        y = rotated_linear(x, weight, bias, ring=ring, **options)
        y.sum().backward()
        yield y, x.grad, weight.grad, bias.grad


def frozen(ring):
    """A backward without wgrad, and one without dgrad."""
    weight, x = leaf(4, 6), leaf(TOKENS, 6)
    for weights, inputs in ((False, True), (True, False)):
        y = rotated_linear(
            x.detach().requires_grad_(inputs), weight.detach().requires_grad_(weights), ring=ring, name="frozen"
        )
        y.sum().backward()
        yield (y,)


def cut_along_inputs(ring):
    weight, x = leaf(8, 3), leaf(TOKENS, 3 * ring.size)
    y = rotated_linear(x, weight, leaf(2), ring=ring, shard_dim=1)
    y.sum().backward()
    yield y, x.grad, weight.grad


def three(ring):
    weights, x = [leaf(n, 6, seed=n) for n in (3, 1, 2)], leaf(TOKENS, 6)
    for _ in range(2):
        y = torch.cat(rotated_linears([x], weights, ring=ring), -1)
        y.sum().backward()
        yield (y, x.grad, *(weight.grad for weight in weights))


def pieces(ring):
    ring.slot_cap = 2 * 6 * 4
    yield from linear(ring)


def mlp(ring, **options):
    up, gate, down, x = leaf(5, 6), leaf(5, 6, seed=1), leaf(6, 5, seed=2), leaf(TOKENS, 6, seed=3, **options)
    for _ in range(2):
        y = rotated_mlp(x, up, down, gate, activation="swiglu", ring=ring, **options)
        y.sum().backward()
        yield y, x.grad, up.grad, gate.grad, down.grad


def late(ring, layers=4):
    """Gradients that arrive after the passes of two more layers, without autograd, which would wait."""
    executor, outputs = ring.communicator.executor, 4 * ring.size
    executor.allow_late(2)
    dtypes = {"compute_dtype": torch.float32, "reduce_dtype": torch.float32}
    options = _native.RotationOptions(
        route=ring.hop_route,
        in_place=False,
        slot_cap=0,
        halves=False,
        late=True,
        name="late",
        **dtypes,
        gradient_route=ring.gradient_route,
    )
    shape = _native.LinearBundle([_native.LinearShape(outputs, 6, by_outputs=True, transposed=False)], [False])
    projections = [_native.Projection(0, 0, 0, outputs)]
    gradients = []
    for layer in range(layers):
        dy, x, weight = (random(*sizes, dtype=torch.float32, seed=layer) for sizes in ((5, outputs), (5, 6), (4, 6)))
        _, gradient = _native.linear_backward(
            executor, [dy], [x], [weight], shape, projections, [True], [True], options
        )
        gradients.append(gradient)
    for gradient in gradients[:-1]:
        ring.land(gradient)
    executor.trace(False)  # completes the last one too
    yield gradients


def vocabulary(ring):
    table, head = leaf(5, 6), leaf(5, 6, seed=1)
    ids = torch.arange(TOKENS) % 5
    x = rotated_embedding(ids, table, ring=ring)
    loss = rotated_linear_cross_entropy(x, head, ids, ring=ring)
    loss.backward()
    yield loss, table.grad, head.grad


def primitives(ring):
    shard, weight, x = (random(*shape, dtype=torch.float32, seed=1) for shape in ((3, 5), (2, 4), (TOKENS, 4)))
    yield tuple(view * 2 for _, view in ring.rotate(shard))
    yield (next(view * 2 for _, view in ring.rotate(shard, reverse=True)),)  # the others are not looked at
    for _, view in ring.rotate(shard):  # one pass within another
        yield view * 2, rotated_linear(x, weight, ring=ring)
    yield (ring.collect(lambda owner, partial: partial.add_(shard, alpha=owner), shard),)

    def fail(owner, partial):
        if owner == (ring.rank - 1) % ring.size:
            raise ZeroDivisionError
        partial.add_(shard)

    with pytest.raises(ZeroDivisionError):  # the remaining sums still travel
        ring.collect(fail, shard)


def _halve(layer):
    """A function of its own: a module whose forward names the weight of another one gathers it."""
    with torch.no_grad():
        local(layer.weight).mul_(0.5)


class Restless(nn.Sequential):
    """Writes the weight of its third layer in every forward, when the first hop of that may have left."""

    def forward(self, x):
        for index, layer in enumerate(self):
            x = layer(x)
            if index == 1:
                _halve(self[2])
        return x


def restless(ring):
    yield from layers(ring, kind=Restless)


def mixed(ring):
    """Passes of many kinds after one another: table, attention heads, a bundled MLP, a linear layer."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(12, 8), block, nn.Linear(8, 12))
    rtp_ext.fully_rotate(model, mesh=ring)
    for _ in range(3):
        y = model(torch.arange(TOKENS).view(2, 3))
        y.square().sum().backward()
        yield (y,)


def layers(ring, kind=nn.Sequential, **options):
    """Layers of many sizes, three steps: passes reuse slots, and larger slots replace smaller ones."""
    torch.manual_seed(0)
    sizes = [5, 12, 32, 8, 20, 48]  # four ranks divide them
    model = kind(*(nn.Linear(*pair) for pair in pairwise(sizes)))
    rtp_ext.fully_rotate(model, mesh=ring, bundle=False, **options)
    for _ in range(3):
        x = leaf(TOKENS, 5)
        y = model(x)
        y.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter).sub_(0.1)
                parameter.grad = None
        yield y, x.grad


@dataclass(frozen=True)
class Case:
    program: Callable[..., Any]
    transport: dict[str, Any] = field(default_factory=dict)
    ring: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    ahead: int | None = 0  # bytes


LANES = {"multiprocessors": 132}  # on which every product of these sizes wastes a wave
SLOTS = {"sends_anywhere": False, "receives_anywhere": False}
STRAIGHT = {"gradient_route": "direct"}
NARROW = {"reduce_dtype": torch.bfloat16}
CAST = {"compute_dtype": torch.bfloat16}
LEVELS = {"route": "two-level", "hosts": 2}
WIDENED = {"travel": "bfloat16"}  # widened by an operator of torch, which a recording sees
CASES = {
    "linear": Case(linear),
    "linear, direct": Case(linear, ring={"route": "direct"}),
    "linear, gather": Case(linear, ring={"route": "gather"}),
    "linear, in place": Case(linear, ring={"in_place": True}),
    "linear, halves": Case(linear, ring={"gradient_halves": True}),
    "linear, lanes": Case(linear, LANES),
    "linear, lanes, in place": Case(linear, LANES, {"in_place": True}),
    "linear, lanes, halves": Case(linear, LANES, {"gradient_halves": True}),
    "linear, lanes, halves, slots": Case(linear, LANES | SLOTS, {"gradient_halves": True, "route": "direct"}),
    "linear, lanes, cast": Case(linear, LANES, options=CAST),
    "linear, slots": Case(linear, SLOTS),
    "linear, slots, gather": Case(linear, SLOTS, {"route": "gather"}),
    "linear, cast, gather": Case(linear, ring={"route": "gather"}, options=CAST),
    "frozen": Case(frozen),
    "frozen, lanes, gather": Case(frozen, LANES, {"route": "gather"}),
    "cut along inputs": Case(cut_along_inputs, LANES),
    "three": Case(three),
    "three, lanes, halves": Case(three, LANES, {"gradient_halves": True}),
    "three, gather, slots": Case(three, SLOTS, {"route": "gather"}),
    "pieces, lanes": Case(pieces, LANES),
    "pieces, slots": Case(pieces, SLOTS),
    "mlp": Case(mlp, LANES, {"gradient_halves": True}),
    "mlp, in place": Case(mlp, ring={"in_place": True}),
    "mlp, slots": Case(mlp, SLOTS),
    "mlp, cast": Case(mlp, ring={"route": "direct"}, options=CAST),
    "late": Case(late),
    "late, lanes": Case(late, LANES),
    "late, slots": Case(late, SLOTS, {"route": "direct"}),
    "straight": Case(linear, ring=STRAIGHT),
    "straight, lanes": Case(linear, LANES, STRAIGHT),
    "straight, lanes, in place": Case(linear, LANES, STRAIGHT | {"in_place": True}),
    "straight, lanes, 16 bits": Case(linear, LANES, STRAIGHT, NARROW),
    "straight, slots, 16 bits": Case(linear, SLOTS, STRAIGHT, NARROW),
    "straight, lanes, int8": Case(linear, LANES, STRAIGHT | {"gradient_travel": "int8"}),
    "straight mlp": Case(mlp, LANES, STRAIGHT),
    "straight mlp, slots, 16 bits": Case(mlp, SLOTS, STRAIGHT, NARROW),
    "straight layers, lanes": Case(layers, LANES, STRAIGHT),
    "straight layers, lanes, 16 bits": Case(
        layers, LANES, STRAIGHT, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    ),
    "straight, late": Case(late, ring=STRAIGHT),
    "straight, late, lanes": Case(late, LANES, STRAIGHT),
    "vocabulary": Case(vocabulary),
    "vocabulary, slots": Case(vocabulary, SLOTS),
    "primitives": Case(primitives),
    "primitives, slots": Case(primitives, SLOTS, {"route": "direct"}),
    "layers": Case(layers),
    "layers, in place": Case(layers, ring={"in_place": True}),
    "layers, lanes": Case(layers, LANES),
    "layers, lanes, slots": Case(layers, LANES | SLOTS),
    "layers, lanes, halves": Case(layers, LANES, {"gradient_halves": True, "route": "direct"}),
    "layers, slots, halves": Case(layers, SLOTS, {"gradient_halves": True}),
    "layers, lanes, cast": Case(layers, LANES, options={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    "layers, gather": Case(layers, ring={"route": "gather"}),
    "linear, two levels": Case(linear, ring=LEVELS),
    "linear, two levels, lanes, slots, cast": Case(linear, LANES | SLOTS, LEVELS, CAST),
    "mlp, two levels, slots": Case(mlp, SLOTS, LEVELS),
    "vocabulary, two levels": Case(vocabulary, ring=LEVELS),
    "primitives, two levels": Case(primitives, ring=LEVELS),
    "layers, two levels, slots": Case(layers, SLOTS, LEVELS),
    "linear, widened": Case(linear, ring=WIDENED),
    "linear, lanes, widened": Case(linear, LANES, WIDENED),
    "three, widened, halves": Case(three, ring=WIDENED | {"gradient_halves": True, "route": "direct"}),
    "pieces, lanes, widened": Case(pieces, LANES | SLOTS, WIDENED),
    "mlp, widened": Case(mlp, LANES, WIDENED),
    "vocabulary, widened": Case(vocabulary, SLOTS, WIDENED),
    "layers, lanes, widened": Case(layers, LANES, WIDENED),
    "layers, two levels, widened": Case(layers, SLOTS, LEVELS | WIDENED),
    "layers, all ahead": Case(layers, ahead=1 << 20),
    "layers, lanes, ahead": Case(layers, LANES, ahead=None),
    "layers, slots, ahead, direct": Case(layers, SLOTS, {"route": "direct"}, ahead=700),
    "layers, groups, ahead": Case(layers, SLOTS, {"group": 3}, ahead=None),
    "layers, groups, ahead, direct": Case(layers, ring={"route": "direct", "group": 2}, ahead=1 << 20),
    "layers, gather, ahead": Case(layers, LANES, {"route": "gather"}, ahead=None),
    "layers, two levels, ahead": Case(layers, SLOTS, LEVELS, ahead=None),
    "layers, cast, ahead": Case(
        layers, LANES, {"route": "direct"}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, None
    ),
    "mixed, slots, ahead": Case(mixed, SLOTS, ahead=1 << 20),
    "mixed, lanes": Case(mixed, LANES),
    "mixed, slots": Case(mixed, SLOTS),
}


def run(case, size=RANKS, recorded=True, collective=False):
    """Returns the results of the program; the records, if it is recorded; the ring. collective: as of a ring."""
    ring = rtp_ext.Ring.emulated(size, rank=size // 2, **{"route": "ring", **case.ring})
    ring.route_plan = dataclasses.replace(ring.route_plan, collective=collective)
    if not recorded:
        return list(case.program(ring, **case.options)), [], ring
    module = recording_transport.load()
    ring.communicator.executor = _native.Executor(
        module.transport(**case.transport, rank=ring.rank, per_host=ring.per_host),
        *(ring.rank, size, ring.device, ring.hosts),
    )
    ring.communicator.executor.prefetch(True, case.ahead)
    module.start()
    try:
        results = list(case.program(ring, **case.options))
        ring.clear_slots()
        return results, module.records(), ring
    finally:
        module.stop()


@pytest.fixture(scope="module")
def recordings():
    return {name: run(case) for name, case in CASES.items()}


def test_every_conflict_is_ordered(recordings):
    for name, (_, records, _) in recordings.items():
        assert conflicts(records) == [], name


def test_what_is_recorded_is_what_is_run(recordings):
    """The recording transport moves the data of the emulated one; the cases make the intended passes."""
    for name, case in CASES.items():
        results, records, ring = recordings[name]
        expected, _, plain = run(case, recorded=False)
        for step, (got, wanted) in enumerate(zip(results, expected, strict=True)):
            for index, pair in enumerate(zip(got, wanted, strict=True)):
                assert_same(*pair, 1e-6, f"{name}, step {step}, result {index}")
        seen = [record for record in records if record.kind == "hop"]
        for lane, channel in ((2, "weight"), (3, "gradient")):
            assert ring.hops(channel) == sum(record.lane in (lane, lane + 4) for record in seen)
        assert any(record.lane > 5 for record in seen) == (ring.hosts > 1), name
        if "pieces" not in name and "layers" not in name:  # which all send hops ahead, or none does
            assert ring.hops("gradient") == plain.hops("gradient")
        computes = {record.lane for record in records if record.kind == "memory"}
        beside = case.transport.get("multiprocessors") and case.program in (
            linear,
            frozen,
            three,
            late,
            pieces,
            layers,
            mixed,
        )
        assert (1 in computes) == bool(beside and case.ring.get("route") != "gather"), name
        if case.program is layers:
            sent, used = ring.prefetched()
            lean = case.ring.get("route") != "gather" and not case.ring.get("in_place")
            if case.ahead == 0:
                assert sent == used == (16 if lean else 0), name  # 4 layers of 5, 2 steps of 3, 2 phases
            else:
                assert sent == used > 16, name


SIZED = (linear, frozen, three, late, mlp, vocabulary, primitives)  # programs for any number of ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_conflict_is_ordered_in_rings_of_other_sizes(size):
    for name, case in CASES.items():
        if case.program in SIZED and "hosts" not in case.ring:
            assert conflicts(run(case, size)[1]) == [], name


def test_a_kind_of_wait_less_is_a_conflict(recordings):
    """Control: the check needs every kind of wait; waits for events and for arrivals in every case that has them."""
    needed = {
        wait: {name for name, (_, records, _) in recordings.items() if any_conflict(records, [wait])}
        for wait in recording_transport.WAITS
    }
    # what has arrived is used before the next hop writes to its memory, and that hop waits for the use
    assert needed.pop("target after received") == set()
    assert all(needed.values()), needed
    assert needed["source after mark"] == needed["target after mark"] == needed["compute after received"] == set(CASES)
    lanes = {name for name, (_, records, _) in recordings.items() if any(record.lane == 1 for record in records)}
    assert needed["compute after mark"] == needed["side after mark"] == lanes
    rotating = {name for name, case in CASES.items() if case.ring.get("route") != "gather"}
    assert needed["compute after sent"] > rotating


@pytest.mark.parametrize("name", ["linear, lanes, halves", "three", "mlp, slots", "linear, cast, gather"])
def test_what_waits_for_a_hop_is_needed(recordings, name):
    """Control, one by one: for every hop, some step must wait for its arrival, and for its departure from a slot or a
    local shard."""
    _, records, _ = recordings[name]
    hops = [record for record in records if record.kind == "hop" and record.writes]
    for hop in hops:
        waits = [record for record in records if record.kind == "received" and record.id == hop.id]
        assert waits, hop.text
        assert any_conflict([record for record in records if record not in waits]), f"{hop.text} of {len(hops)}"


def test_the_waits_of_streams_are_enough(recordings):
    """CUDA transports do not wait for a hop before the next one of its channel, which is on the same stream."""
    for name, (_, records, _) in recordings.items():
        assert conflicts(records, streams=True) == [], name
        assert any_conflict(records, ["compute after received"], streams=True), name


@pytest.mark.parametrize("program", [linear, frozen, three, mlp, vocabulary, layers])
def test_collectives(program):
    """Every conflict is ordered, and numbers are those of hops; of rings of other sizes, too."""
    for size, ahead, options in ((RANKS, 0, {}), (RANKS, None, {}), (2, 0, {}), (3, None, {}), (RANKS, 0, SLOTS)):
        case = Case(program, options, {"route": "gather"}, ahead=ahead)
        if program is layers and size != RANKS:
            continue
        results, records, ring = run(case, size, collective=True)
        expected, _, plain = run(case, size, recorded=False)
        for got, wanted in zip(results, expected, strict=True):
            for index, pair in enumerate(zip(got, wanted, strict=True)):
                assert_same(*pair, 1e-5, f"{size} ranks, {ahead}, result {index}")
        assert 0 < ring.hops("weight") < plain.hops("weight") or size == 2
        for streams in (False, True):
            assert conflicts(records, streams=streams) == [], (size, ahead, streams)
            for wait in ("compute after received", "source after mark"):
                assert any_conflict(records, [wait], streams=streams), wait


def test_parameters_written_between_a_hop_sent_ahead_and_its_pass(recordings):
    """The only conflict: such a hop carries arbitrary data, and no rank uses it."""
    _, records, ring = run(Case(restless))
    sent, used = ring.prefetched()
    found = conflicts(records)
    assert len(found) == sent - used == 2
    assert all(re.search(r"weight hop 1 of 3, sent \| \d+ aten::mul_ on lane 0$", text) for text in found)
    _, records, ring = run(Case(restless, SLOTS))  # data that leaves from a copy is not even torn
    assert conflicts(records) == [] and ring.prefetched() == (sent, used)
