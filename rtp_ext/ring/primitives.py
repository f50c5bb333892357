"""The two primitives of a ring: `rotate`, in which shards visit every rank, and `collect`, in which sums reach their
owners."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rtp_ext import _native
from rtp_ext.ring.autograd import expect_memory, unseen
from rtp_ext.ring.links.agree import expect_same
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.mesh import piece_dim, ring_dim, ring_shape
from rtp_ext.ring.op_runner import OpRunner
from rtp_ext.ring.prepared import Prepared
from rtp_ext.ring.routes.route_planner import Link


def as_tensor(value: Any) -> torch.Tensor:
    """Returns a tensor over the memory of `value`, a tensor or any array with DLPack support (CuPy, NumPy)."""
    if isinstance(value, DTensor):
        if piece_dim(value._spec) is not None:
            raise ValueError(
                "Ring: expected a tensor that is cut over the ring alone, got a DTensor that replicas cut too, with "
                f"placements {value.placements}: this rank holds no shard of the ring. Pass the shard, a plain tensor"
            )
        with torch.no_grad():
            value = value.to_local()
    if isinstance(value, torch.Tensor):
        (value,) = expect_memory("Ring", (value,))
        return value.detach()
    if hasattr(value, "__dlpack__"):
        return torch.from_dlpack(value)
    raise TypeError(f"Ring: expected a tensor or a DLPack array, got {type(value).__name__}")


class Primitives:
    """`rotate` and `collect` on one rank of a ring, and the measurement of its hops.

    Args:
        serial: index of the ring within the process; part of the key of stored shapes.
        hop_route: the route of the hops of a rotation.
    """

    def __init__(self, communicator: Communicator, dispatcher: OpRunner, hop_route: str, serial: int) -> None:
        self._communicator, self._op_runner = communicator, dispatcher
        self._hop_route, self._serial = hop_route, serial

    def shapes(
        self, tensors: Sequence[torch.Tensor], originals: Sequence[Any], prepared: Prepared | None
    ) -> list[list[list[int]]]:
        """Returns the shape of every owner's shard of each tensor: from torch's chunk rule for DTensors, else from an
        exchange."""
        if all(isinstance(o, DTensor) for o in originals):
            result = []
            for original in originals:
                dim, shape = ring_dim(original), ring_shape(original)
                if dim is None:
                    raise ValueError(f"Ring: expected a DTensor cut along the ring, got {original.placements}")
                sizes = _native.shard_sizes(shape[dim], self._communicator.size)
                result.append([[*shape[:dim], size, *shape[dim + 1 :]] for size in sizes])
            return result
        mine = [(tuple(t.shape), str(t.dtype)) for t in tensors]
        known = {} if prepared is None else prepared.found
        key = (self._serial, *mine)
        if key not in known:
            known[key] = self._agree_on_shapes(mine)
        return known[key]

    def _agree_on_shapes(self, mine: list[tuple[tuple[int, ...], str]]) -> list[list[list[int]]]:
        answers = self._communicator.exchange(mine)
        expect_same(
            "Ring, shards of as many dimensions and the same dtype",
            answers,
            key=lambda parts: [(len(shape), dtype) for shape, dtype in parts],
        )
        return [[list(theirs[part][0]) for theirs in answers] for part in range(len(mine))]

    @unseen
    def _shards(
        self, operation: str, shard: Any, prepared: Prepared | None
    ) -> tuple[list[torch.Tensor], list[list[list[int]]], bool]:
        self._op_runner.check_alive(operation)
        single = not isinstance(shard, (list, tuple))
        originals = [shard] if single else list(shard)
        if not originals:
            raise ValueError(f"{operation}: expected a tensor or a list of at least one, got an empty list")
        tensors = [as_tensor(original) for original in originals]
        for tensor in tensors:
            if tensor.device != self._communicator.device:
                raise TypeError(
                    f"{operation}: expected a tensor on {self._communicator.device}, the ring's, got {tensor.device}"
                )
        tensors = [tensor.contiguous() for tensor in tensors]
        return tensors, self.shapes(tensors, originals, prepared), single

    def rotate(
        self, shard: Any, *, reverse: bool = False, prepared: Prepared | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Brings every rank's shard to this rank in turn, while the caller computes on the current one.

        Args:
            shard: this rank's tensor (or list of tensors that travel together), of any dtype; may be a DTensor or a
                DLPack array. Shards of different ranks may differ in size.
            reverse: visits in the order r, r+1, ... of a backward instead of r, r-1, ... On route two-level the order
                is that of hosts, and of the ranks on each host.
            prepared: keeps the shapes of all ranks' shards, which the ranks otherwise exchange in every call unless
                they are DTensors. One for each shard, on every rank or on none: see rtp_ext.functional.Prepared.

        Yields `(owner, view)`, this rank's own shard first; a list of views for a list. A view is valid until the next
        iteration. The caller may leave the loop early: the remaining hops still run, since the neighbours need them.
        Collective. Source: RTP, arXiv 2311.01635, the rotation primitive.
        """
        tensors, shapes, single = self._shards("rotate", shard, prepared)
        execution = unseen(self._op_runner.run)(
            "rotate", _native.Execution.rotate, tensors, shapes, self._hop_route, reverse, checked=True
        )
        return self._visits(execution, single)

    def _visits(self, execution: Any, single: bool) -> Iterator[tuple[int, Any]]:
        try:
            while (visit := self._visit(execution)) is not None:
                owner, views = visit
                yield owner, views[0] if single else views
        finally:
            unseen(execution.finish)()

    @unseen
    def _visit(self, execution: Any) -> tuple[int, list[torch.Tensor]] | None:
        step = self._next(execution)
        return None if step is None else (step.owner, execution.weight())

    def _next(self, execution: Any) -> Any:
        try:
            return execution.next()
        except BaseException as error:
            self._communicator.abandon(error)
            raise

    @unseen
    def collect(self, add: Callable[[int, Any], None], like: Any, *, prepared: Prepared | None = None) -> Any:
        """Sums a tensor for each owner over all ranks, along the ring, and delivers it to the owner: the dual of
        `rotate`.

        Args:
            add: called as `add(owner, partial)` once for every owner, for this rank last; adds this rank's contribution
                to `partial` in place.
            like: a tensor (or list) of the shape, dtype and device of this rank's own result. Not changed.
            prepared: as in `rotate`.

        Returns this rank's own sum (a list for a list). An exception of `add` is raised after the remaining hops have
        run. Collective.
        """
        tensors, shapes, single = self._shards("collect", like, prepared)
        local = [torch.empty_like(tensor) for tensor in tensors]
        execution = self._op_runner.run(
            "collect", _native.Execution.collect, local, shapes, self._hop_route, checked=True
        )
        try:
            while (step := self._next(execution)) is not None:
                arrived, partial = execution.gradient_in(), execution.gradient_out()
                for index, tensor in enumerate(partial):
                    if not arrived:
                        tensor.zero_()
                    elif arrived[index].data_ptr() != tensor.data_ptr():
                        tensor.copy_(arrived[index])
                add(step.owner, partial[0] if single else partial)
        finally:
            execution.finish()
        return local[0] if single else local

    def seconds_per_hop(self, shard_bytes: int) -> float:
        """Times one rotation of shards of `shard_bytes` on this rank. Collective."""
        shard = torch.zeros(shard_bytes, dtype=torch.uint8, device=self._communicator.device)
        self._communicator.exchange(None)  # all ranks start at the same time
        start = time.perf_counter()
        for _ in self.rotate(shard):
            pass
        if self._communicator.device.type == "cuda":
            torch.cuda.synchronize(self._communicator.device)
        return (time.perf_counter() - start) / (self._communicator.size - 1)

    def measure_link(self, shard_bytes: int, repeats: int) -> Link:
        """Times hops of shards of `shard_bytes` for the rate, and of a few bytes for the latency; the slowest rank
        counts. Collective. Raises ValueError on a ring of one rank."""
        if self._communicator.size == 1:
            raise ValueError("Ring.measure_link: expected at least 2 ranks, got 1")
        large, small = (
            max(self._communicator.exchange(min(self.seconds_per_hop(size) for _ in range(repeats))))
            for size in (shard_bytes, 64)
        )
        return Link(shard_bytes / max(large - small, 1e-9), small, "measured")
