"""One agreement for a whole model: the number of exchanges of the ranks, and an error if a rank differs."""

import contextlib
import copy
import pickle

import pytest
import torch
from grids import few
from harness import Cases, on_ranks, run_ranks
from models import batch_loss, make_batch, make_model, mean_loss
from reference import assert_same, chunk, full, local, random
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import rtp_ext
from rtp_ext.functional import Prepared, rotated_linear
from rtp_ext.parameters.sharding import as_sharded
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.routes import route_planner
from rtp_ext.ring.routes.route_planner import Device, LayerSize, Link

EXACT = 1e-10
DOUBLE = torch.float64


@contextlib.contextmanager
def counted():
    """A list that gets an entry for every exchange of any ring."""
    told, stock = [], Communicator.exchange

    def exchange(self, value):
        told.append(value)
        return stock(self, value)

    Communicator.exchange = exchange
    try:
        yield told
    finally:
        Communicator.exchange = stock


class Attends(nn.Module):
    """Projections of different inputs, whose biases are gathered first."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, kdim=5, vdim=4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x[..., :5], x[..., :4], need_weights=False)[0]


def _mixed(layers):
    """Every kind of rotated module, several times; some are recomputed in backward."""
    torch.manual_seed(0)
    encoder = [nn.TransformerEncoderLayer(6, 2, 9, 0.0, batch_first=True) for _ in range(layers)]
    blocks = [nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)) for _ in range(layers)]
    attention = [Attends() for _ in range(layers)]
    convolution = nn.Sequential(nn.Flatten(0, 1), nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 6, 1, groups=3))
    return nn.Sequential(nn.Embedding(11, 6), *encoder, *blocks, *attention, convolution).double()


def _step(model, x):
    model(x).square().sum().backward()


def _counts(rank, ranks):
    cases, ids = Cases(), torch.arange(8).view(2, 4) + rank
    constant = {}
    with counted() as told:

        def during(action):
            del told[:]
            action()
            return len(told)

        for layers in (2, 5):
            plain = _mixed(layers)
            model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=60.0)

            def evaluate(model=model):
                with torch.no_grad():
                    model(ids)

            counts = [during(evaluate), during(evaluate), *(during(lambda m=model: _step(m, ids)) for _ in range(4))]
            with cases.case(f"{layers} layers"):
                # the models; what an evaluation prepared; what a step did
                assert counts == [2, 0, 1, 0, 0, 0], counts
                constant[layers] = counts
                with torch.no_grad():
                    assert_same(model(ids), plain(ids), EXACT, "output")
                twin = copy.deepcopy(model)
                assert during(lambda m=twin: _step(m, ids)) == 2, "a copy agrees for itself"
        for reentrant in (False, True):
            model = rtp_ext.fully_rotate(make_model(checkpointed=reentrant), timeout=60.0)
            plain = make_model(checkpointed=reentrant)
            first = during(lambda m=model: batch_loss(m, rank, 0).backward())
            later = [during(lambda m=model, s=s: batch_loss(m, rank, s).backward()) for s in (1, 2)]
            for step in range(3):
                mean_loss(plain, ranks, step).backward()
            with cases.case(f"checkpoints, reentrant {reentrant}"):
                # reentrantly: two layers of two blocks are prepared again when they are recomputed in a first backward
                assert (first, later) == (6 if reentrant else 2, [0, 0]), (first, later)
                for name, parameter in plain.named_parameters():
                    assert_same(full(model.get_parameter(name).grad), parameter.grad, EXACT, name)
        model = rtp_ext.fully_rotate(make_model(), timeout=60.0)
        batch = make_batch(rank, 0)[0]
        with cases.case("parts and methods"):
            alone = [during(lambda: model.blocks[0](torch.ones(2, 10, dtype=DOUBLE))) for _ in range(2)]
            assert alone == [3, 0], "a part alone: the models, and two layers"
            assert during(lambda: model(batch)) == 1, "the other layers"
            x = torch.ones(2, 10, dtype=DOUBLE)
            rtp_ext.register_forward_method(model.blocks[1], "inner")
            before = during(lambda: model.blocks[1].inner(x))
            assert (before, during(lambda: model.blocks[1].inner(x))) == (0, 0), "prepared by the model"
            model.half().double()
            assert during(lambda: model(batch)) == 0, "the same shapes and dtypes as before"
            model.float()
            assert [during(lambda: model(batch)) for _ in range(2)] == [2, 0], "other dtypes"
            model.requires_grad_(False)
            model.head.requires_grad_(True)
            assert [during(lambda: model(batch)) for _ in range(2)] == [2, 0], "other gradients"
        with cases.case("autocast"):
            autocast = torch.autocast("cpu", torch.bfloat16)
            for expected in ([2, 0], [0, 0]):
                with autocast:
                    counts = [during(lambda: model(batch)) for _ in range(2)]
                assert counts == expected, counts
                assert during(lambda: model(batch)) == 0, "without it again"
        rtp_ext.ring_of(model).close()
    cases.finish()
    return constant


@pytest.mark.parametrize("ranks", few([3], [2, 3]))
def test_a_constant_number_of_exchanges(ranks):
    for constant in run_ranks(_counts, ranks, timeout=400.0):
        assert constant[2] == constant[5]


class Peeks(nn.Module):
    """Differentiates one layer within its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.enable_grad():
            y = self.first(x)
            (slope,) = torch.autograd.grad(y.sum(), self.first.bias, retain_graph=True)
        self.backward_ran = True
        return self.second(y + local(slope).sum())


class Fails(nn.Module):
    failing = True

    def forward(self, x):
        if self.failing:
            raise KeyError("made up")
        return x


def _linears(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), *layers, nn.Linear(5, 4)).double()


@on_ranks([2, 3])
def test_ranks_that_differ_are_told(rank, ranks, cases):
    """A difference on one rank is a ValueError on every rank, before any backward; then training continues."""
    odd = rank == ranks - 1
    with cases.case("gradients of inputs"):
        plain = _linears()
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), bundle=False, timeout=30.0)
        for wanted in (odd, not odd):
            x = random(3, 4, dtype=DOUBLE, seed=rank).requires_grad_(wanted)
            first = wanted != odd  # the setting of rank 0
            pattern = rf"disagree: expected Sequential with inputs that want gradients: {first} \(rank 0\)"
            with pytest.raises(ValueError, match=rf"{pattern}, got .*: {not first} on rank \d"):
                model(x)
            assert all(p.grad is None for p in model.parameters())
        x = random(3, 4, dtype=DOUBLE, seed=rank).requires_grad_()
        y = model(x)
        y.sum().backward()
        assert_same(y, plain(x), EXACT, "output")
    with cases.case("a backward within the forward"):
        model = rtp_ext.fully_rotate(Peeks().double(), bundle=False, timeout=30.0)
        with pytest.raises(ValueError, match="the ranks of the ring disagree: expected Peeks with inputs"):
            model(torch.ones(2, 4, dtype=DOUBLE, requires_grad=odd))
        assert not hasattr(model, "backward_ran")
    with cases.case("an exception"):
        plain = _linears(Fails())
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), bundle=False, timeout=30.0)
        ring = rtp_ext.ring_of(model)
        x = random(3, 4, dtype=DOUBLE, seed=rank)
        with pytest.raises(KeyError), counted() as told:
            model(x)
        assert len(told) == 1 and ring.agreement.open, "nobody waits for a rank that has failed"
        model[1].failing = plain[1].failing = False
        with counted() as told:
            y = model(x)
        assert len(told) == 1 and not ring.agreement.open
        y.sum().backward()
        assert_same(y, plain(x), EXACT, "output")
        try:
            raise OSError("handled already")
        except OSError:
            with torch.no_grad(), counted() as told:
                model(x)
        assert len(told) == 1, "the exception is not the forward's"
    for what, policy in (
        ("param_dtype", MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        ("reduce_dtype", MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
    ):
        model = rtp_ext.fully_rotate(_linears(), bundle=False, timeout=30.0)
        with cases.case(what):
            if odd:
                model[1].mp_policy = policy
            with pytest.raises(ValueError, match=rf"mp_policy of 1: expected .*{what}=None.* got .*{what}=torch.bfl"):
                model(torch.ones(2, 4, dtype=DOUBLE))
        rtp_ext.ring_of(model).close()
    with cases.case("autocast"):
        model = rtp_ext.fully_rotate(_linears().float(), bundle=False, timeout=3.0)
        x = torch.ones(2, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=odd), pytest.raises(ValueError, match=r"torch\.autocast"):
            model(x)
        model(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=odd), pytest.raises(rtp_ext.RotationError):
            model(x)


@on_ranks([2, 3])
def test_functions(rank, ranks, cases):
    """Functional forms: their exchanges without `prepared=`, and with it."""
    # the same shape on the first ranks, another one on the last
    rows = {"short": 7, "long": 8}
    wholes = {name: random(count, 4, dtype=DOUBLE, seed=count) for name, count in rows.items()}
    x = random(2, 4, dtype=DOUBLE, seed=rank)
    with rtp_ext.Ring(timeout=30.0) as ring, counted() as told:

        def exchanges(weight, whole, keep=None, **options):
            del told[:]
            y = rotated_linear(x, weight, ring=ring, prepared=keep, **options)
            assert_same(y, nn.functional.linear(x, whole), EXACT, "output")
            return len(told)

        shards = {name: chunk(whole, ranks, rank).clone() for name, whole in wholes.items()}
        assert shards["short"].shape == shards["long"].shape or rank == ranks - 1, "control"
        with cases.case("plain shards"):
            order = ("short", "long", "short", "long", "long")
            assert [exchanges(shards[name], wholes[name]) for name in order] == [1] * 5
        keeps = {name: Prepared() for name in shards}
        with cases.case("plain shards, prepared"):
            assert [exchanges(shards[name], wholes[name], keeps[name]) for name in order] == [1, 1, 0, 0, 0]
            trained = shards["long"].clone().requires_grad_()
            assert [exchanges(trained, wholes["long"], keeps["long"]) for _ in range(2)] == [1, 0], "wanted gradients"
            assert exchanges(trained, wholes["long"], keeps["long"], reduce_dtype=torch.float32) == 1, "a reduce dtype"
            with torch.no_grad():
                assert exchanges(trained, wholes["long"], keeps["long"]) == 0
        with cases.case("copies"):
            pickled = pickle.loads(pickle.dumps(keeps["long"]))
            for twin in (copy.deepcopy(keeps["long"]), copy.copy(keeps["long"]), pickled):
                assert exchanges(trained, wholes["long"], twin) == 1
        sharded = {name: as_sharded(shard, wholes[name].shape, ring, 0) for name, shard in shards.items()}
        with cases.case("DTensors"):
            assert [exchanges(sharded[name], wholes[name]) for name in order] == [1, 1, 0, 0, 0]
            alike = as_sharded(shards["long"].clone(), wholes["long"].shape, ring, 0)
            assert exchanges(alike, wholes["long"]) == 0, "found by its shape"
        with cases.case("agreed on, and no tensor knows it"):
            known = [*shards.values(), *sharded.values(), *(part._local_tensor for part in sharded.values())]
            assert [part.__dict__.keys() - {"_local_tensor", "_spec"} for part in known] == [set()] * len(known)
        with cases.case("rotate and collect"):
            own, keep = torch.full((rank + 1,), float(rank)), Prepared()
            for prepared, expected in ((None, [1, 1]), (keep, [1, 0])):
                counts = []
                for _ in range(2):
                    del told[:]
                    visits = [(owner, view.tolist()) for owner, view in ring.rotate(own, prepared=prepared)]
                    assert sorted(visits) == [(each, [float(each)] * (each + 1)) for each in range(ranks)]
                    counts.append(len(told))
                assert counts == expected, (prepared, counts)
            del told[:]
            total = ring.collect(lambda owner, partial: partial.add_(1.0), own, prepared=keep)
            assert total.tolist() == [float(ranks)] * (rank + 1) and not told
            del told[:]
            placed = DTensor.from_local(torch.ones(1), ring.mesh, [Shard(0)], run_check=False)
            assert len(list(ring.rotate(placed))) == ranks and not told
        with cases.case("hops are sent ahead with `prepared=` only"):
            for keep, expected in ((None, 0), ([Prepared(), Prepared()], 3 * (ranks - 1))):
                before = ring.prefetched()[1]
                for _ in range(4):
                    ring.begin_forward()
                    for place in range(2):
                        rotated_linear(x, sharded["long"], ring=ring, prepared=keep and keep[place])
                    ring.end_forward()
                assert ring.prefetched()[1] - before == expected


LINK = Link(bytes_per_second=400e9, seconds_per_hop=6e-6, source="assumed")
FORWARDS = 9


def _plans(rank, ranks):
    """A short evaluation, and then training with many tokens on one rank and few on the others."""
    slow = Device(flops=1e9, multiprocessors=0, seconds_per_launch=20e-6, source="assumed")
    route_planner.device_of = lambda device, dtype: slow
    size = LayerSize(24, 24, 8, 8)

    def way(plan):
        return "groups" if plan.group > 1 else plan.route

    def decided(tokens):
        return way(route_planner.decide(ranks, tokens, size, hop_route="direct", link=LINK, device=slow))

    many = next(2**k for k in range(24) if decided(2**k) == "direct")
    few = many // 8
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(3))).double()
    seen = {}
    for asked in ("auto", "gather"):
        ring = rtp_ext.Ring(transport="shm", route=asked, timeout=60.0)
        if asked == "auto":
            ring.gate.link = LINK
        twin = copy.deepcopy(plain)
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring, bundle=False)
        routes, counts = [], []
        for forward in range(1, FORWARDS + 1):
            training = forward > 2
            tokens = few if not training or rank > 0 else 2 * many
            xs = [random(few if not training or r else 2 * many, 24, dtype=DOUBLE, seed=r) for r in range(ranks)]
            assert xs[rank].shape[0] == tokens
            with counted() as told, torch.set_grad_enabled(training):
                hops = ring.hops("weight")
                y = model(xs[rank])
                if training:
                    y.sum().backward()
            counts.append(len(told))
            assert_same(y, twin(xs[rank]), EXACT, f"{asked}, forward {forward}")
            if training:
                (sum(twin(x).sum() for x in xs) / ranks).backward()
            routes.append([way(plan) for plan in ring.gate.plans.values()])
            seen[asked, forward] = ring.hops("weight") - hops
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same(full(ours.grad), theirs.grad, EXACT, "gradient")
        assert list(ring.gate.plans) == ["0", "1", "2"]
        reasons = {plan.reason for plan in ring.gate.plans.values()}
        ring.close()
        seen[asked] = routes, counts, reasons
    return many, seen


@pytest.mark.parametrize("ranks", [2, 3])
def test_plans_follow_the_most_tokens(ranks):
    (many, seen), *others = run_ranks(_plans, ranks)
    assert others == [(many, seen)] * (ranks - 1), "on all ranks in the same forward"
    routes, counts, reasons = seen["auto"]
    assert all(len(set(each)) == 1 for each in routes)
    # nothing is agreed yet; few tokens; in forward 4 the ranks exchange the many tokens of forward 3
    assert [each[0] for each in routes] == ["direct", "groups", "groups", *["direct"] * (FORWARDS - 3)]
    assert counts == [2, 1, 1, 1, 0, 0, 0, 1, 0]
    assert all(f"for {2 * many} tokens" in reason for reason in reasons)
    routes, counts, reasons = seen["gather"]
    assert {route for each in routes for route in each} == {"gather"} and reasons == {"as asked"}
    assert counts == [2, 0, 1, *[0] * (FORWARDS - 3)], "control: where nothing is decided, nobody asks"
