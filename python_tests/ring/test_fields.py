"""The fields of a ring, each without the others: hosts of ranks, options, groups, agreement, routes."""

import dataclasses
import inspect
from datetime import timedelta

import pytest
import torch

import rtp_ext
from rtp_ext import RotationError, _native
from rtp_ext.functional import rotated_linear, rotated_mlp
from rtp_ext.options import RingOptions, TransportOptions
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.links.hosts import Hosts, find_hosts, levels_refusal
from rtp_ext.ring.links.places import Place
from rtp_ext.ring.links.transports import Connection
from rtp_ext.ring.op_runner import OpRunner
from rtp_ext.ring.prepared import Agreement, Prepared
from rtp_ext.ring.routes.gradient_routes import GradientRoutes
from rtp_ext.ring.routes.plan import RoutePlan
from rtp_ext.ring.telemetry import Telemetry

PLACES = {
    "aabb": (2, 2, None),
    "aaabbbccc": (3, 3, None),
    "aaaa": (1, 4, "on one host"),
    "abc": (3, 1, "each of its 3 hosts has one rank"),
    "aab": (2, None, "2, 1 ranks, not equally many"),
    "abab": (2, 2, "not neighbours in the ring: they are on hosts 0, 1, 0, 1"),
    "abba": (2, 2, "not neighbours in the ring: they are on hosts 0, 1, 1, 0"),
    "baab": (2, 2, "not neighbours in the ring"),
    "a": (1, 1, "on one host"),
}


@pytest.mark.parametrize("places", PLACES)
def test_hosts_of_ranks(places):
    count, per_host, unlevel = PLACES[places]
    hosts = Hosts.among(list(places))
    assert (hosts.count, hosts.per_host) == (count, per_host)
    assert hosts.unlevel is unlevel or unlevel in hosts.unlevel
    assert (levels_refusal(hosts, torch.device("cpu"), "tcp", None) is None) == (unlevel is None)


def test_what_else_keeps_a_ring_flat():
    hosts = Hosts.even(6, 2, "two-level")
    assert (hosts.of, hosts.unlevel) == ((0, 0, 0, 1, 1, 1), None)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert levels_refusal(hosts, cpu, "shm+tcp", False) is levels_refusal(hosts, cuda, "ce+nccl", None) is None
    assert "gradient_halves" in levels_refusal(hosts, cpu, "shm+tcp", True)
    assert "on transport nccl, which has one stream for both" in levels_refusal(hosts, cuda, "nccl", None)
    with pytest.raises(ValueError, match="hosts of equally many of 6 ranks, got 4 hosts"):
        Hosts.even(6, 4, "ring")


class Alone:
    rank = 1

    def exchange(self, value):
        return [Place("another", "kernel", "processes"), value, value]


def test_containers_and_pretended_hosts_are_hosts(monkeypatch):
    """One kernel and one namespace of processes define a host; a rank that cannot read them is a host of its own."""
    told = []
    monkeypatch.setattr(Alone, "exchange", lambda self, value: told.append(value) or [value])
    for host, processes, pretended in (("a", "1", ""), ("b", "1", ""), ("a", "2", ""), ("a", "1", "x")):
        monkeypatch.setattr(_native, "host_id", lambda host=host: host)
        monkeypatch.setattr(_native, "processes_id", lambda processes=processes: processes)
        monkeypatch.setenv("RTP_DEBUG_HOST", pretended)
        assert find_hosts(Alone()).count == 1

    def fail():
        raise RotationError("too many open files")

    monkeypatch.setattr(_native, "host_id", fail)
    find_hosts(Alone())
    assert len({place.memory for place in told}) == 5
    assert told[-1].kernel == "rank 1 cannot tell: too many open files"


def test_this_process_knows_where_it_is():
    assert _native.processes_id().startswith("pid:[")
    found = find_hosts(Alone())
    assert found.of == (0, 1, 1)
    assert found.spread.startswith("rank 0 on another, ranks 1, 2 on ")


def test_an_emulated_ring_of_hosts():
    """Every shard is this rank's own; slots are those of the schedule."""
    with rtp_ext.Ring.emulated(9, route="two-level", hosts=3) as ring:
        assert (ring.hosts, ring.per_host, ring.hop_route) == (3, 3, "two-level")
        x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
        y = rotated_linear(x, weight, ring=ring)
        assert torch.allclose(y, (x @ weight.t()).repeat(1, 9), atol=1e-6)
        y.sum().backward()
        assert torch.allclose(weight.grad, x.detach().sum(0).expand(5, 6), atol=1e-6)
        assert [ring.hops(channel) for channel in ("weight", "gradient")] == [16, 8]
        assert [ring.slot_count(channel).peak_slots for channel in ("weight", "gradient")] == [3, 4]
        with pytest.raises(ValueError, match="Ring: expected in_place=False on route two-level"):
            rtp_ext.Ring.emulated(9, route="two-level", hosts=3, in_place=True)
        up, down = torch.randn(3, 6), torch.randn(6, 3)
        assert rotated_mlp(x, up, down, activation="relu", ring=ring).shape == x.shape
    with pytest.raises(ValueError, match="hosts of equally many of 9 ranks, got 2 hosts"):
        rtp_ext.Ring.emulated(9, route="two-level", hosts=2)
    for hosts, why in ((1, "its ranks are on one host"), (9, "each of its 9 hosts has one rank")):
        with pytest.raises(ValueError, match=f"route two-level cannot be taken: {why}"):
            rtp_ext.Ring.emulated(9, route="two-level", hosts=hosts)


CPU = torch.device("cpu")


def _alone(size=3):
    """A communicator without process groups: this process stands for all ranks."""
    made = Communicator(1, size, CPU, timedelta(seconds=1))
    made.placed = Hosts.even(size, 1, "ring")
    return made


def test_options_are_the_keywords_of_a_ring():
    keywords = dict(inspect.signature(rtp_ext.Ring).parameters)
    del keywords["mesh_or_group"], keywords["dims"]
    options = RingOptions.of({name: each.default for name, each in keywords.items()})
    assert [each.name for each in dataclasses.fields(options)] == [*keywords]
    assert options == RingOptions(), "the same defaults"
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.prefetch = 0
    with rtp_ext.Ring.emulated(2, travel="int8", prefetch=0) as ring:
        assert ring.options == RingOptions(
            route="ring", travel="int8", prefetch=0, late_gradients=0, gradient_route="chain", embedding="rotate"
        )


def test_ranks_compare_every_option(monkeypatch):
    monkeypatch.delenv("RTP_DEBUG_DELAY_US", raising=False)
    other = {
        "transport": "tcp",
        "route": "direct",
        "travel": "int8",
        "timeout": timedelta(seconds=1),
        "slot_cap": 1,
        "prefetch": 0,
        "keep_recomputed": True,
        "gradient_halves": False,
        "late_gradients": 1,
        "gradient_route": "direct",
        "gradient_travel": "int8",
        "buffers": "lean",
        "embedding": "rows",
        "graphs": "auto",
        "in_place": True,
        "group": 2,
        "collective": True,
        "checksum": True,
        "transport_options": TransportOptions.of({"blocking": True}),
    }
    assert other.keys() == {each.name for each in dataclasses.fields(RingOptions)}
    texts = {str(RingOptions(**{name: value})) for name, value in other.items()}
    assert len(texts | {str(RingOptions())}) == len(other) + 1
    assert str(RingOptions()).startswith("transport auto, route auto, travel None, timeout ")


def test_a_communicator_of_one_process():
    ring = _alone()
    assert ring.alone and (ring.hosts, ring.per_host) == (1, 3) and not ring.orphaned
    assert ring.exchange("a") == ["a"] * 3
    assert ring.all_gather(torch.arange(2.0)).tolist() == [[0.0, 1.0]] * 3
    assert ring.all_reduce(torch.ones(2)).tolist() == [3.0, 3.0]
    ring.executor = _native.Executor(_native.emulated_transport(CPU), 1, 3, CPU)
    with pytest.raises(OSError, match="no memory"), ring.released_on_error():
        raise OSError("no memory")
    with pytest.raises(RotationError, match="exchange: the ring cannot be used any more: it was closed"):
        ring.exchange("a")


def test_an_agreement_without_a_ring():
    others = _alone(2)
    agreement, prepared = Agreement(others), Prepared()
    assert [agreement.new_agreement(), agreement.new_agreement()] == [1, 2]
    assert not agreement.postpone(prepared, "key", "text"), "no model has agreed"
    prepared.covered = True
    agreement.begin_forward()
    assert agreement.forward_phase > 0 and agreement.postpone(prepared, "key", "text")
    agreement.end_forward()
    assert agreement.forward_phase == 0 and len(agreement.open) == 1
    agreement.settle()
    assert agreement.open == []
    prepared.found["key"], prepared.last = "what was made", ("key", "what was made")
    others.exchange = lambda value: [value, ["other text"] if isinstance(value, list) else b"another digest"]
    agreement.compare_later(prepared, "key", "text")
    with pytest.raises(ValueError, match=r"disagree: expected text \(rank 0\), got other text on rank 1"):
        agreement.settle()
    assert prepared.found == {} and prepared.last == (None, None) and agreement.open == []


def test_the_rotation_of_an_operation_follows_from_the_routes():
    plan = RoutePlan("direct", "direct", None, GradientRoutes("direct", "int8", "it was asked for"))
    form = {"slot_cap": 0, "in_place": False, "compute_dtype": torch.float64, "reduce_dtype": torch.bfloat16}
    assert plan.rotation("up", route="direct", halves=True, **form).local_dtype == torch.float32
    assert plan.rotation("up", route="gather", halves=False, **form).local_dtype == torch.float32
    with pytest.raises(ValueError, match="expected a route of ring, direct, gather or two-level, got there"):
        plan.rotation("up", route="there", halves=False, **form)
    plan.expect_in_place("up")
    with pytest.raises(ValueError, match="fully_rotate: expected in_place=False on a ring of group=2"):
        rtp_ext.fully_rotate(torch.nn.Linear(6, 6), mesh=rtp_ext.Ring.emulated(3, group=2), in_place=True)
    with pytest.raises(ValueError, match="up: expected in_place=False on a ring of travel='int8'"):
        dataclasses.replace(plan, travel="int8").expect_in_place("up")


def test_native_options_take_known_keywords_alone():
    form = {"name": "up", "route": "ring", "in_place": False, "slot_cap": 0, "halves": False}
    dtypes = {"compute_dtype": torch.float32, "reduce_dtype": torch.float32}
    _native.RotationOptions(**form, **dtypes, travel=None)
    for given, text in (
        (form | dtypes | {"routes": "ring"}, "RotationOptions: unexpected keyword routes"),
        (form, "RotationOptions: expected the keyword compute_dtype"),
        (form | dtypes | {"slot_cap": "large"}, "RotationOptions: unexpected type of slot_cap"),
    ):
        with pytest.raises(TypeError, match=text):
            _native.RotationOptions(**given)
    with pytest.raises(ValueError, match="expected travel bfloat16, int8 or None, got float8"):
        _native.RotationOptions(**form, **dtypes, travel="float8")


def test_dispatch_and_telemetry_without_a_ring():
    ring = _alone()
    native = _native.emulated_transport(CPU)
    ring.executor = _native.Executor(native, 1, 3, CPU)
    graphs = type("NoGraphs", (), {"on": False})()
    dispatcher = OpRunner(ring, Agreement(ring), graphs)
    telemetry = Telemetry(ring, Connection("emulated", native, "a test"), "token")
    shard = torch.arange(4.0)
    with telemetry.trace() as trace:
        pass_ = dispatcher.run("rotate", _native.Execution.rotate, [shard], [[[4]] * 3], "ring", False)
        owners = []
        while (step := pass_.next()) is not None:
            owners.append(step.owner)
        pass_.finish()
    assert owners == [1, 0, 2]
    assert telemetry.hops("weight") == 2 and telemetry.bytes_sent("weight") == 2 * shard.nbytes
    assert telemetry.bytes_between_hosts("weight") == 0 and telemetry.slot_count("weight").slots > 0
    assert len(trace.passes) == 1 and trace.rank == 1
    ring.executor.close()
    with pytest.raises(RotationError, match="rotate: the ring cannot be used any more: it was closed"):
        dispatcher.run("rotate", _native.Execution.rotate, [shard], [[[4]] * 3], "ring", False)
