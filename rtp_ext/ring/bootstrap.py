"""The start of a ring: its ranks, refusals of its arguments, comparison of the ranks' options, and creation of the
executor."""

from __future__ import annotations

import contextlib
import datetime
import secrets
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rtp_ext import _native
from rtp_ext.options import RingOptions
from rtp_ext.ring.links.agree import expect_same, expect_success
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.links.failure_report import FailureReport, this_process
from rtp_ext.ring.links.gpu_links import find_wiring
from rtp_ext.ring.links.groups import lacks_room
from rtp_ext.ring.links.hosts import find_hosts
from rtp_ext.ring.links.transports import NETWORKED, Connection, order_launches
from rtp_ext.ring.mesh import RingMesh, RotationDims, resolve_mesh, unnamed_dimension


def join_ranks(meshes: RingMesh, options: RingOptions) -> Communicator:
    """Returns the communicator of the ranks of a ring. Collective."""
    device = torch.device(meshes.hops.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        order_launches()
    group = meshes.hops.get_group()
    members = dist.get_process_group_ranks(group)
    report = FailureReport(meshes.parameters.mesh.flatten().tolist())
    if len(members) > 1:
        report.meet(members, lacks_room(2, len(members)), options.timeout)
    ring = Communicator(dist.get_rank(group), len(members), device, options.timeout, members)
    ring.failure_report = report
    return ring


@contextlib.contextmanager
def refused_together(
    mesh_or_group: DeviceMesh | dist.ProcessGroup | RingMesh | None,
    dims: RotationDims | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> Iterator[None]:
    """Has every rank of a ring that does not exist yet raise where one refuses its arguments: where the body raises
    TypeError or ValueError. The others get it in `agree_on`. Collective where it raises.

    Where `mesh_or_group` and `dims` are refused themselves, nothing tells which ranks wait, and this rank alone raises.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        with contextlib.suppress(Exception):  # `error` says what is wrong
            meshes = resolve_mesh(mesh_or_group, dims, unnamed_dimension(mesh_or_group, dims))
            ring = join_ranks(meshes, _with_timeout(timeout))
            with ring.released_on_error():
                compare_calls(ring, refusal=error)
        raise


def _with_timeout(timeout: float | datetime.timedelta | None) -> RingOptions:
    """Returns options with `timeout`; it may be what is refused."""
    try:
        return RingOptions.of({"timeout": timeout})
    except (TypeError, ValueError):
        return RingOptions()


def compare_calls(
    ring: Communicator, value: Any = None, *, options: str = "", refusal: Exception | None = None
) -> list[Any]:
    """Returns every rank's `value`, in ring order. Raises ValueError where a rank refuses its arguments of a collective
    call, on that rank its own `refusal`, and where ranks have different `options`. Collective."""
    reasons, every, values = zip(
        *ring.exchange((None if refusal is None else str(refusal), options, value)), strict=True
    )
    expect_success("Ring: the call", reasons, refusal, hint=f" of {ring.size}")
    expect_same("Ring: ranks disagree", every)
    return list(values)


def agree_on(options: RingOptions, ring: Communicator) -> str:
    """Compares the options of all ranks, and finds the hosts of the ranks and the links between GPUs. Returns the token
    of the ring. Collective; raises ValueError on every rank where one refuses its arguments, or where options differ.
    """
    mine = secrets.token_hex(4), this_process()
    tokens, processes = zip(*compare_calls(ring, mine, options=str(options)), strict=True)
    ring.placed = find_hosts(ring)
    if ring.device.type == "cuda":
        ring.wiring = find_wiring(ring)
    if ring.failure_report is not None:
        ring.failure_report.add_processes(ring.members, processes, ring.placed.of)
    return tokens[0]


def late_passes(options: RingOptions, device: torch.device, transport: str, tensor_parallel: bool = False) -> int:
    """Returns the number of operations whose gradients may still be arriving while a backward continues."""
    if options.late_gradients is not None:
        if tensor_parallel and options.late_gradients > 1:  # which compare gradients in an order that differs then
            raise ValueError(
                "Ring: expected late_gradients 0, 1 or None with tensor parallelism, whose ranks compare gradients in "
                f"the order of backward, got {options.late_gradients}"
            )
        return options.late_gradients
    if device.type == "cpu":
        return 0 if transport not in NETWORKED else 1 if tensor_parallel else 2
    return int(options.graphs == "off" and options.buffers != "lean")


def keeps_recomputed(options: RingOptions, ring: Communicator, transport: str) -> bool:
    """Returns whether a forward that is computed again keeps its weights for its backward, so that they travel once."""
    if options.keep_recomputed is not None:
        return options.keep_recomputed
    if options.buffers == "lean":
        return False
    if ring.device.type == "cpu":
        return transport in NETWORKED
    return ring.wiring is not None and not ring.wiring.any_to_any


def make_executor(ring: Communicator, options: RingOptions, connection: Connection, late: int) -> Any:
    """Returns the native executor of one rank. `late`: see `late_passes`."""
    native = _native.CheckedTransport(connection.native, ring.size) if options.checksum else connection.native
    executor = _native.Executor(native, ring.rank, ring.size, ring.device, ring.placed.count)
    executor.allow_late(late)
    executor.set_delay(datetime.timedelta(microseconds=options.transport_options.delay_us))
    return executor
