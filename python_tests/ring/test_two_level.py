"""Rings of two levels on real data, over pretended hosts: the results are those of one process, fewer bytes leave a
host, and a lost rank is an error on all others."""

import copy
import functools
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import Cases, on_ranks, run_ranks
from models import batch_loss, make_model, mean_loss
from models import train as train_model
from operation_checks import EXACT, Operation, check_controls, check_frozen, check_pass, train
from operations.bundles import make_experts, make_head, make_mlp
from operations.layers import make_embedding, make_linear, make_linears
from pretended_hosts import pretend_hosts
from reference import assert_same, full, random
from test_failures import PROMPT, TIMEOUT, _steps_until_error
from torch import nn

import rtp_ext
from rtp_ext.functional import rotated_linear
from rtp_ext.nn import Flyweight, RotatedLinear
from rtp_ext.trace import gather, predict, summaries

PATIENT = 60.0
TRAINED = ("linear", "mlp", "cross entropy")  # by several steps of AdamW


@functools.cache
def _operations() -> dict[str, Operation]:
    return {
        "linear": make_linear((4, 13)),
        "linear with fewer rows than ranks": make_linear((6, 2)),
        "q, k, v": make_linears({"q": 9, "k": 4, "v": 5}),
        "partial linear": make_linear((11, 5), dim=1),
        "embedding": make_embedding((7, 5)),
        "embedding by columns": make_embedding((7, 5), dim=1),
        "mlp": make_mlp(),
        "mlp without gate": make_mlp(activation="gelu", bias=False),
        "experts": make_experts(),
        "cross entropy": make_head(settings={"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.1}),
        "cross entropy in chunks of tokens": make_head(tokens=300),
    }


def _same_as_one_process(rank, ranks, per_host, transport, steps):
    pretend_hosts(rank, per_host)
    cases, taken = Cases(), "shm+tcp" if transport == "auto" else transport
    with rtp_ext.Ring(transport=transport, timeout=PATIENT) as ring:
        assert (ring.route, ring.transport, ring.hosts, ring.per_host) == (
            "two-level",
            taken,
            ranks // per_host,
            per_host,
        )
        for name, operation in _operations().items():
            with cases.case(name):
                check_pass(operation, ring)
            if name != "cross entropy in chunks of tokens":  # whose mean there is none of
                with cases.case(f"{name}, no tokens on rank 0"):
                    check_pass(operation, ring, "empty on rank 0")
            if steps and name in TRAINED:
                with cases.case(f"{name}, trained"):
                    train(operation, rank, ranks, True, torch.float64, ring=ring)
        if steps:
            check_frozen(cases, make_mlp(activation="gelu", bias=False), ring)
            check_frozen(cases, make_linear((4, 9)), ring)
            check_controls(make_mlp(), ring, (EXACT, EXACT))
        shard = torch.full((3 + rank, 2), float(rank))
        host, place = divmod(rank, per_host)
        for reverse, up in ((False, -1), (True, 1)):
            with cases.case(f"rotate, reverse {reverse}"):
                seen = [(owner, view.clone()) for owner, view in ring.rotate(shard, reverse=reverse)]
                order = [
                    (host + up * phase) % ring.hosts * per_host + (place + up * step) % per_host
                    for phase in range(ring.hosts)
                    for step in range(per_host)
                ]
                assert [owner for owner, _ in seen] == order
                assert all(torch.equal(view, torch.full((3 + owner, 2), float(owner))) for owner, view in seen)
        with cases.case("trace"):
            with ring.trace() as trace:
                x = random(3, 4, dtype=torch.float64, seed=rank).requires_grad_()
                rotated_linear(
                    x, random(5, 4, dtype=torch.float64, seed=rank).requires_grad_(), ring=ring
                ).sum().backward()
            hops = {"weight", "gradient", "outer weight", "outer gradient"}
            assert {event.lane for event in trace.events} == {"compute", *hops}
            traces = gather(ring, trace)
            for number in range(2):
                lanes = {event.lane for event in predict(traces, number)}
                assert lanes == {"compute", *(hops if number else {"weight", "outer weight"})}
            assert all(
                set(each.hops) == {"weight", "gradient"} and each.hops["weight"] > 0 for each in summaries(traces)
            )
        with cases.case("collect"):
            owners = []

            def add(owner, partial):
                owners.append(owner)
                partial.add_(10.0**owner * (rank + 1))

            total = ring.collect(add, shard)
            assert owners[-1] == rank and sorted(owners) == list(range(ranks))
            assert torch.equal(total, torch.full_like(total, 10.0**rank * ranks * (ranks + 1) / 2))
    cases.finish()
    return cases.count


@pytest.mark.parametrize(
    ("hosts", "per_host", "transport", "steps"),
    [(2, 2, "auto", True), (2, 3, "auto", False), (3, 2, "c10d", False)],
)
def test_operations_are_those_of_one_process(hosts, per_host, transport, steps):
    assert run_ranks(_same_as_one_process, hosts * per_host, per_host, transport, steps, timeout=240.0)[0] > 20


class _Convolved(nn.Module):
    """make_model behind a convolution and a module that is rotated as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.convolve = nn.Conv1d(10, 7, 3, padding=1).double()
        self.back = nn.Linear(7, 10).double()
        with torch.no_grad():
            for seed, parameter in enumerate((*self.convolve.parameters(), *self.back.parameters())):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=seed, scale=0.3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner.embed(ids)
        x = x + self.back(self.convolve(x.transpose(-1, -2)).transpose(-1, -2))
        for block in self.inner.blocks:
            x = block(x)
        return self.inner.head(self.inner.norm(x)) * self.inner.temperature


def _model(rank, ranks, per_host, buffers):
    """Prefetch records the order in the first step, and from then on sends the first hop, to the other host, ahead."""
    pretend_hosts(rank, per_host)
    cases, steps = Cases(), 3
    plain = _Convolved()
    expected = train_model(plain, lambda step: mean_loss(plain, ranks, step), steps)
    ring = rtp_ext.Ring(route="two-level", buffers=buffers, timeout=PATIENT)
    model = rtp_ext.fully_rotate(_Convolved(), mesh=ring)
    assert (ring.route, ring.transport) == ("two-level", "shm+tcp")
    losses = train_model(model, lambda step: batch_loss(model, rank, step), steps)
    means = torch.tensor(ring.exchange(losses), dtype=torch.float64).mean(0)
    with cases.case("losses"):
        assert_same(means, torch.tensor(expected, dtype=torch.float64), 1e-9, "losses")
    for name, parameter in plain.named_parameters():
        with cases.case(name):
            assert_same(full(model.get_parameter(name)), parameter, 1e-9, name)
    sent, used = ring.prefetched()
    with cases.case("prefetch"):
        assert used == sent > 0
    with cases.case("flyweight"):
        whole = nn.Linear(6, 9).double()
        with torch.no_grad():
            whole.weight.copy_(random(9, 6, dtype=torch.float64, seed=3))
            whole.bias.copy_(random(9, dtype=torch.float64, seed=4))
        copies = Flyweight(copy.deepcopy(whole), ring, shard_dims={"weight": 0, "bias": 0})
        x = random(4, 6, dtype=torch.float64, seed=5)
        copies(x).square().sum().backward()
        whole(x).square().sum().backward()
        assert_same(copies(x), whole(x), EXACT, "output")
        assert_same(full(copies.module.weight.grad), whole.weight.grad, EXACT, "gradient")
    cases.finish()
    ring.close()


@pytest.mark.parametrize(("hosts", "per_host", "buffers"), [(2, 2, "lean"), (2, 3, "auto")])
def test_a_model_is_that_of_one_process(hosts, per_host, buffers):
    run_ranks(_model, hosts * per_host, per_host, buffers, timeout=240.0)


def _bytes(rank, ranks, per_host):
    pretend_hosts(rank, per_host)
    found = {}
    for route in ("ring", "two-level"):
        with rtp_ext.Ring(route=route, transport="shm+c10d", timeout=PATIENT, prefetch=0) as ring:
            assert ring.route == route
            layer = RotatedLinear(24, 24, ring=ring)
            layer(torch.ones(4, 24, requires_grad=True)).sum().backward()
            found[route] = [(ring.bytes_between_hosts(c), ring.bytes_sent(c)) for c in ("weight", "gradient")]
    with rtp_ext.Ring(transport="c10d", timeout=PATIENT) as ring, pytest.raises(rtp_ext.RotationError, match="c10d"):
        ring.bytes_between_hosts("weight")
    return found


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (2, 3)])
def test_fewer_bytes_leave_a_host(hosts, per_host):
    """Flat, R - 1 shards leave each host in a pass; on two levels each of its G ranks sends K - 1."""
    ranks = hosts * per_host
    ratio = per_host * (hosts - 1) / (ranks - 1)
    assert ratio == pytest.approx({2: 2 / 3, 3: 3 / 5}[per_host])
    told = run_ranks(_bytes, ranks, per_host)
    shard = 4 * 24 * 24 // ranks
    bias = 4 * 24 // ranks
    for host in range(hosts):
        of_host = told[host * per_host : (host + 1) * per_host]
        for channel, passes in ((0, 2), (1, 1)):
            left = {route: sum(found[route][channel][0] for found in of_host) for route in ("ring", "two-level")}
            once = shard * passes + bias  # the bias travels with the weight in forward, with its gradient in backward
            assert left["ring"] == (ranks - 1) * once
            assert left["two-level"] == per_host * (hosts - 1) * once == pytest.approx(ratio * left["ring"])
        for found in of_host:  # each rank sends as much in all
            assert [sent for _, sent in found["ring"]] == [sent for _, sent in found["two-level"]]


def _lose_a_rank(rank, ranks, how, lost):
    pretend_hosts(rank, 2)
    ring = rtp_ext.Ring(route="two-level", timeout=TIMEOUT)
    assert (ring.route, ring.transport) == ("two-level", "shm+tcp")
    layer = RotatedLinear(64, 64, ring=ring)
    x = torch.ones(4, 64, requires_grad=True)
    for _ in range(3):
        layer(x).sum().backward()
    dist.barrier()
    if rank == lost:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    kind, text, seconds = _steps_until_error(layer, x)
    assert kind is rtp_ext.RingTimeout, f"{kind}: {text}"
    assert seconds < PROMPT, f"took {seconds} s"
    assert re.search(r"RotatedLinear (forward|backward), (weight|gradient) hop \d of 3: rank \d of the ring", text), (
        text
    )
    assert not ring.alive
    ring.close()
    return int(re.search(r"rank (\d)", text).group(1))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_rank_is_a_timeout_on_all_survivors(how):
    """Rank 3 is the second place of the second host: messages call it by its rank in the ring."""
    blamed = run_ranks(_lose_a_rank, 4, how, 3, lost={3})[:3]
    # it, or a rank that has failed because of it and notified all others
    assert 3 in blamed and all(peer != rank for rank, peer in enumerate(blamed)), blamed


@on_ranks(4)
def test_what_is_refused_and_what_is_taken_instead(rank, ranks):
    pretend_hosts(rank, 2)
    with rtp_ext.Ring(timeout=PATIENT) as ring:
        x, shard = torch.ones(3, 8), torch.ones(2, 8)
        for call in (
            lambda: rtp_ext.Ring(in_place=True, timeout=PATIENT),
            lambda: rtp_ext.Ring(in_place=True, route="two-level"),
            lambda: rtp_ext.fully_rotate(nn.Linear(8, 8), mesh=ring, in_place=True),
        ):
            with pytest.raises(ValueError, match=r"expected in_place=False on route two-level.*got True"):
                call()
        assert rotated_linear(x, shard, ring=ring).shape == (3, 8), "nobody waits for a hop"
    with rtp_ext.Ring(route="ring", in_place=True, timeout=PATIENT) as ring:
        assert (ring.route, ring.transport) == ("ring", "shm+tcp")
        rotated_linear(x, shard, ring=ring)
    with pytest.raises(ValueError, match="gradient_halves None or False with route two-level, got True"):
        rtp_ext.Ring(route="two-level", gradient_halves=True)
    with rtp_ext.Ring(gradient_halves=True, timeout=PATIENT) as ring:
        assert ring.route == "ring" and ring.transport == "shm+tcp"
    with rtp_ext.Ring(route="gather", timeout=PATIENT) as ring:
        assert (ring.route, ring.hop_route) == ("gather", "two-level")
        assert_same(rotated_linear(x, shard, ring=ring), torch.full((3, 8), 8.0), 0.0, "gathered")

    os.environ["RTP_DEBUG_HOST"] = str([0, 0, 0, 1][rank])
    with rtp_ext.Ring(route="two-level", timeout=PATIENT) as ring:
        assert (ring.route, ring.transport, ring.hosts, ring.per_host) == ("ring", "tcp", 2, None)
        assert "two-level cannot be taken: its hosts have 3, 1 ranks" in ring.transport_reason
        assert len(list(ring.rotate(shard))) == ranks
    with pytest.raises(rtp_ext.RotationError, match=r"shm\+c10d cannot be used .* its hosts have 3, 1 ranks"):
        rtp_ext.Ring(transport="shm+c10d", timeout=PATIENT)
    os.environ["RTP_DEBUG_HOST"] = str(rank % 2)
    with rtp_ext.Ring(timeout=PATIENT) as ring:
        assert (ring.route, ring.transport, ring.hosts, ring.per_host) == ("ring", "tcp", 2, 2)
        assert "not neighbours in the ring: they are on hosts 0, 1, 0, 1" in ring.transport_reason
    with pytest.raises(rtp_ext.RotationError, match=r"shm cannot be used .*: ranks 0, 2 on .*, ranks 1, 3 on "):
        rtp_ext.Ring(transport="shm", timeout=PATIENT)
    os.environ["RTP_DEBUG_HOST"] = str(rank)
    with rtp_ext.Ring(timeout=PATIENT) as ring:
        assert (ring.route, ring.transport, ring.hosts, ring.per_host) == ("ring", "tcp", 4, 1)
        assert "each of its 4 hosts has one rank" in ring.transport_reason
        list(ring.rotate(shard))
        assert ring.bytes_between_hosts("weight") == ring.bytes_sent("weight") > 0
    del os.environ["RTP_DEBUG_HOST"]
    with rtp_ext.Ring(route="two-level", timeout=PATIENT) as ring:
        assert (ring.route, ring.transport, ring.hosts, ring.per_host) == ("direct", "shm", 1, 4)
        assert "route two-level cannot be taken: its ranks are on one host" in ring.transport_reason
        assert ring.bytes_between_hosts("weight") == 0
