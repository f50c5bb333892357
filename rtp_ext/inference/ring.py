"""The ring of models that compute forwards only: ranks read each other's shards, and wait for no call of another."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from rtp_ext import _native
from rtp_ext._native import RingTimeout, RotationError
from rtp_ext.compilers import keep_compilers_out
from rtp_ext.inference.forwards import Forwards, InTurn
from rtp_ext.options import RingOptions
from rtp_ext.parameters.coded import CodedWeight
from rtp_ext.parameters.sharding import frozen_of
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import as_gradient
from rtp_ext.ring.bootstrap import agree_on, join_ranks, refused_together
from rtp_ext.ring.links.agree import expect_same_lines, expect_success, in_words
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.links.host_address import own_address
from rtp_ext.ring.links.transports import Candidate, ce_refusal, choose, refuse_any, unique_ids
from rtp_ext.ring.mesh import resolve_mesh
from rtp_ext.ring.routes.gradient_routes import GradientRoutes
from rtp_ext.ring.routes.plan import RoutePlan
from rtp_ext.words import InferenceTransport

logger = logging.getLogger("rtp_ext")

TRANSPORTS: tuple[str, ...] = get_args(InferenceTransport)
_ALIGNMENT = 64  # bytes; of a shard in the memory that other ranks read
_CALLER = "rotate_for_inference"


def _candidates(ring: Communicator, offload: bool) -> list[Candidate]:
    """Returns the transports of an InferenceRing, the preferred one first."""

    def none(ring: Communicator) -> Any:
        return _native.emulated_transport(ring.device)  # nothing hops

    placed = ring.placed
    if offload:
        virtue = "copy engines copy shards from memory of the host that all ranks map"
        return [Candidate("shm", virtue, lambda: placed.spread, none)]
    if ring.device.type == "cuda":
        virtue = "copy engines copy shards from the memory of their owners"
        return [Candidate("ce", virtue, lambda: placed.spread or ce_refusal(), none)]
    return [
        Candidate("shm", "shards lie in memory that all ranks map", lambda: placed.spread, none),
        Candidate(
            "shm+tcp",
            "ranks of a host map each other's shards, and share those that come from other hosts",
            lambda: placed.unlevel,
            none,
        ),
        Candidate("tcp", "a thread of each rank sends its shards on request", lambda: None, none),
    ]


class InferenceRing:
    """Ranks that read each other's shards without taking part in each other's forwards: see `rotate_for_inference`.

    Over `shm` a forward computes with the shard of another rank where it lies: no hop, no slot, no copy; the memory of
    a rank that has ended stays mapped. Over `tcp` it pulls the shard from its owner, whose threads answer, into one of
    two slots, while it computes with the shard before; in the forward of a model also across layers, in the order of
    the forward before. `shm+tcp` does the first inside a host and the second between hosts; a shard that another rank
    of the host has in a slot comes from there. Over `ce` copy engines copy a shard from the GPU of its owner, which
    takes no part. With `offload` the shards of GPUs lie in pinned memory of their host, which all ranks map (`shm`),
    and copy engines copy every one, this rank's own too. Only `share`, `exchange` and `update_weights` are collective.
    Threads may run forwards at a time; their layers take turns.

    It has the attributes and methods of its Ring, too.

    Attributes:
        ring: the Ring of its layers.
        shard_bytes: bytes of this rank's shards.
        whole_bytes: bytes of the parameters that are whole on every rank.
    """

    shard_bytes = whole_bytes = 0

    def __init__(
        self,
        mesh_or_group: DeviceMesh | dist.ProcessGroup | None,
        *,
        transport: str,
        timeout: float | datetime.timedelta,
        offload: bool = False,
    ) -> None:
        fixed = {"transport": transport, "route": "direct", "slot_cap": 0, "prefetch": False, "late_gradients": 0}
        fixed["embedding"] = "rotate"  # no rank waits for another's ids
        keep_compilers_out()
        meshes = resolve_mesh(mesh_or_group)
        with refused_together(meshes, timeout=timeout):
            options = RingOptions.of({**fixed, "timeout": timeout})
            _check_device(meshes.hops.device_type, transport, offload)
        self._source: Any = None
        ring = join_ranks(meshes, options)
        with ring.released_on_error():
            token = agree_on(options, ring)
            connection = choose(ring, transport, _candidates(ring, offload), _CALLER)
            routes = RoutePlan.of(options, "direct", GradientRoutes("chain", None, "there are none"))
            self.ring = Ring.composed(
                ring, options, connection, routes, token, mesh=meshes.hops, agreement=Forwards, runner=InTurn
            )
            self.ring.traceable = False
            if offload:  # `share` moves the shards to memory that is pinned
                self.ring.offload(CPUOffloadPolicy(pin_memory=False))
            self.ring.pulls_from = _pulls_from(self.ring)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "ring"), name)  # which is not there while it is made or copied

    def share(self, parameters: Sequence[DTensor]) -> list[torch.Tensor]:
        """Moves the local shards of parameters into memory that other ranks read, and connects the ranks. Collective.

        Returns the parameters, in order, as DTensors over that memory; those on the meta device are zero.
        """
        starts, offsets, end = [], [], 0
        for parameter in parameters:
            starts.append(end)
            offsets += [end + first for first in _pieces(parameter)]
            # one unit at least: the address of a shard identifies its parameter
            end += max(1, -(-parameter._local_tensor.nbytes // _ALIGNMENT)) * _ALIGNMENT
        source, problem, address = None, None, ""
        sizes = self.exchange(end)
        host = own_address(self.exchange) if "tcp" in self.transport else ""
        unique = unique_ids(self.communicator, 1)[0] if self.transport == "ce" else b""
        try:
            source = self._make_source(sizes, len(offsets), host, unique)
            address = source.address()
        except Exception as error:  # memory may be missing, too
            problem = str(error)
        self._refuse(problem)
        assert source is not None, "no problem"
        addresses, all_offsets = zip(*self.exchange((address, offsets)), strict=True)
        try:
            source.connect(addresses, sizes, all_offsets)
        except Exception as error:  # memory may be missing, too
            problem = str(error)
        self._refuse(problem)
        moved: list[Any] = []
        with torch.inference_mode(False), torch.no_grad():
            for parameter, offset in zip(parameters, starts, strict=True):
                local = parameter._local_tensor
                place = source.memory(offset, local.nbytes).view(local.dtype).view(local.shape)
                place.zero_() if local.is_meta else place.copy_(local)
                moved.append(as_gradient(place, parameter._spec))
        self.synchronize()  # other ranks read without waiting for this one's streams
        self.shard_bytes = sum(parameter._local_tensor.nbytes for parameter in moved)
        self._source = source
        self.communicator.executor.take_from(source)
        self._refuse(None)  # no rank computes before the shards of all are in place
        return moved

    def _make_source(self, sizes: Sequence[int], parameters: int, host: str, unique: bytes) -> Any:
        """Returns the native source of the shards. `sizes`: by rank, bytes of its memory; `host`: see own_address;
        `unique`: an id of NCCL. Collective over `ce`."""
        if self.transport == "ce":
            return _native.copied_shards(unique, self.rank, self.size, max(sizes), self.device, self.timeout)
        if self.host_memory is not None:
            return _native.offloaded_shards(self.rank, self.size, sizes[self.rank], self.device)
        place = self.rank, self.size, sizes[self.rank]
        if self.transport == "shm":
            return _native.shared_shards(*place)
        if self.transport == "tcp":
            return _native.pulled_shards(*place, host, self.timeout)
        return _native.two_level_shards(*place, host, self.timeout, self.hosts, max(sizes), parameters)

    def _refuse(self, problem: str | None) -> None:
        """Raises RotationError with the problems of all ranks, if any. Collective."""
        refuse_any(self.exchange(problem), _CALLER)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Has no forward of this rank run within the body, which changes weights, and compares with the other ranks at
        its begin and its end. Where it is interrupted, the ring ends, since other ranks wait in a comparison."""
        self.agreement.gate.expect_outside("an update")
        self.end_forward()  # of this thread, which KeyboardInterrupt may have left
        try:
            self.agreement.gate.close(self.timeout.total_seconds())
            self.synchronize()
            yield
        except BaseException as error:
            if self.alive and (not isinstance(error, Exception) or isinstance(error, RingTimeout)):
                self.end(error if isinstance(error, Exception) else RotationError(f"update_weights: {error!r}"))
            raise
        finally:
            self.agreement.gate.open()

    def agree_on_update(self, failure: Exception | None, tensors: list[str], *, written: bool) -> None:
        """Raises where an update has failed on a rank, or where `tensors`, lines that describe what is updated,
        differ between ranks. Collective.

        failure: that of this rank, which is raised here. written: this rank may have written weights. Where one has,
        the failure of another rank is a RotationError here, and forwards are refused until an update succeeds;
        otherwise it is a ValueError.
        """
        answers = self.exchange((in_words(failure), hashlib.sha256(repr(tensors).encode()).hexdigest(), written))
        failures, digests, wrote = zip(*answers, strict=True)
        partly_new, gate = any(wrote), self.agreement.gate
        raises: type[Exception] = RotationError if partly_new else ValueError
        hint = ", the weights are partly new" if partly_new else ", no weight has changed"
        try:
            expect_success("update_weights", failures, failure, raises=raises, hint=hint)
            if len(set(digests)) > 1:
                expect_same_lines("update_weights, the tensors of all ranks", self.exchange(tensors))
        except Exception as error:
            gate.partly_new = str(error) if partly_new else gate.partly_new
            raise
        gate.partly_new = "" if partly_new else gate.partly_new

    def synchronize(self) -> None:
        """Waits until this rank's device has read and written all shards of its calls so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def pulled_bytes(self) -> int:
        """The bytes of shards that have come to this rank from their owners: over sockets, or by copy engines."""
        return 0 if self._source is None else self._source.pulled_bytes

    @property
    def shared_bytes(self) -> int:
        """The bytes of shards of other hosts that have come from another rank of this host, over `shm+tcp`."""
        return 0 if self._source is None else self._source.shared_bytes

    def close(self) -> None:
        """Releases this rank's mappings, threads and groups. Idempotent.

        Over `shm` other ranks go on: their mappings keep the shards of this one. Over `tcp` their next pull from this
        rank is an error, and over `shm+tcp` that of a rank of another host. Over `ce` it is collective, since copies
        from memory that its owner has freed cannot be made errors; where another rank does not close within the
        timeout, the memory of the shards is kept until the process ends. Does nothing in a process that was forked from
        the ring's.
        """
        if self.communicator.forked:
            return
        source, self._source = self._source, None
        over = source is not None and self._all_close()
        self.ring.close()
        if source is not None:
            if over:
                source.close()
            with self.agreement.turn:  # a forward of another thread may be reading a shard
                self.communicator.executor.take_from(None)

    def _all_close(self) -> bool:
        """Returns whether no other rank reads this one's shards any more, where that matters. Collective over `ce`."""
        if self.transport != "ce":
            return True
        try:
            self.synchronize()
            self.exchange("close")
            return True
        except RuntimeError as error:
            logger.warning("%s: the shards stay in memory, since not all ranks have closed: %s", _CALLER, error)
            return False

    def __enter__(self) -> InferenceRing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, _memo: dict) -> InferenceRing:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.ring.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        place = "here" if self.host_memory is None else "in pinned memory of the host"
        return (
            f"InferenceRing(rank={self.rank}, size={self.size}, transport={self.transport!r}, {self.shard_bytes} bytes "
            f"of shards {place}, {self.whole_bytes} bytes whole on every rank)"
        )


def _pieces(parameter: DTensor) -> list[int]:
    """Returns where the tensors begin that are pulled of this rank's shard, in bytes: of codes and of scales."""
    weight, mesh = frozen_of(parameter), parameter.device_mesh
    if not isinstance(weight, CodedWeight):
        return [0]
    return [0, weight.facts.scales_at(weight.facts.shard(weight.ranks, mesh.get_local_rank(mesh.ndim - 1)))]


def _pulls_from(ring: Ring) -> tuple[int, ...]:
    """Returns the ranks whose shards this one pulls, or gets from another rank of its host that has pulled them;
    offloaded ones come from memory of the host. It reads those of the others where they lie."""
    if ring.host_memory is not None:
        return tuple(range(ring.size))
    per_host = {"shm": ring.size, "shm+tcp": ring.size // (ring.hosts or 1)}.get(ring.transport, 1)
    return tuple(owner for owner in range(ring.size) if owner // per_host != ring.rank // per_host)


def _check_device(device: str, transport: str, offload: bool) -> None:
    """Raises ValueError for ranks on other devices, and where shards cannot be offloaded."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"{_CALLER}: expected ranks on CPUs or CUDA GPUs, got a mesh on {device}")
    if not offload:
        return
    if device == "cpu":
        raise ValueError(
            f"{_CALLER}: expected offload=False on CPUs, got True: their shards lie in memory of the host already"
        )
    if transport not in ("auto", "shm"):
        raise ValueError(
            f"{_CALLER}: expected transport auto or shm with offload=True, got {transport!r}: all shards lie in memory "
            "of the host"
        )
