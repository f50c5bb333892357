"""What local training sends between replicas: layouts, transfers, means."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from rtp_ext.outer.buckets import InFlightBucket, bucketed
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.outer.replicas import Replicas
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.links.agree import expect_same
from rtp_ext.ring.parameters_in_use import expect_own_shard

# -- layout of tensors that differ between replicas --------------------------------------------------------------------


def place_on_ring(tensor: torch.Tensor, ring: DeviceMesh) -> None:
    """Moves a DTensor on (replicas, ring), Replicate() over the replicas, to the mesh of this rank's ring, in place and
    with the same shard. Operations on DTensors of different values then communicate within the ring only."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.ndim > ring.ndim:
        spec = tensor._spec
        tensor._spec = DTensorSpec(ring, spec.placements[-ring.ndim :], tensor_meta=spec.tensor_meta)


def with_replica_dim(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """Returns [K, *shape] on `mesh` (replicas, ring), Shard(0) over the replicas, for a tensor [*shape] on a ring.

    Shares memory with `tensor`; a checkpoint then holds the values of every replica. Raises ValueError for a Partial
    tensor: a checkpoint would hold one term of its sum.
    """
    (over_ring,) = tensor.placements
    if isinstance(over_ring, Partial):
        raise ValueError(
            f"expected state of an optimizer that is sharded or the same on all ranks of a ring, got a DTensor of "
            f"shape {tuple(tensor.shape)} with placements {tensor.placements}: a checkpoint cannot hold the "
            "terms of its sum. The optimizer has to keep redistribute(placements=[Replicate()]) of it"
        )
    shape = torch.Size((mesh.size(0), *tensor.shape))
    over_ring = Shard(over_ring.dim + 1) if isinstance(over_ring, Shard) else over_ring
    return _laid_out(held(tensor).detach().unsqueeze(0), mesh, (Shard(0), over_ring), shape)


def own_replica_slice(value: Any, like: DTensor, mesh: DeviceMesh, what: str) -> torch.Tensor:
    """Returns this replica's slice of `value`, a view. Raises ValueError unless `value` has the layout of
    `with_replica_dim(like, mesh)`."""
    expected = with_replica_dim(like, mesh)
    expect_own_shard(value, expected, what)
    found = _describe(value) if isinstance(value, DTensor) else type(value).__name__
    if found != _describe(expected):
        raise ValueError(
            f"{what}: expected {_describe(expected)}, a layer for each replica as state_dict() of the policy gives it, "
            f"got {found}: load it on as many replicas as it was saved on, or save a plain state dict after average()"
        )
    return held(value)[0]


def without_replica_dim(value: DTensor, ring: DeviceMesh) -> DTensor:
    """Inverts `with_replica_dim`: returns a copy of this replica's slice, on the ring."""
    over_ring = value.placements[-1]
    over_ring = Shard(over_ring.dim - 1) if isinstance(over_ring, Shard) else over_ring
    return _laid_out(held(value)[0].clone(), ring, (over_ring,), value.shape[1:])


def _describe(tensor: DTensor) -> str:
    return f"{tuple(tensor.shape)} with {tensor.placements} on {tuple(tensor.device_mesh.shape)} ranks"


def _laid_out(local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


# -- transfers between two replicas ------------------------------------------------------------------------------------


@dataclass
class Swap:
    """Buffers in flight between replicas."""

    what: str
    sent: list[torch.Tensor] = field(default_factory=list)  # kept alive until the transfer ends
    received: list[dict[int, torch.Tensor]] = field(default_factory=list)  # for each buffer, by replica
    tickets: dict[int, torch.Tensor] = field(default_factory=dict)  # by replica, from all that send or receive
    unchecked: int = 0  # number of works, the first ones, whose tickets have not been compared
    works: list[tuple[Sequence[int], Any]] = field(default_factory=list)  # replicas that each work waits for


class Peers(Replicas):
    """Replicas of local training, which may be many steps apart when one fails; not all replicas may notice it."""

    @property
    def others(self) -> list[int]:
        return [replica for replica in range(self.size) if replica != self.rank]

    # -- point to point ------------------------------------------------------------------------------------------------

    def begin_swap(
        self,
        what: str,
        ticket: Sequence[int],
        buffers: Iterable[torch.Tensor],
        sources: list[int],
        targets: list[int],
        unsure: bool,
    ) -> Swap:
        """Starts to send buffers to `targets` and to receive those of `sources`; `end_swap` compares the tickets.

        `unsure`: some peers may be about to swap something else. Tickets are then compared before a buffer is sent:
        gloo ends a process that receives a longer buffer than expected.
        """
        self.check_alive(what)
        swap = Swap(what, [torch.tensor(ticket, dtype=torch.int64, device="cpu")])
        peers = sorted({*sources, *targets})
        swap.tickets = {peer: torch.zeros_like(swap.sent[0]) for peer in peers}
        self._post(swap, self._control, swap.sent[0], swap.tickets, peers)
        swap.unchecked = len(swap.works)
        if unsure:
            self._compare(swap)
        for buffer in buffers:
            if not buffer.numel():
                swap.received.append({source: buffer for source in sources})
                continue
            received = {source: torch.empty_like(buffer) for source in sources}
            swap.sent.append(buffer)
            swap.received.append(received)
            self._post(swap, self._collective, buffer, received, targets)
        return swap

    def _post(
        self, swap: Swap, group: Any, buffer: torch.Tensor, received: dict[int, torch.Tensor], targets: list[int]
    ) -> None:
        asked = [dist.P2POp(dist.irecv, into, group=group, group_peer=source) for source, into in received.items()]
        given = [dist.P2POp(dist.isend, buffer, group=group, group_peer=target) for target in targets]
        peers = [*received, *targets]
        if not peers:
            return
        try:
            works = dist.batch_isend_irecv([*asked, *given])
        except RuntimeError as error:  # a broken connection that was detected before
            raise self._lost(swap.what, 0.0, error, peers) from error
        one_for_each = len(works) == len(peers)
        for number, work in enumerate(works):
            swap.works.append(([peers[number]] if one_for_each else peers, work))

    def end_swap(self, swap: Swap) -> list[dict[int, torch.Tensor]]:
        """Waits for a swap and returns, for each buffer, the received tensors by replica. Raises ValueError if tickets
        differ."""
        self._compare(swap)
        self._wait_for(swap.what, swap.works)
        return swap.received

    def _wait_for(self, what: str, works: Sequence[tuple[Sequence[int], Any]]) -> None:
        for peers, work in works:
            self._wait(what, work.wait, peers)

    def _compare(self, swap: Swap) -> None:
        """Waits for the tickets and compares them once. Raises ValueError if one differs."""
        self._wait_for(swap.what, swap.works[: swap.unchecked])
        del swap.works[: swap.unchecked]
        swap.unchecked = 0
        mine = swap.sent[0]
        for source, ticket in swap.tickets.items():
            if not torch.equal(ticket, mine):
                error = ValueError(
                    f"replicas disagree: expected {swap.what} with ticket {mine.tolist()} (step, model, what travels), "
                    f"got {ticket.tolist()} from replica {source}: every rank has to step its optimizer the same "
                    "number of times, with the same model and policy, and to freeze the same parameters at the same "
                    "step"
                )
                swap.works.clear()  # a stored traceback would keep connections open, and peers wait for their end
                self.end(error)
                raise error

    # -- all replicas --------------------------------------------------------------------------------------------------

    def end_sum(self, work: Any) -> None:
        self._wait("a mean over replicas", work.wait, self.others)

    # -- failures ------------------------------------------------------------------------------------------------------

    def _wait(self, what: str, wait: Callable[[], Any], peers: Sequence[int]) -> None:
        start = time.monotonic()
        try:
            wait()
        except RuntimeError as error:
            raise self._lost(what, time.monotonic() - start, error, peers) from error

    def _lost(
        self, operation: str, waited: float, cause: Exception, suspects: Sequence[int] | None = None
    ) -> Exception:
        return super()._lost(operation, waited, cause, self.others if suspects is None else suspects)


# -- means of shards over replicas, in buckets -------------------------------------------------------------------------

BUCKET = 16 << 20  # bytes of a bucket at most, unless one shard is larger
IN_FLIGHT = 2  # number of buckets, where results can be stored at once


class Means(OuterPolicy):
    """An outer policy that averages shards over replicas and counts the bytes."""

    replicas_type = Peers

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0  # number of optimizer steps
        self._sent_bytes = 0
        self._trained: set[int] = set()  # numbers of parameters that may differ between replicas

    @property
    def peers(self) -> Peers:
        assert isinstance(self.replicas, Peers), "one replica has none"
        return self.replicas

    def bytes_sent(self) -> int:
        """Bytes of weights that this rank has sent to other replicas since the start. A mean over K replicas counts
        2 (K - 1) / K of its size, as a ring all-reduce sends. Excludes bookkeeping messages."""
        return self._sent_bytes

    def _weights(self) -> list[tuple[int, Any]]:
        """Returns number and parameter for those that may differ between replicas; the same on all replicas."""
        return [(index, p) for index, p in sorted(dict(self._handled()).items()) if index in self._trained]

    def _common(self) -> tuple[int, int]:
        """Returns two hashes that are equal if replicas have the same model with the same parameters frozen, and if
        they mix the same parameters."""
        travels = hashlib.sha256(repr([(i, p.dtype, held(p).shape) for i, p in self._weights()]).encode())
        return int(self.fingerprint()[:15], 16), int(travels.hexdigest()[:15], 16)

    def _agree(self, what: str) -> None:
        """Raises ValueError if replicas are about to run different operations. Collective."""
        if self.replicas is None:
            return
        expect_same(
            "replicas disagree",
            self.exchange((what, self._steps, *self._common())),
            show=lambda each: f"{each[0]} after step {each[1]}",
            named="replica {}".format,
            hint=": every rank has to step its optimizer the same number of times, with the same model and policy, and "
            "to freeze the same parameters at the same step",
        )

    def _begin_means(self, values: Sequence[torch.Tensor], most: int = BUCKET) -> Iterator[InFlightBucket]:
        """Starts the means of values, in float32 at least, and yields each bucket for `_end_mean`."""
        sizes = ((number, sum_dtype(value.dtype), value.numel()) for number, value in enumerate(values))
        for bucket in bucketed(sizes, most):
            dtype = sum_dtype(values[bucket[0]].dtype)
            flat = torch.cat([values[number].reshape(-1).to(dtype) for number in bucket])
            self._sent_bytes += 2 * (self.size - 1) * flat.nbytes // self.size
            yield InFlightBucket(self.peers.begin_sum(flat) if flat.numel() else None, flat, flat, bucket)

    def _end_mean(self, flight: InFlightBucket, values: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Waits for a bucket; yields number and mean of each value."""
        if flight.work is not None:
            self.peers.end_sum(flight.work)
        parts = flight.flat.div_(self.size).split([values[number].numel() for number in flight.indices])
        for number, part in zip(flight.indices, parts, strict=True):
            yield number, part.view(values[number].shape)

    def _average(self, values: Sequence[torch.Tensor]) -> None:
        """Replaces tensors by their mean over replicas, in place."""
        flights: deque[InFlightBucket] = deque()
        for flight in self._begin_means(values):
            flights.append(flight)
            if len(flights) == IN_FLIGHT:
                self._put(flights.popleft(), values)
        for flight in flights:
            self._put(flight, values)

    def _put(self, flight: InFlightBucket, values: Sequence[torch.Tensor]) -> None:
        for number, mean in self._end_mean(flight, values):
            values[number].copy_(mean)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which weights are summed."""
    return torch.promote_types(dtype, torch.float32)


def mark_written(parameters: Sequence[torch.Tensor]) -> None:
    """Marks the local parts of parameters as written, for autograd and for prefetched shards."""
    torch.autograd.graph.increment_version(list(parameters))
