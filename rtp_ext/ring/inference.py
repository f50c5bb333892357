"""The ring of models that compute forwards only: ranks read each other's shards, and wait for no call of another."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rtp_ext import _native
from rtp_ext._native import RotationError
from rtp_ext.compilers import keep_compilers_out
from rtp_ext.ring.autograd import as_gradient
from rtp_ext.ring.bootstrap import agree_on
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.links.failure_report import FailureReport
from rtp_ext.ring.links.host_address import own_address
from rtp_ext.ring.links.options import RingOptions
from rtp_ext.ring.links.transports import Connection
from rtp_ext.ring.mesh import resolve_mesh
from rtp_ext.ring.ring import Ring
from rtp_ext.ring.routes.gradient_routes import GradientRoutes
from rtp_ext.ring.routes.plan import RoutePlan

logger = logging.getLogger("rtp_ext")

INFERENCE = "_rtp_inference"  # attribute of a model: its InferenceRing
_ALIGNMENT = 64  # bytes; of a shard in the memory that other ranks read
_REASONS = {
    "shm": "shards lie in memory that all ranks map",
    "tcp": "a thread of each rank sends its shards on request",
}


class InferenceRing(Ring):
    """Ranks that read each other's shards without taking part in each other's forwards: see `rotate_for_inference`.

    Over `shm` a forward computes with the shard of another rank where it lies: no hop, no slot, no copy; the memory of
    a rank that has ended stays mapped. Over `tcp` it pulls the shard from its owner, whose threads answer, into one of
    two slots, while it computes with the shard before. Only `share`, `exchange` and `update_weights` are collective.

    Attributes:
        shard_bytes: bytes of this rank's shards.
        whole_bytes: bytes of the parameters that are whole on every rank.
    """

    traceable = False
    shard_bytes = whole_bytes = 0

    def __init__(
        self,
        mesh_or_group: DeviceMesh | dist.ProcessGroup | None,
        *,
        transport: str,
        timeout: float | datetime.timedelta,
    ) -> None:
        fixed = {"transport": transport, "route": "direct", "slot_cap": 0, "prefetch": 0, "late_gradients": 0}
        options = RingOptions.of({**fixed, "timeout": timeout})
        keep_compilers_out()
        self.mesh = self.parameter_mesh = mesh = resolve_mesh(mesh_or_group).hops
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            raise ValueError(f"rotate_for_inference: expected ranks on CPUs, got a mesh on {device.type}: not made yet")
        group = mesh.get_group()
        members = dist.get_process_group_ranks(group)
        ring = Communicator(dist.get_rank(group), dist.get_world_size(group), device, options.timeout, members)
        ring.failure_report = FailureReport(mesh.mesh.flatten().tolist())
        self._source: Any = None
        with ring.released_on_error():
            token = agree_on(options, ring)
            if transport == "shm" and ring.placed.spread is not None:
                raise RotationError(
                    f"rotate_for_inference: transport shm cannot be used: {ring.placed.spread}; tcp can"
                )
            name = ("shm" if ring.placed.spread is None else "tcp") if transport == "auto" else transport
            connection = Connection(name, _native.emulated_transport(device), _REASONS[name])
            routes = RoutePlan.of(options, "direct", GradientRoutes("chain", None, "there are none"))
            self._compose(ring, options, connection, routes, token)

    def share(self, parameters: Sequence[DTensor]) -> list[torch.Tensor]:
        """Moves the local shards of parameters into memory that other ranks read, and connects the ranks. Collective.

        Returns the parameters, in order, as DTensors over that memory; those on the meta device are zero.
        """
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            # one unit at least: the address of a shard identifies its parameter
            end += max(1, -(-parameter._local_tensor.nbytes // _ALIGNMENT)) * _ALIGNMENT
        source, problem, address = None, None, ""
        host = own_address(self.exchange) if self.transport == "tcp" else ""
        try:
            if self.transport == "tcp":
                source = _native.pulled_shards(self.rank, self.size, end, host, self.timeout)
            else:
                source = _native.shared_shards(self.rank, self.size, end)
            address = source.address()
        except RotationError as error:
            problem = str(error)
        self._refuse(problem)
        assert source is not None, "no problem"
        addresses, sizes, all_offsets = zip(*self.exchange((address, end, offsets)), strict=True)
        try:
            source.connect(addresses, sizes, all_offsets)
        except RotationError as error:
            problem = str(error)
        self._refuse(problem)
        moved: list[Any] = []
        with torch.inference_mode(False), torch.no_grad():
            for parameter, offset in zip(parameters, offsets, strict=True):
                local = parameter._local_tensor
                place = source.memory(offset, local.nbytes).view(local.dtype).view(local.shape)
                if not local.is_meta:
                    place.copy_(local)
                moved.append(as_gradient(place, parameter._spec))
        self.shard_bytes = sum(parameter._local_tensor.nbytes for parameter in moved)
        self._source = source
        self.communicator.executor.take_from(source)
        self._refuse(None)  # no rank computes before the shards of all are in place
        return moved

    def _refuse(self, problem: str | None) -> None:
        """Raises RotationError with the problems of all ranks, if any. Collective."""
        if texts := [f"on rank {rank}, {text}" for rank, text in enumerate(self.exchange(problem)) if text is not None]:
            raise RotationError(f"rotate_for_inference: {'; '.join(texts)}")

    def postpone(self, *_: Any) -> bool:
        """Returns True: the ranks have compared the whole model, and forwards need no comparison."""
        return True

    def close(self) -> None:
        """Releases this rank's mappings, threads and groups. Idempotent; waits for no other rank.

        Over `shm` other ranks go on: their mappings keep the shards of this one. Over `tcp` their next pull from this
        rank is an error.
        """
        super().close()
        if self._source is not None:
            self._source.close()
            self.communicator.executor.take_from(None)
            self._source = None

    def __repr__(self) -> str:
        return (
            f"InferenceRing(rank={self.rank}, size={self.size}, transport={self.transport!r}, {self.shard_bytes} bytes "
            f"of shards here, {self.whole_bytes} bytes whole on every rank)"
        )
