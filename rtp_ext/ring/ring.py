"""The Ring: a set of ranks, their transport and routes, and the two primitives `rotate` and `collect`."""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Placement, Replicate, Shard

from rtp_ext import _native
from rtp_ext.compilers import keep_compilers_out
from rtp_ext.options import ROUTES, TRANSPORTS, RingKeywords, RingOptions, check_choice, describes, takes
from rtp_ext.ring.bootstrap import agree_on, join_ranks, keeps_recomputed, late_passes, make_executor, refused_together
from rtp_ext.ring.cpu_offload import HostMemory, host_memory
from rtp_ext.ring.expert_ring import ExpertRing
from rtp_ext.ring.graphs import choose_graphs, emulated_link
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.links.hosts import Hosts
from rtp_ext.ring.links.transports import (
    Connection,
    ce_refusal,
    connect,
    nccl_refusal,
)
from rtp_ext.ring.mesh import ExpertMesh, RingMesh, RotationDims, resolve_mesh
from rtp_ext.ring.op_runner import OpRunner
from rtp_ext.ring.parameters_in_use import register_mesh
from rtp_ext.ring.prepared import Agreement, Prepared
from rtp_ext.ring.primitives import Primitives
from rtp_ext.ring.registry import name_ring
from rtp_ext.ring.routes.gradient_routes import GradientRoutes, LateGradients
from rtp_ext.ring.routes.plan import RoutePlan, plan_routes
from rtp_ext.ring.routes.route_planner import Link, RoutePlanner
from rtp_ext.ring.routes.weight_routes import choose_ce_modes
from rtp_ext.ring.telemetry import Telemetry
from rtp_ext.words import Budget, EmbeddingWay, GradientTravel, Graphs, PassGradientRoute, PassRoute, Travel

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ROUTES", "TRANSPORTS", "Ring", "ce_refusal", "nccl_refusal"]

logger = logging.getLogger("rtp_ext")

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _of(field: str, method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Returns a method of a ring that calls the method of the same name on one of the ring's fields."""

    @functools.wraps(method)
    def call(ring: Any, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        return getattr(getattr(ring, field), method.__name__)(*arguments, **keywords)

    return call


@describes(RingOptions)
class Ring:
    """Ranks that rotate shards among themselves.

    Args:
        mesh_or_group: a one-dimensional DeviceMesh, one of more dimensions with `dims`, a process group, or None for
            the default process group.
        dims: the dimensions of the mesh that the ring runs over, and those along which rings hold the same shards.
        **options: the fields of `RingOptions` (rtp_ext/options.py).

    Collective: every rank of the group makes the ring at the same point. The ring owns its process groups.

    Attributes:
        rank, size: index of this rank in the ring, and the number of ranks R.
        device: the device of the shards.
        mesh: the one-dimensional DeviceMesh of the ring; None for an emulated ring.
        parameter_mesh: the DeviceMesh of parameters: `mesh`, preceded by the replicas and by the dimension of tensor
            parallelism where there are any.
        replicas: the number of rings that hold the same shards.
        experts: where dims has `expert`, over several ranks, the ranks that experts are divided over, and their ring.
        expert_ranks: where dims has `expert`, the global ranks that experts are divided over, in the order of parts.
        hosts, per_host: the number of hosts, and of ranks on each; None where the numbers differ.
        transport, transport_reason: the transport in use, and why it and no faster one.
        hop_route: `ring`, `direct` or `two-level`, the route of the hops of a rotation.
        gradient_route, gradient_travel, gradients: the route of gradients, their dtype, and the reason.
        gate: decides on the route of each linear layer and keeps it, with the reason, in `gate.plans`; on embeddings
            that send rows in `gate.tables`.
        graphs: whether passes are graphs, the reason, and their number.
    """

    # Beside these, for the modules of rtp_ext: `options`, as given, but for `late_gradients`, which is a number;
    # `in_place`, which `fully_rotate` may switch on; `serial`, the index within the process; `token`, the name in files
    # of its records, equal on all ranks; `tensor_mesh`; `link` of an emulated ring on a GPU; `communicator` (process
    # groups, small collectives, the report of failures); `route_plan`; `agreement` (what the ranks have compared);
    # `telemetry` (counters, traces, records); `common`, the Prepared of functional forms without `prepared=`;
    # `offload_policy` and `host_memory` of models whose shards are on the host.
    link: str | None = None
    mesh: DeviceMesh | None = None
    parameter_mesh: DeviceMesh | None = None
    tensor_mesh: DeviceMesh | None = None
    replicas = 1
    experts: ExpertRing | None = None
    expert_ranks: tuple[int, ...] | None = None
    has_models = False  # whether fully_rotate has converted one
    has_one_scale = False  # whether a layer in 8 bits has one scale of all shards, for which ranks exchange magnitudes
    traceable = True  # whether compiled graphs can contain the ring's operations, which then return their gradients
    offload_policy: OffloadPolicy | None = None
    host_memory: HostMemory | None = None
    pulls_from: tuple[int, ...] | None = None  # of a model for forwards only: the ranks whose shards this one pulls
    serial: int
    name: str  # compiled graphs find the ring by it

    @takes(RingKeywords, RingOptions)
    def __init__(
        self,
        mesh_or_group: DeviceMesh | dist.ProcessGroup | RingMesh | None = None,
        *,
        dims: RotationDims | None = None,
        **given: Unpack[RingKeywords],
    ) -> None:
        keep_compilers_out()
        with refused_together(mesh_or_group, dims, given.get("timeout")):
            options = RingOptions.of(given)
            meshes = resolve_mesh(mesh_or_group, dims)
            kind = meshes.hops.device_type
            if options.checksum and kind != "cpu":
                raise ValueError(f"Ring: expected checksum=False or a ring of CPU ranks, got True on {kind}")
        self.mesh, self.parameter_mesh, self.tensor_mesh = meshes.hops, meshes.parameters, meshes.tensor
        self.replicas = meshes.replicas
        self.traceable = meshes.replicas == 1 and meshes.tensor is None
        register_mesh(meshes.parameters, meshes.replicas, meshes.tensor is not None)
        ring = join_ranks(meshes, options)
        with ring.released_on_error():
            token = agree_on(options, ring)
            connection = connect(ring, options.transport, options.transport_options, collective=options.collective)
            routes = plan_routes(ring, connection.name, options)
            if connection.name in ("ce", "ce+nccl"):
                choose_ce_modes(connection.native, routes.hop_route, options.transport_options.ce_mode)
            self._compose(ring, options, connection, routes, token)
            if self.gate.compare_devices(ring.exchange):
                self.measure_link()
            if meshes.experts is not None:
                self.expert_ranks = tuple(meshes.experts.ranks.mesh.tolist())
                if len(self.expert_ranks) > 1:
                    self._divide_experts(meshes.experts, options)
            logger.info(
                "ring of %d: transport %s (%s), route %s, gradients %s (%s)",
                *(self.size, self.transport, self.transport_reason, self.route),
                *(self.gradient_travel or self.gradient_route, self.gradients.reason),
            )

    def _divide_experts(self, mesh: ExpertMesh, options: RingOptions) -> None:
        """Makes the ring over which this rank's experts rotate. Collective."""
        if options.in_place:
            raise ValueError(
                "Ring: in_place=True cannot be combined with dims that have expert: expected in_place=False"
            )
        given = {each.name: getattr(options, each.name) for each in dataclasses.fields(options)}
        group = None if options.group is None else min(options.group, mesh.hops.size())
        inner = Ring(RingMesh(mesh.hops, mesh.hops), **given | {"group": group})
        self.experts = ExpertRing(self, mesh, inner)

    @classmethod
    def emulated(
        cls,
        size: int,
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        link: str | None = None,
        route: PassRoute = "ring",
        travel: Travel | None = None,
        hosts: int = 1,
        prefetch: bool = True,
        gradient_halves: bool | None = None,
        gradient_route: PassGradientRoute = "chain",
        gradient_travel: GradientTravel | None = None,
        buffers: Budget | int = "auto",
        embedding: EmbeddingWay = "rotate",
        graphs: Graphs = "off",
        in_place: bool = False,
        group: int | None = None,
    ) -> Ring:
        """Returns a ring of `size` in one process: every neighbour is this rank itself, and hops are real copies.

        A layer on it computes the result of the plain layer with this rank's shard repeated `size` times. For
        microbenchmarks of the timeline of one rank, and for memory per rank. `hosts`: the number of hosts on route
        two-level. With `embedding="rows"` nothing travels, since no rank has other ids.

        `link`, for a GPU: `sm-local` (a plain copy within the GPU, which runs on SMs; the default), `ce-local` or
        `ce-local:N` (copies that ask for copy engines, on N = 1, 2 or 4 streams; an H100 takes SMs all the same),
        `nccl-self` or `nccl-self:CTAS` (NCCL from the rank to itself, on at most that many thread blocks), `pcie`
        (through pinned host memory). With graphs `ce-local` is called `sm-local`. For a CPU: `wire:BYTES_PER_SECOND` or
        `wire:BYTES_PER_SECOND:SECONDS_PER_MESSAGE`, whose hops arrive when a wire of that rate, one for each of weights
        and gradients, has carried them. An unknown link raises ValueError; one that does not work on this machine
        raises RotationError.
        """
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"Ring.emulated: expected size >= 1 and 0 <= rank < size, got size {size}, rank {rank}")
        options = RingOptions.of({**locals(), "late_gradients": 0})
        check_choice("route", route, get_args(PassRoute))
        check_choice("gradient_route", gradient_route, get_args(PassGradientRoute))
        keep_compilers_out()
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        ring = Communicator(rank, size, device, options.timeout)
        ring.placed = Hosts.even(size, hosts, route)
        gradients = GradientRoutes(gradient_route, gradient_travel, "it was asked for")
        routes = RoutePlan.of(options, "ring" if route == "gather" else route, gradients)
        with ring.released_on_error():
            native = _native.emulated_transport(device, link)
            connection = Connection("emulated", native, "one process stands for the ring")
            made = cls.composed(ring, options, connection, routes, secrets.token_hex(4))
        if device.type == "cuda":
            made.link = emulated_link(link, made.graphs)
        return made

    @classmethod
    def composed(cls, *parts: Any, mesh: DeviceMesh | None = None, **types: Any) -> Ring:
        """Returns a ring of such parts and types as those of `_compose`."""
        made = cls.__new__(cls)
        made.mesh = made.parameter_mesh = mesh
        made._compose(*parts, **types)
        return made

    def _compose(
        self,
        ring: Communicator,
        options: RingOptions,
        connection: Connection,
        routes: RoutePlan,
        token: str,
        agreement: type[Agreement] = Agreement,
        runner: type[OpRunner] = OpRunner,
    ) -> None:
        """Creates the executor and the fields that use it."""
        late = late_passes(options, ring.device, connection.name, self.tensor_mesh is not None)
        ring.executor = executor = make_executor(ring, options, connection, late)
        self.options, self.token = dataclasses.replace(options, late_gradients=late), token
        self.rank, self.size, self.device, self.timeout = ring.rank, ring.size, ring.device, options.timeout
        self.slot_cap, self.in_place = options.slot_cap, options.in_place
        if routes.group > self.size:
            raise ValueError(f"Ring: expected group from 1 to {self.size}, the ranks of the ring, got {routes.group}")
        if options.in_place:
            routes.expect_in_place("Ring")  # ranks on several hosts may have the route two-level
        self.transport, self.transport_reason = connection.name, connection.reason + routes.missed
        self.communicator, self.placed, self.hosts, self.per_host = ring, ring.placed, ring.hosts, ring.per_host
        self.alone, self.failure_report = ring.alone, ring.failure_report
        self.route_plan, self.route, self.hop_route = routes, routes.route, routes.hop_route
        self.gradients = routes.gradients
        self.gradient_route, self.gradient_travel = routes.gradients.route, routes.gradients.travel
        gathers = options.travel is None
        self.gate = RoutePlanner(
            *(ring.size, ring.device, routes.hop_route, options.route, options.gradient_halves),
            gathers=gathers,
            group=options.group,
            buffers=options.buffers,
            wiring=ring.wiring,
            embedding=options.embedding,
        )
        self.graphs = choose_graphs(
            executor, options, ring, connection.name, late_gradients=late, tensor_parallel=self.tensor_mesh is not None
        )
        self.prefetch = options.prefetch and not self.graphs.on
        executor.prefetch(self.prefetch, options.look_ahead, keeps_recomputed(options, ring, connection.name))
        self.gate.gradients, self.gate.ahead = routes.gradients, self.prefetch and options.look_ahead != 0
        self.common = Prepared()
        self.agreement = agreement(ring)
        self.telemetry = Telemetry(ring, connection, token)
        self._op_runner = runner(ring, self.agreement, self.graphs)
        self._late = LateGradients(ring, late)
        name_ring(self)
        self._primitives = Primitives(ring, self._op_runner, routes.hop_route, self.serial)
        # Bound here, so that a call of an operation adds no frame of this class.
        self.check_alive, self.run = self._op_runner.check_alive, self._op_runner.run

    # -- using and ending --------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the ring can still be used."""
        return self.communicator.alive

    def close(self) -> None:
        """Shuts the ring down. Idempotent; collective. Does nothing in a process that was forked from the ring's.

        The destructor of a ring that was not closed releases memory, threads and connections too, but waits for no
        other rank: ranks that still use the ring fail.
        """
        try:
            if self.experts is not None:
                self.experts.inner.close()
            self.graphs.close()
            self.communicator.executor.close()
        finally:
            if not self.communicator.executor.alive:  # it may have refused to close
                self.drop_groups()

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, _memo: dict) -> Ring:
        return self  # a copy of a model rotates over the same ring

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError(
            "a Ring cannot be pickled: it holds live connections. Save model.state_dict() or use "
            "torch.distributed.checkpoint, and convert a new model with fully_rotate"
        )

    def __repr__(self) -> str:
        return f"Ring(rank={self.rank}, size={self.size}, transport={self.transport!r}, route={self.route!r})"

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The ring, and that of its divided experts."""
        return (self,) if self.experts is None else (self, self.experts.inner)

    # -- routes ------------------------------------------------------------------------------------------------------

    late_after = _of("_late", LateGradients.late_after)
    land = _of("_late", LateGradients.land)

    # -- the two primitives ------------------------------------------------------------------------------------------

    rotate = _of("_primitives", Primitives.rotate)
    collect = _of("_primitives", Primitives.collect)
    shapes = _of("_primitives", Primitives.shapes)
    seconds_per_hop = _of("_primitives", Primitives.seconds_per_hop)

    def measure_link(self, shard_bytes: int = 16 << 20, repeats: int = 5) -> Link:
        """Times hops of this ring for the route planner, which uses the result for layers that run later. Collective.

        The rate comes from shards of `shard_bytes`, the latency from shards of a few bytes; the slowest rank counts.
        """
        self.gate.link = self._primitives.measure_link(shard_bytes, repeats)
        return self.gate.link

    # -- ranks -------------------------------------------------------------------------------------------------------

    @property
    def companions(self) -> tuple[Communicator, ...]:
        """Communicators over other ranks that close with the ring."""
        return self.communicator.companions

    def exchange(self, value: Any) -> list[Any]:
        """Returns every rank's `value` (any picklable object), in ring order. Collective."""
        self.check_alive("exchange")
        return self.communicator.exchange(value)

    def all_gather(self, shard: torch.Tensor, name: str = "values", buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Gathers shards [n] of equal size to [R, n], for tensors that do not rotate. Collective. Raises RotationError
        on every rank of a ring over CPUs where the `name` of the values, their size or dtype differ. buffer: memory for
        the result, at least R x n numbers of the same dtype."""
        self.check_alive("all_gather")
        return self.communicator.all_gather(shard, name, buffer)

    def all_reduce(self, values: torch.Tensor, name: str = "values") -> torch.Tensor:
        """Sums `values` [...] over the ranks, in place. Collective. For `name` see `all_gather`."""
        self.check_alive("all_reduce")
        return self.communicator.all_reduce(values, name)

    def reduce_scatter(
        self, rows: torch.Tensor, name: str = "values", buffer: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns this rank's row [n] of the sum of `rows` [R, n] over the ranks. Collective. For `name` and `buffer`
        see `all_gather`."""
        self.check_alive("reduce_scatter")
        return self.communicator.reduce_scatter(rows, name, buffer)

    new_group = _of("communicator", Communicator.new_group)
    drop_groups = _of("communicator", Communicator.drop_groups)
    abandon = _of("communicator", Communicator.abandon)
    end = _of("communicator", Communicator.end)

    # -- agreement of the ranks --------------------------------------------------------------------------------------

    new_agreement = _of("agreement", Agreement.new_agreement)

    def begin_forward(self) -> None:
        """See Agreement.begin_forward."""
        for ring in self.rings:
            ring.agreement.begin_forward()

    def end_forward(self) -> None:
        """See Agreement.end_forward."""
        for ring in self.rings:
            ring.agreement.end_forward()

    postpone = _of("agreement", Agreement.postpone)
    compare_later = _of("agreement", Agreement.compare_later)
    settle = _of("agreement", Agreement.settle)
    settle_in_backward = _of("agreement", Agreement.settle_in_backward)
    pass_by = _of("agreement", Agreement.pass_by)

    # -- counters and recordings -------------------------------------------------------------------------------------

    slot_count = _of("telemetry", Telemetry.slot_count)
    reset_peak = _of("telemetry", Telemetry.reset_peak)
    clear_slots = _of("telemetry", Telemetry.clear_slots)
    hops = _of("telemetry", Telemetry.hops)
    landed_late = _of("telemetry", Telemetry.landed_late)
    prefetched = _of("telemetry", Telemetry.prefetched)
    bytes_sent = _of("telemetry", Telemetry.bytes_sent)
    bytes_between_hosts = _of("telemetry", Telemetry.bytes_between_hosts)
    record = _of("telemetry", Telemetry.record)
    trace = _of("telemetry", Telemetry.trace)

    # -- parameters --------------------------------------------------------------------------------------------------

    def placements(self, dim: int | None, tensor: Placement | None = None) -> list[Placement]:
        """Returns the placements on `parameter_mesh` of a parameter that the ring shards along `dim`; None: that it
        replicates. `tensor`: the placement over `tensor_mesh`."""
        assert self.parameter_mesh is not None, "an emulated ring has no mesh"
        over_ring: Placement = Replicate() if dim is None else Shard(dim)
        placements: list[Placement] = [Replicate() for _ in range(self.parameter_mesh.ndim - 1)] + [over_ring]
        if tensor is not None:
            placements[-2] = tensor
        return placements

    def offload(self, policy: OffloadPolicy) -> None:
        """Sets whether local shards stay on the host, for all models of the ring."""
        if isinstance(policy, CPUOffloadPolicy):
            self.graphs.refuse("offload_policy=CPUOffloadPolicy")
            self.host_memory = host_memory(policy, self.device)
        self.offload_policy = policy
        if self.host_memory is not None:  # a shard has no memory on the device until its layer runs
            self.prefetch, self.gate.ahead, self.traceable = False, False, False
            self.communicator.executor.prefetch(False)
