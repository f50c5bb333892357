"""Operations whose shards all come by one all-gather, and whose gradients leave by one reduce-scatter: results are
those of the plain operation, counts of operations and bytes those of collectives, slots those of the footprint."""

import copy
import os
import signal
import time
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import on_ranks
from live_bytes import assert_pool
from operation_checks import EXACT, check_controls, check_frozen, check_pass, train
from operations.bundles import make_experts, make_head, make_mlp
from operations.layers import make_embedding, make_linear, make_linears
from pretended_hosts import pretend_hosts
from reference import adamw, assert_same, full
from torch import nn
from trace_checks import check_trace

import rtp_ext
from rtp_ext.nn import RotatedLinear
from rtp_ext.observe import record
from rtp_ext.planner.rotation import family
from rtp_ext.planner.rotation.operations import RotatedOperation, Weight

COLLECTIVE = {"transport": "c10d", "collective": True}
QKV = {"q": 9, "k": 5, "v": 5}
OPERATIONS = {
    "linear": partial(make_linear, (5, 12)),
    "linear, uneven": partial(make_linear, (5, 7)),
    "linear, last shards empty": partial(make_linear, (6, 2), bias=False),
    "linear, transposed, uneven": partial(make_linear, (6, 7), transposed=True),
    "q, k, v": partial(make_linears, QKV),
    "q, k, v, biases": partial(make_linears, QKV, biased=("q", "v")),
    "mlp": partial(make_mlp, (8, 24, 8), bias=False),
    "mlp, gated, uneven, biases": partial(make_mlp, (8, 17, 5), "geglu"),
    "mlp, transposed, recomputed": partial(make_mlp, (8, 17, 5), "gelu", transposed=True, recompute=True),
    "mlp, ungated": partial(make_mlp, (5, 7, 6), "gelu_tanh", bias=False),
    "mlp, last shards empty": partial(make_mlp, (6, 2, 1)),
    "head, uneven": partial(make_head, (11, 5), {"z_loss": 0.05, "reduction": "sum"}),
    "experts, biases": partial(make_experts, (7, 6, 4), biases=("up_bias", "down_bias")),
    "experts, last shards empty": partial(make_experts, (2, 6, 4), routing="sentinel"),
}
WITHOUT_GROUPS = {  # these rotate beside them
    "embedding": make_embedding,
    "linear along its inputs": partial(make_linear, (7, 5), dim=1),
}


class Block(nn.Module):
    """A layer, and an MLP."""

    def __init__(self, features, hidden):
        super().__init__()
        self.first = nn.Linear(features, features, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(features, hidden, bias=False), nn.GELU(), nn.Linear(hidden, features, bias=False)
        )

    def forward(self, x):
        return self.mlp(self.first(x))


TOLERANCES = {torch.float32: (2e-6, 5e-6), torch.bfloat16: (2e-2, 2e-2)}


def rings(ranks):
    for options in ({"group": ranks, "route": "ring"}, {"group": ranks, "route": "direct"}, {"route": "gather"}):
        yield {**COLLECTIVE, **options, "timeout": 60.0}


def sent(ring):
    return [count(channel) for channel in ("weight", "gradient") for count in (ring.hops, ring.bytes_sent)]


def added(ring, before):
    return [after - start for after, start in zip(sent(ring), before, strict=True)]


def largest_shards(operation, ranks, names):
    """Returns the numbers of the largest shards of some parameters."""
    total = 0
    for name in names:
        whole, cut = operation.parameters[name], operation.cuts[name]
        total += -(-whole.shape[cut] // ranks) * whole.numel() // whole.shape[cut] if whole.numel() else 0
    return total


@on_ranks(few([1, 3], [1, 2, 3, 4]))
def test_results(ranks, cases):
    operations = {name: make() for name, make in (OPERATIONS | WITHOUT_GROUPS).items()}
    for options in rings(ranks):
        with rtp_ext.Ring(**options) as ring:
            for name, operation in operations.items():
                for form in ("2d", "empty on rank 0"):
                    with cases.case(f"{name} {options} {form}"):
                        check_pass(operation, ring, form)
            for name, dtype in product(("linear, uneven", "mlp, gated, uneven, biases", "experts, biases"), TOLERANCES):
                with cases.case(f"{name} {options} {dtype}"):
                    check_pass(OPERATIONS[name](dtype=dtype), ring, tolerances=TOLERANCES[dtype])


@on_ranks(few([3], [2, 3, 4]))
def test_counts(ranks, cases):
    """One operation for the weights of a forward or backward, and one for all gradients, with as many bytes as R - 1 of
    the largest shards have. The control: R - 1 hops each."""
    for collective, options in ((True, {}), (False, {"collective": False})):
        with rtp_ext.Ring(**COLLECTIVE | options, group=ranks, prefetch=False, timeout=60.0) as ring:
            for name, make in OPERATIONS.items():
                operation = make()
                once = 1 if collective else ranks - 1
                before = sent(ring)
                check_pass(operation, ring)
                hops_w, bytes_w, hops_g, bytes_g = added(ring, before)
                with cases.case(f"{name}, collective {collective}"):
                    assert (hops_w, hops_g) == (2 * once, once)
                    if collective:
                        assert bytes_g == 8 * (ranks - 1) * largest_shards(operation, ranks, operation.parameters)
                        assert 0 < bytes_w <= 2 * bytes_g
            before = sent(ring)
            check_pass(make_embedding(), ring)
            with cases.case(f"embedding, collective {collective}"):
                assert added(ring, before)[::2] == [ranks - 1, ranks - 1]


@on_ranks([3])
def test_training_frozen_parameters_and_controls(rank, ranks, cases):
    for options in rings(ranks):
        with rtp_ext.Ring(**options) as ring:
            for name in ("q, k, v", "mlp, ungated", "linear, uneven"):
                check_frozen(cases, OPERATIONS[name](), ring)
            for name in ("q, k, v, biases", "mlp, gated, uneven, biases", "head, uneven", "experts, biases"):
                with cases.case(f"{name} {options}"):
                    train(OPERATIONS[name](), rank, ranks, True, torch.float64, ring=ring)
            for operation in (
                make_linear(),
                make_mlp((5, 7, 6), bias=False),
                make_experts(routing="distinct", choices=5),
            ):
                check_controls(operation, ring, (EXACT, EXACT))


class Model(nn.Module):
    """MLPs and a stray linear layer; a tied head; a frozen layer."""

    def __init__(self, tied=True):
        super().__init__()
        self.table = nn.Embedding(13, 10)
        self.mlps = nn.Sequential(
            *(nn.Sequential(nn.Linear(10, size), nn.GELU(), nn.Linear(size, 10)) for size in (7, 3, 11))
        )
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.head = nn.Linear(10, 13, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.mlps(torch.tanh(self.frozen(self.table(ids)))))


class Alone(nn.Module):
    """Calls the layers that are named."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, names):
        return [self.layers[name](x) for name in names]


def ids_of(rank, step):
    return torch.randint(13, (3, 5), generator=torch.Generator().manual_seed(100 * step + rank))


@on_ranks(few([2], [2, 3]))
def test_models(rank, ranks, cases):
    """Steps of AdamW, each after two backwards, as of one process on the batches of all ranks; gradients that arrive
    late, and weights that were sent ahead, or neither; slots, as of the footprint, do not grow."""
    for options, tied in product(({}, {"late_gradients": 0, "prefetch": False}, {"late_gradients": 2}), (True, False)):
        torch.manual_seed(0)
        plain = Model(tied).double()
        with rtp_ext.Ring(**COLLECTIVE, group=ranks, timeout=60.0, **options) as ring, cases.case(f"{options} {tied}"):
            model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
            both = [adamw(p for p in each.parameters() if p.requires_grad) for each in (plain, model)]
            held = []
            for step in range(4):
                for part in (0, 1):
                    loss = model(ids_of(rank, 2 * step + part)).square().mean()
                    loss.backward()
                    losses = [plain(ids_of(each, 2 * step + part)).square().mean() for each in range(ranks)]
                    (sum(losses) / ranks).backward()
                    assert_same(loss, losses[rank], 1e-9, f"loss of step {step}")
                for (name, mine), right in zip(model.named_parameters(), plain.parameters(), strict=True):
                    assert (mine.grad is None) == (right.grad is None), name
                    if right.grad is not None:
                        assert_same(full(mine.grad), right.grad, 1e-9, f"gradient of {name}, step {step}")
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
                held.append([ring.slot_count(channel).bytes for channel in ("weight", "gradient")])
            for (name, mine), right in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert_same(full(mine), right[1], 1e-9, name)
            assert held[1] == held[-1], held
            ahead = ring.prefetched()[1]
            assert ahead > 0 if options.get("prefetch", True) else ahead == 0, "control: weights were sent ahead"


@on_ranks(few([3], [2, 3]))
def test_bytes_are_those_of_the_plan(rank, ranks, cases):
    with rtp_ext.Ring(**COLLECTIVE, group=ranks, timeout=60.0, embedding="rotate") as ring:
        model = rtp_ext.fully_rotate(Model(tied=False), mesh=ring)
        plan = rtp_ext.explain(model)
        model(ids_of(rank, 0))
        before = sent(ring)
        model(ids_of(rank, 0)).sum().backward()
        _, weights, _, gradients = added(ring, before)
        with cases.case("bytes"):
            assert plan.totals["forward_bytes"] + plan.totals["backward_bytes"] == weights
            assert plan.totals["gradient_bytes"] == gradients
        ways = {row.name: (row.route, row.gradient_route) for row in plan.parameters}
        with cases.case("ways"):
            assert ways["mlps.0.0.weight"] == ways["head.weight"] == ("all-gather", "reduce-scatter")
            assert ways["frozen.weight"] == ("all-gather", None)
            assert ways["table.weight"] == ("ring", "chain")


@on_ranks(few([3], [2, 3]))
def test_the_pool_is_the_footprint(ranks, cases):
    """To the byte; a group of gradients needs no slots for what arrives."""
    native = rtp_ext._native
    for dtype, hidden in product((torch.float32, torch.float64), ((60, 30), (7, 11))):
        layers = list(zip((30, *hidden), hidden, strict=False))
        operations = [
            native.OperationFacts("linear", [native.ParameterFacts(shape) for shape in ((out, features), (out,))])
            for features, out in layers
        ]
        with rtp_ext.Ring(**COLLECTIVE, group=ranks, late_gradients=0, timeout=60.0) as ring:
            model = nn.Sequential(*(nn.Linear(features, out, dtype=dtype) for features, out in layers))
            rtp_ext.fully_rotate(model, mesh=ring)
            for _ in range(4):
                model(torch.ones(3, 30, dtype=dtype, requires_grad=True)).sum().backward()
            size = dict(
                **dict(
                    ranks=ranks, in_place=False, sends_anywhere=True, receives_anywhere=True, slot_cap=0, cast=False
                ),
                **dict(compute_bytes=dtype.itemsize, reduce_bytes=dtype.itemsize, group=ranks, look_ahead=None),
            )
            planned, of_hops = (native.footprint(operations, **size, collective=way) for way in (True, False))
            with cases.case(f"{dtype} {hidden}"):
                assert_pool(ring, planned, f"{dtype} {hidden}")
                assert of_hops.gradient.bytes > planned.gradient.bytes, "control"


@on_ranks([2, 3])
def test_mlps_and_late_gradients_hold_what_the_planner_says(ranks, cases):
    """Blocks of a layer and an MLP, whose down is summed transposed: late as all others."""
    width, hidden = 12, 24
    first, up, down = Weight((width, width)), Weight((hidden, width)), Weight((width, hidden), dim=1)
    block = [RotatedOperation("linear", (first,)), RotatedOperation("bundle", (up, down))]
    sizes = family.Sizes(compute_bytes=4)
    for late in (1, 2):
        with rtp_ext.Ring(**COLLECTIVE, group=ranks, late_gradients=late, timeout=60.0) as ring:
            model = nn.Sequential(*(Block(width, hidden) for _ in range(2)))
            rtp_ext.fully_rotate(model, mesh=ring)
            before = ring.landed_late()
            for _ in range(4):
                model(torch.ones(3, width, requires_grad=True)).sum().backward()
            landed = ring.landed_late() - before
            plan = family.BlockPlan((ranks,) * 2, "scatter", 0, collective=True, late=late)
            with cases.case(f"bytes, late {late}"):
                held = sum(ring.slot_count(channel).peak_bytes for channel in ("weight", "gradient"))
                expected = family._collective_bytes((*block, *block), ranks, sizes, plan)
                assert held == expected, (held, expected)
            with cases.case(f"MLPs are late, {late}"):
                assert landed == 4 * 4, f"two blocks of two operations, four times: {landed}"


@on_ranks(4)
def test_shards_above_the_slot_cap_go_in_pieces(cases):
    """Chunk by chunk, as in groups of hops."""
    with rtp_ext.Ring(**COLLECTIVE, group=4, slot_cap=64, timeout=60.0) as ring:
        before = sent(ring)
        with cases.case("linear"):
            check_pass(make_linear((5, 24)), ring)
        assert added(ring, before)[0] > 2, "control: in pieces"


@on_ranks(4)
def test_two_hosts(rank, ranks, cases):
    """The transport between hosts, which reaches all ranks, has the collectives."""
    pretend_hosts(rank, 2)
    with rtp_ext.Ring(transport="shm+c10d", route="gather", collective=True, timeout=60.0) as ring:
        before = sent(ring)
        with cases.case("mlp"):
            check_pass(OPERATIONS["mlp, gated, uneven, biases"](), ring)
            assert added(ring, before)[::2] == [2, 1]
        with cases.case("embedding"):
            check_pass(make_embedding(), ring)
        with cases.case("bytes"), pytest.raises(rtp_ext.RotationError, match=r"shm\+c10d does not count the bytes"):
            ring.bytes_between_hosts("weight")
    message = r"expected collective=False, or transport nccl or c10d, got True over shm\+tcp"
    with cases.case("sockets"), pytest.raises(ValueError, match=message):
        rtp_ext.Ring(transport="shm+tcp", route="gather", collective=True, timeout=60.0)
    with cases.case("groups"), pytest.raises(ValueError, match=r"route='gather' with .* on route two-level"):
        rtp_ext.Ring(transport="shm+c10d", group=4, collective=True, timeout=60.0)


@on_ranks(2)
def test_refused(rank, cases):
    """On every rank, before the ring exists or as it is made."""
    refused = (
        ({"transport": "shm", "group": 2}, "got True over shm"),
        ({"transport": "tcp", "group": 2}, "got True over tcp"),
        ({"transport": "c10d"}, "expected group=2, all shards, or route='gather'"),
        ({"transport": "c10d", "group": 1}, "got group 1 on route"),
        ({"transport": "c10d", "group": 2, "gradient_route": "direct"}, "with gradient_route='direct'"),
        ({"transport": "c10d", "group": 2, "gradient_travel": "int8"}, "with gradient_travel='int8'"),
        ({"transport": "c10d", "group": 2, "gradient_halves": True}, "with gradient_halves=True"),
        ({"transport": "c10d", "travel": "int8"}, "with travel='int8'"),
        ({"transport": "c10d", "in_place": True}, "with in_place=True"),
        ({"transport": "c10d", "route": "two-level"}, "with route='two-level'"),
        ({"transport": "c10d", "group": 2, "checksum": True}, "with checksum=True"),
    )
    for options, text in refused:
        with cases.case(f"{options}"), pytest.raises(ValueError, match=text):
            rtp_ext.Ring(collective=True, timeout=30.0, **options)
    with cases.case("no bool"), pytest.raises(ValueError, match="expected collective True or False, got 'auto'"):
        rtp_ext.Ring(collective="auto", timeout=30.0)
    with cases.case("other ranks"), pytest.raises(ValueError, match="collective"):
        rtp_ext.Ring(transport="c10d", group=2, collective=rank == 0, timeout=30.0)


@on_ranks(2)
def test_converted_in_one_call(rank, ranks, cases):
    """`fully_rotate(collective=)` reaches the ring that it makes, with a transport that has collectives; explain tells
    before what it does then; what no ring can have is refused, and nothing changes."""
    plain = Block(6, 8).double()
    options = {"group": ranks, "collective": True, "timeout": 60.0}
    before = rtp_ext.explain(plain, **options)
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), **options)
    ring = rtp_ext.ring_of(model)
    with cases.case("ring"):
        assert ring.options.collective and ring.transport == "c10d" and ring.gradient_route == "chain"
    x = torch.arange(12.0, dtype=torch.float64).view(2, 6).add(rank).div(10)
    found = model(x)
    found.square().sum().backward()
    expected = [plain(torch.arange(12.0, dtype=torch.float64).view(2, 6).add(each).div(10)) for each in range(ranks)]
    (sum(each.square().sum() for each in expected) / ranks).backward()
    with cases.case("results"):
        assert_same(found, expected[rank], 1e-9, "outputs")
        for (name, mine), right in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(full(mine.grad), right.grad, 1e-9, name)
    sent_before = sent(ring)
    model(x).square().sum().backward()
    with cases.case("one call an operation"):
        calls = added(ring, sent_before)[::2]
        assert calls == [3, 2], f"the first layer's input has no gradient, so that its weights travel once: {calls}"
    with cases.case("explain"):
        after = rtp_ext.explain(model)
        assert [(row.route, row.gradient_route, row.sent_bytes) for row in before.parameters] == [
            (row.route, row.gradient_route, row.sent_bytes) for row in after.parameters
        ]
        assert "all-gather" in str(before) and before.totals == after.totals
    refused = (
        ({}, "expected group=2, all shards, or route='gather'"),
        ({"group": 2, "transport": "shm"}, "got True over shm"),
        ({"group": 2, "gradient_route": "direct"}, "with gradient_route='direct'"),
        ({"group": 2, "in_place": True}, "expected in_place=False|with in_place=True"),
        ({"route": "two-level"}, "with route='two-level'"),
    )
    for more, text in refused:
        for call in (rtp_ext.fully_rotate, rtp_ext.explain):
            with cases.case(f"{call.__name__} {more}"), pytest.raises(ValueError, match=text):
                call(Block(6, 8), collective=True, **more)
    message = "expected collective False, that of the ring, or none, got True"
    with rtp_ext.Ring(transport="c10d", group=2, timeout=30.0) as other:
        with cases.case("another than the ring's"), pytest.raises(ValueError, match=message):
            rtp_ext.fully_rotate(Block(6, 8), mesh=other, collective=True)
        with cases.case("as the ring's"):
            rtp_ext.fully_rotate(Block(6, 8), mesh=other, group=2)
    ring.close()


@on_ranks(3)
def test_ranks_out_of_step(rank, cases):
    """Of two layers of one size, one rank uses the other: nothing but the names tells them apart."""
    for backward in (False, True):
        with rtp_ext.Ring(**COLLECTIVE, group=3, timeout=20.0) as ring:
            layers = nn.ModuleDict({name: nn.Linear(6, 9) for name in ("first", "second")})
            model = rtp_ext.fully_rotate(Alone(layers), mesh=ring)
            x = torch.ones(2, 6, requires_grad=True)
            for name in layers:
                model(x, [name])[0].sum().backward()
            odd = "second" if rank == 1 else "first"
            with cases.case(f"backward {backward}"), pytest.raises(rtp_ext.RotationError, match="out of step") as error:
                model(x, list(layers) if backward else [odd])[odd == "second" and backward].sum().backward()
            with cases.case(f"backward {backward}, names"):
                assert "first" in str(error.value) and "second" in str(error.value) and not ring.alive


@on_ranks(3)
def test_trace_and_record(rank, ranks, cases):
    with rtp_ext.Ring(**COLLECTIVE, group=3, timeout=60.0) as ring:
        model = rtp_ext.fully_rotate(Model(), mesh=ring)
        for _ in range(2):
            model(ids_of(rank, 0)).sum().backward()
        with ring.trace() as trace:
            model(ids_of(rank, 0)).sum().backward()
        with cases.case("trace"):
            check_trace(trace, ahead=True)
            labels = [(event.lane, event.label) for event in trace.events if event.kind == "step"]
            assert ("weight", "gather W") in labels and ("gradient", "scatter G") in labels
        written = record.read(Path(ring.record()))
        hops = [event for event in written.of("hop") if event.to == record.ALL_RANKS]
        with cases.case("record"):
            assert {event.describe().rpartition(", ")[2] for event in hops} == {"weight gather", "gradient scatter"}
            assert sum(event.bytes for event in hops if event.channel == "gradient") > 0


@on_ranks(3, lost={1})
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_rank(rank, how):
    ring = rtp_ext.Ring(**COLLECTIVE, group=3, timeout=2.0)
    layer = RotatedLinear(64, 64, ring=ring)
    x = torch.ones(4, 64)
    for _ in range(3):
        layer(x).sum().backward()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(
        rtp_ext.RingTimeout, match=r"RotatedLinear (forward|backward), (weight gather|gradient scatter)"
    ):
        while True:
            layer(x).sum().backward()
    assert time.monotonic() - start < 10.0 and not ring.alive
    with pytest.raises(rtp_ext.RotationError, match="cannot be used any more"):
        layer(x)
