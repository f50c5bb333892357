"""Loads the compiled extension. Everything else reaches it through this module."""

from __future__ import annotations

from typing import Any

import torch  # first: the extension links against the libraries that torch loads

try:
    from rtp_ext import _C  # type: ignore[attr-defined]
except ImportError as error:
    raise ImportError(
        f"rtp_ext: the compiled extension could not be loaded with torch {torch.__version__} ({error}). It must be "
        "built with the torch that runs it: pip install --no-build-isolation --force-reinstall --no-deps ."
    ) from error

if _C.compiled_torch != torch.__version__:
    raise ImportError(
        f"rtp_ext: built with torch {_C.compiled_torch}, but torch {torch.__version__} is loaded. Rebuild: "
        "pip install --no-build-isolation --force-reinstall --no-deps ."
    )

RotationError = _C.RotationError
RingTimeout = _C.RingTimeout
CudaError = _C.CudaError
NcclError = _C.NcclError
for _error, _meaning in (
    (RotationError, "A ring cannot do what it was asked for: it failed, was closed, or cannot be made."),
    (RingTimeout, "A rank of the ring did not answer in time, or is gone. The ring cannot be used any more."),
    (CudaError, "A call of CUDA failed."),
    (NcclError, "A call of NCCL failed."),
):
    _error.__module__ = "rtp_ext"
    _error.__doc__ = _meaning

with_cuda: bool = _C.with_cuda
CheckedTransport = _C.CheckedTransport
CompositeTransport = _C.CompositeTransport
CrossEntropyShape = _C.CrossEntropyShape
Execution = _C.Execution
Executor = _C.Executor
ExpertsResult = _C.ExpertsResult
ExpertsShape = _C.ExpertsShape
GEMM_TILES: tuple[tuple[int, int], ...] = _C.gemm_tiles
LinearBundle = _C.LinearBundle
LinearShape = _C.LinearShape
MlpResult = _C.MlpResult
MlpShape = _C.MlpShape
OperationSize = _C.OperationSize
PeerNews = _C.PeerNews
Projection = _C.Projection
RotationOptions = _C.RotationOptions
SLOT_CAP: int = _C.slot_cap  # bytes, where a ring is given none
Schedule = _C.Schedule
ShmTransport = _C.ShmTransport
SlotCount = _C.SlotCount
Step = _C.Step
TcpTransport = _C.TcpTransport
address_toward = _C.address_toward
c10d_transport = _C.c10d_transport
crc32c = _C.crc32c
cross_entropy_backward = _C.cross_entropy_backward
cross_entropy_forward = _C.cross_entropy_forward
embedding_backward = _C.embedding_backward
embedding_forward = _C.embedding_forward
emulated_transport = _C.emulated_transport
experts_backward = _C.experts_backward
experts_forward = _C.experts_forward
footprint = _C.footprint
hazards = _C.hazards
host_id = _C.host_id
interface_address = _C.interface_address
kernels = _C.kernels
linear_backward = _C.linear_backward
linear_forward = _C.linear_forward
make_schedule = _C.make_schedule
mlp_backward = _C.mlp_backward
mlp_forward = _C.mlp_forward
partial_linear_backward = _C.partial_linear_backward
partial_linear_forward = _C.partial_linear_forward
processes_id = _C.processes_id
record_on_signal = _C.record_on_signal
shard_size = _C.shard_size
shard_sizes = _C.shard_sizes
share_version = _C.share_version
travels_in_place = _C.travels_in_place
wastes_last_wave = _C.wastes_last_wave
wave_efficiency = _C.wave_efficiency
waves = _C.waves
wire_bytes = _C.wire_bytes


def nccl_versions() -> tuple[int, int] | None:
    """The NCCL compiled against and the one that torch loaded, as codes such as 23007; None in a build without CUDA."""
    if not with_cuda:
        return None
    return _C.nccl_compiled_version(), _C.nccl_loaded_version()


def version_name(code: int) -> str:
    """The usual spelling of an `NCCL_VERSION_CODE`: 23007 is 2.30.7."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def nccl_unique_id() -> bytes:
    """A new NCCL unique id (128 bytes), for one communicator."""
    return _C.nccl_unique_id()


def ring_end(rank: int, ranks: int, device: torch.device, timeout: Any, news: Any) -> Any:
    """A rank of a ring over CUDA devices. `news`: a connected PeerNews, or None."""
    return _C.RingEnd(rank, ranks, device, timeout, news)


def nccl_transport(ids: list[bytes], end: Any, min_ctas: int, max_ctas: int, blocking: bool, registered: bool) -> Any:
    """A transport with two NCCL communicators of its own. `blocking`: calls of NCCL return when they are done.
    `registered`: its slots are registered with NCCL. Collective over the ranks."""
    return _C.nccl_transport(ids, end, _C.NcclOptions(min_ctas, max_ctas, blocking, registered))


def ce_refusal() -> str | None:
    """Why this process cannot use copy engines between GPUs; None if it can, as far as it can tell alone."""
    return _C.ce_refusal() if with_cuda else "rtp_ext was built without CUDA"


def ce_transport(unique_id: bytes, end: Any) -> Any:
    """A transport of copies between slots that all ranks can address. Collective over the ranks."""
    return _C.ce_transport(unique_id, end)


def set_ce_mode(transport: Any, channel: str, mode: str) -> None:
    """How hops of `channel` (weight or gradient) travel over a transport of `ce_transport`: `push` or `pull`."""
    _C.set_ce_mode(transport, channel, mode)


def nccl_put_refusal() -> str | None:
    """Why the NCCL that torch loaded has no puts and signals; None if it has."""
    return _C.nccl_put_refusal() if with_cuda else "rtp_ext was built without CUDA"


def nccl_put_communicators() -> int:
    """How many unique ids `nccl_put_transport` takes."""
    return _C.nccl_put_communicators


def nccl_put_transport(ids: list[bytes], end: Any, min_ctas: int, max_ctas: int, blocking: bool) -> Any:
    """A transport of NCCL's puts and signals. Collective over the ranks."""
    return _C.nccl_put_transport(ids, end, min_ctas, max_ctas, blocking)
