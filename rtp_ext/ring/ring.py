"""The ring: which ranks, over which transport, and the two primitives `rotate` and `collect`."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Placement, Replicate, Shard

from rtp_ext import _native
from rtp_ext._native import SLOT_CAP
from rtp_ext.ring.autograd import refuse_transforms, unseen
from rtp_ext.ring.counters import Counters
from rtp_ext.ring.graphs import CAPTURED, check_graphs, refuse_graphs
from rtp_ext.ring.links.failure_report import FailureReport
from rtp_ext.ring.links.hosts import Hosts
from rtp_ext.ring.links.options import TransportOptions
from rtp_ext.ring.links.transports import ce_refusal, nccl_put_refusal, nccl_refusal, order_launches
from rtp_ext.ring.mesh import RingMesh, RotationDims, resolve_mesh
from rtp_ext.ring.offload import HostMemory, host_memory
from rtp_ext.ring.patches.dtensor import follow
from rtp_ext.ring.prepared import Agreements
from rtp_ext.ring.primitives import Primitives
from rtp_ext.ring.recording import Recorded
from rtp_ext.ring.registry import name_ring
from rtp_ext.ring.routes.gradient_routes import ComingHome, GradientRoutes, check_requested
from rtp_ext.ring.start import Start, check_choice

__all__ = ["Ring", "ce_refusal", "nccl_put_refusal", "nccl_refusal"]


TRANSPORTS = ("auto", "shm", "shm+tcp", "shm+c10d", "tcp", "c10d", "ce", "nccl", "nccl-put")
ROUTES = ("auto", "ring", "direct", "gather", "two-level")


class Ring(Start, Primitives, Counters, ComingHome, Agreements, Recorded):
    """Ranks that rotate shards among themselves.

    Args:
        mesh_or_group: a one-dimensional DeviceMesh, one of more dimensions with `dims`, a process group, or None for
            the default process group.
        dims: which dimensions of the mesh the ring runs over, and along which rings hold the same shards.
        transport: `shm` (CPU ranks of one host), `shm+tcp` and `shm+c10d` (the same inside hosts, the other between
            them), `tcp` (CPU ranks of any hosts), `c10d` (any torch.distributed backend), `ce` (copy engines, without
            SMs: GPUs of one host that all have direct access to each other, NCCL 2.29.2 or newer), `nccl` (direct
            NCCL), `nccl-put` (NCCL's puts and signals; what waits for a dead rank there stays stuck until the process
            ends), or `auto`: `ce`, else `nccl` on GPUs, `shm`, `shm+tcp` or `tcp` on CPUs, else `c10d`. What was
            chosen, and why others were not, is logged and kept in `transport` and `transport_reason`.
        route: `ring` (every hop goes to the neighbour), `direct` (a shard comes straight from its owner), `gather`
            (linear layers gather the whole weight first; everything else goes as `auto` chooses), `two-level` (shards
            turn inside each host while every rank hands one on to the next host; where ranks are not spread so, what
            `auto` takes, and `transport_reason` says why), or `auto`: two-level where it can be, and the gate decides
            for every linear layer.
        gradient_route: `chain` (a partial sum of each gradient travels from rank to rank), `direct` (each contribution
            goes straight to its owner, who adds them up in float32; not on route two-level), or `auto`: direct where
            gradients travel in fewer than 32 bits and any rank reaches any other at the cost of a neighbour.
        gradient_travel: `int8`: contributions travel in 8 bits, with a scale for each 128 numbers; on gradient route
            direct only. None: in the reduce dtype.
        timeout: seconds (or a timedelta) after which a neighbour that does not answer is an error, RingTimeout.
        prefetch: send the first shard of the next layer while the last GEMM of this one runs; the order is learned from
            the forward or backward before. 0 turns it off.
        gradient_halves: gradients of linear layers travel in two halves; None: where a gradient hop outlasts a dgrad.
            Not on route two-level.
        late_gradients: how many layers' gradients may still be arriving while a backward goes on to the layers before;
            each takes two gradient slots more. None: 1 where hops cross a network (a CPU ring over `tcp` or `c10d`),
            else 0. On route two-level they land within the pass.
        travel: what weights travel in: None (as they are computed with), `bfloat16`, or `int8` (rounded to the nearest
            of 255 values in blocks of 128 of a shard's part, each with a float32 scale: 1.03 bytes a number). Rounded
            once, at home; whoever computes widens them, their owner too, so that every rank computes with the same
            weights. Backward computes with these too. The local shard, and what the optimizer sees, stay exact; so do
            biases, everything on a single rank, and `rotate` and `collect`. Not on route gather, and not in place.
        slot_cap: bytes; linear, embedding and vocabulary-head shards that are larger travel in pieces, one pass after
            the other, so that a vocabulary does not make every slot as large as itself. 0: no cap.
        graphs: passes of linear layers and MLPs as CUDA graphs, which take the host a few calls each: `auto` (where the
            transport takes them: `ce`, and emulated rings), `on` (elsewhere a ValueError), or `off`, the default as
            long as none has run on a GPU. A pass is captured once for its shapes, after it has run, and replayed where
            its tensors lie where they lay then; it is enqueued hop by hop where not. Nothing is sent ahead then:
            `prefetch` is 0. See `graphs`.
        checksum: every hop carries a CRC-32C, and one that arrives changed is a RotationError that names it. For CPUs.
        transport_options: for GPUs. `min_ctas`, `max_ctas`: thread blocks, each on an SM of its own, that NCCL may use
            (default 0: NCCL chooses). `blocking`: NCCL's calls return when they are done, without a thread for each
            (default False: docs/gpu.md). `registered`: `nccl` moves slots that are registered with NCCL, without copies
            of its own (default None: where that works). `delay_us`: for race tests, every hop is held up by a random
            time up to this; the environment's RTP_DEBUG_DELAY_US is the default. `ce_mode`: whether the sender copies
            (`push`) or the receiver (`pull`); default `auto`: pull for weights on route `direct`, else push.

    Collective: every rank of the group makes the ring at the same point. The ring owns its process groups.

    Attributes:
        rank, size: this rank's place, and the number of ranks R.
        travel: as given.
        serial: the how manieth ring of this process this is.
        token: its name in the files of its recorder, the same on all its ranks.
        device: where shards live.
        mesh: the one-dimensional DeviceMesh of the ring; None for an emulated ring.
        parameter_mesh: the DeviceMesh of parameters: `mesh`, or with the replicas, and then the dimension of tensor
            parallelism, before it.
        tensor_mesh: the DeviceMesh of tensor parallelism, as it was applied to the model; None where there is none.
        replicas: how many rings hold the same shards.
        link: what stands in for the wire in an emulated ring on a GPU; None for any other.
        hosts, per_host: on how many hosts its ranks are, and how many on each; None where not equally many.
        hop_route: `ring`, `direct` or `two-level`, what the hops of a rotation take.
        gradient_route, gradient_travel, gradients: what gradients take, in what, and why: see GradientRoutes.
        graphs: whether passes are graphs, why, and how many: see PassGraphs.
        gate: decides how each linear layer travels, and remembers it: `gate.plans`.
        common: what functional forms without `prepared=` keep of operations on DTensors.
        offload_policy: what the models on the ring were converted with; None: none was yet.
        host_memory: where their local shards stay, if that is not the memory of the device.
    """

    link: str | None = None
    offload_policy: OffloadPolicy | None = None
    host_memory: HostMemory | None = None

    def __init__(
        self,
        mesh_or_group: DeviceMesh | dist.ProcessGroup | RingMesh | None = None,
        *,
        dims: RotationDims | None = None,
        transport: str = "auto",
        route: str = "auto",
        travel: str | None = None,
        timeout: float | datetime.timedelta = 600.0,
        slot_cap: int = SLOT_CAP,
        prefetch: int = 1,
        gradient_halves: bool | None = None,
        late_gradients: int | None = None,
        gradient_route: str = "auto",
        gradient_travel: str | None = None,
        graphs: str = "off",
        checksum: bool = False,
        transport_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_choice("transport", transport, TRANSPORTS)
        check_choice("route", route, ROUTES)
        if route == "two-level" and gradient_halves:
            raise ValueError("Ring: expected gradient_halves None or False with route two-level, got True")
        check_requested(gradient_route, gradient_travel, route, gradient_halves)
        self.timeout = timeout if isinstance(timeout, datetime.timedelta) else datetime.timedelta(seconds=timeout)
        if self.timeout <= datetime.timedelta(0):
            raise ValueError(f"Ring: expected a positive timeout, got {self.timeout}")
        check_graphs(graphs)
        self._take(slot_cap, prefetch, late_gradients, travel, route, graphs)
        self.transport_options = TransportOptions.of(transport_options)
        meshes = resolve_mesh(mesh_or_group, dims)
        self.mesh: DeviceMesh | None = meshes.hops
        self.parameter_mesh: DeviceMesh | None = meshes.parameters
        self.tensor_mesh: DeviceMesh | None = meshes.tensor
        self.replicas = meshes.replicas
        self.traceable = meshes.replicas == 1 and meshes.tensor is None
        follow(meshes.parameters, meshes.replicas, meshes.tensor is not None)
        group = meshes.hops.get_group()
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = torch.device(meshes.hops.device_type)
        if checksum and self.device.type != "cpu":
            raise ValueError(f"Ring: expected checksum=False or a ring of CPU ranks, got True on {self.device.type}")
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
            order_launches()
        self._open_groups(dist.get_process_group_ranks(group))
        self.failure_report = FailureReport(meshes.parameters.mesh.flatten().tolist())
        name_ring(self)
        with self._whole_or_closed():
            self._agree_on_options(
                f"transport {transport}, route {route}, travel {travel}, timeout {self.timeout}, slot_cap {slot_cap}, "
                f"prefetch {prefetch}, gradient_halves {gradient_halves}, late_gradients {late_gradients}, "
                f"gradient_route {gradient_route}, gradient_travel {gradient_travel}, graphs {graphs}, "
                f"checksum {checksum}, {self.transport_options}"
            )
            self._start(transport, route, checksum, gradient_halves, late_gradients, gradient_route, gradient_travel)

    @classmethod
    def emulated(
        cls,
        size: int,
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        link: str | None = None,
        route: str = "ring",
        travel: str | None = None,
        hosts: int = 1,
        prefetch: int = 1,
        gradient_halves: bool | None = None,
        gradient_route: str = "chain",
        gradient_travel: str | None = None,
        graphs: str = "off",
    ) -> Ring:
        """A ring of `size` in one process: every neighbour is this rank itself, and hops are real copies.

        A layer on it computes what the plain layer with this rank's shard repeated `size` times would. For
        microbenchmarks of the timeline of one rank, and for memory per rank. `hosts`: of route two-level.

        `link`, for a GPU: `sm-local` (a plain copy within the GPU, which runs on SMs; the default), `ce-local` or
        `ce-local:N` (copies asked to leave the SMs alone, cut for N = 1, 2 or 4 streams), `nccl-self` or
        `nccl-self:CTAS` (NCCL to oneself, on at most that many thread blocks), `pcie` (through pinned host memory).
        Unknown ones are ValueErrors; one that does not work here is a RotationError.
        """
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"Ring.emulated: expected size >= 1 and 0 <= rank < size, got size {size}, rank {rank}")
        ring = cls.__new__(cls)
        ring.timeout = datetime.timedelta(seconds=600)
        check_choice("route", route, ROUTES[1:])
        check_requested(gradient_route, gradient_travel, route, gradient_halves)
        check_choice("gradient_route", gradient_route, ("chain", "direct"))
        ring.gradients = GradientRoutes(gradient_route, gradient_travel, "it was asked for")
        check_graphs(graphs)
        ring._take(SLOT_CAP, prefetch, 0, travel, route, graphs)
        ring.transport_options = TransportOptions.of(None)
        ring.mesh = ring.parameter_mesh = ring.tensor_mesh = None
        ring.replicas = 1
        ring.rank, ring.size = rank, size
        ring.device = torch.device(device)
        if ring.device.type == "cuda" and ring.device.index is None:
            ring.device = torch.device("cuda", torch.cuda.current_device())
        name_ring(ring)
        ring.token = secrets.token_hex(4)
        ring.placed = Hosts.even(size, hosts, route)
        ring.route, ring.transport_reason = route, "one process stands for the ring"
        ring.hop_route = "ring" if route == "gather" else route
        ring.transport = "emulated"
        if ring.device.type == "cuda":
            ring.link = link or "sm-local"
        with ring._whole_or_closed():
            ring._build(_native.emulated_transport(ring.device, link), route, gradient_halves)
        return ring

    # -- using and ending --------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the ring can still be used."""
        return self._executor.alive and self._world is dist.group.WORLD if self._world else self._executor.alive

    def close(self) -> None:
        """Ends the ring in good order. Idempotent; collective. Does nothing in a process forked from the ring's.

        A ring that is dropped unclosed gives back its memory, threads and connections too, but waits for nobody: ranks
        that are still at work on it fail.
        """
        try:
            self._executor.close()
        finally:
            self.graphs.forget()
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

    def check_alive(self, operation: str) -> None:
        """Raises RotationError if the ring was closed, has failed, outlived its process group, or is the ring of the
        process that this one was forked from; RuntimeError where something traces or transforms what is called."""
        refuse_transforms(operation)
        self._executor.check_alive(operation)
        if self._world is not None and self._world is not dist.group.WORLD:
            self._executor.fail("its process group was destroyed")
            self._executor.check_alive(operation)

    @unseen
    def run(
        self,
        operation: str,
        function: Callable[..., Any],
        *arguments: Any,
        serial: int = 0,
        watched: Sequence[torch.Tensor] = (),
        checked: bool = False,
    ) -> Any:
        """Calls a native operation with this ring's executor; a failure of the ring reaches the neighbours.

        `serial` and `watched` name the parameters to the prefetcher: a number that is the same on every rank, and the
        tensors whose version counters tell that they were written. `checked`: in a forward, `check_alive` was called.
        """
        task = torch._C._current_graph_task_id()
        backward = task >= 0
        if backward or not checked:
            self.check_alive(operation)
        if backward and self._ledger.open:  # of a forward that did not end, or has not yet
            self.settle()
        phase = self._forward_phase if not backward else 0 if task == self._passing_by else task + 1
        self._executor.enter(phase, backward, serial, watched)
        try:
            if self.graphs.on and function in CAPTURED:
                return self.graphs.run(operation, function, arguments)
            return function(self._executor, *arguments)
        except RuntimeError as error:
            self.abandon(error)
            raise

    def placements(self, dim: int | None, tensor: Placement | None = None) -> list[Placement]:
        """How a parameter lies on `parameter_mesh` that is cut along `dim` over the ring; None: one that is whole.
        `tensor`: how it lies over `tensor_mesh`."""
        assert self.parameter_mesh is not None, "an emulated ring has no mesh"
        over_ring: Placement = Replicate() if dim is None else Shard(dim)
        placements: list[Placement] = [Replicate() for _ in range(self.parameter_mesh.ndim - 1)] + [over_ring]
        if tensor is not None:
            placements[-2] = tensor
        return placements

    def offload(self, policy: OffloadPolicy) -> None:
        """Settles whether local shards stay on the host, for all models of the ring."""
        if isinstance(policy, CPUOffloadPolicy):
            refuse_graphs(self, "offload_policy=CPUOffloadPolicy")
            self.host_memory = host_memory(policy, self.device)
        self.offload_policy = policy
        if self.host_memory is not None:  # a shard has no memory on the device before its layer runs
            self.prefetch, self.traceable = 0, False
            self._executor.prefetch(False)
