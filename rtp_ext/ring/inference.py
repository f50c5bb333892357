"""The ring of models that compute forwards only: ranks read each other's shards where they lie, and wait for nobody."""

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
from rtp_ext.ring.links.options import RingOptions
from rtp_ext.ring.links.transports import Connection
from rtp_ext.ring.mesh import resolve_mesh
from rtp_ext.ring.ring import Ring
from rtp_ext.ring.routes.gradient_routes import GradientRoutes
from rtp_ext.ring.routes.plan import RoutePlan

logger = logging.getLogger("rtp_ext")

INFERENCE = "_rtp_inference"  # attribute of a model: its InferenceRing
_ALIGNMENT = 64  # bytes; of a shard in the shared memory


class InferenceRing(Ring):
    """Ranks of one host whose shards lie in memory that all of them map. `rotate_for_inference` makes it.

    A forward reads the shard of another rank where it lies: no hop, no slot, no copy, and no call of another rank.
    Only `share`, `exchange` and `update_weights` are collective. Memory of a rank that has ended stays mapped.

    Attributes:
        shared_bytes: bytes of this rank's shards.
        whole_bytes: bytes of the parameters that are whole on every rank.
    """

    traceable = False
    shared_bytes = whole_bytes = 0

    def __init__(
        self,
        mesh_or_group: DeviceMesh | dist.ProcessGroup | None = None,
        *,
        timeout: float | datetime.timedelta = 600.0,
    ) -> None:
        fixed = {"transport": "shm", "route": "direct", "slot_cap": 0, "prefetch": 0, "late_gradients": 0}
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
        with ring.released_on_error():
            token = agree_on(options, ring)
            if ring.placed.spread is not None:
                raise RotationError(
                    f"rotate_for_inference: expected ranks of one host, which map each other's shards, got "
                    f"{ring.placed.spread}: pulls over tcp are not made yet"
                )
            connection = Connection(
                "shm", _native.emulated_transport(device), "shards lie in memory that all ranks map"
            )
            routes = RoutePlan.of(options, "direct", GradientRoutes("chain", None, "there are none"))
            self._compose(ring, options, connection, routes, token)

    def share(self, parameters: Sequence[DTensor]) -> list[torch.Tensor]:
        """Moves the local shards of parameters into shared memory, and maps those of the other ranks. Collective.

        Returns the parameters, in order, as DTensors over that memory; those on the meta device are zero.
        """
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            # one unit at least: the address of a shard identifies its parameter
            end += max(1, -(-parameter._local_tensor.nbytes // _ALIGNMENT)) * _ALIGNMENT
        shards, problem, address = None, None, ""
        try:
            shards = _native.SharedShards(self.rank, self.size, end)
            address = shards.address()
        except RotationError as error:
            problem = str(error)
        self._refuse(problem)
        assert shards is not None, "no problem"
        addresses, sizes, all_offsets = zip(*self.exchange((address, end, offsets)), strict=True)
        counts = [len(each) for each in all_offsets]
        if len(set(counts)) > 1:
            raise ValueError(f"rotate_for_inference: ranks have different models: got {counts} parameters that are cut")
        try:
            shards.connect(addresses, sizes, all_offsets)
        except RotationError as error:
            problem = str(error)
        self._refuse(problem)
        memory: torch.Tensor = shards.memory()
        moved: list[Any] = []
        with torch.inference_mode(False), torch.no_grad():
            for parameter, offset in zip(parameters, offsets, strict=True):
                local = parameter._local_tensor
                place = memory[offset : offset + local.nbytes].view(local.dtype).view(local.shape)
                if not local.is_meta:
                    place.copy_(local)
                moved.append(as_gradient(place, parameter._spec))
        self.shared_bytes = sum(parameter._local_tensor.nbytes for parameter in moved)
        self.communicator.executor.share(shards)
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
        """Releases this rank's mappings and groups. Idempotent; waits for no rank: others that read the shards of this
        one go on, since their mappings keep the memory."""
        super().close()
        self.communicator.executor.share(None)

    def __repr__(self) -> str:
        return (
            f"InferenceRing(rank={self.rank}, size={self.size}, transport='shm', {self.shared_bytes} bytes of shards "
            f"here, {self.whole_bytes} bytes whole on every rank)"
        )
