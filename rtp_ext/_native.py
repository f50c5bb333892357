"""Loads the compiled extension. Everything else reaches it through this module."""

from __future__ import annotations

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
for _error in (RotationError, RingTimeout, CudaError, NcclError):
    _error.__module__ = "rtp_ext"

with_cuda: bool = _C.with_cuda
CrossEntropyShape = _C.CrossEntropyShape
Execution = _C.Execution
Executor = _C.Executor
ExpertsResult = _C.ExpertsResult
ExpertsShape = _C.ExpertsShape
LinearBundle = _C.LinearBundle
LinearShape = _C.LinearShape
MlpShape = _C.MlpShape
Projection = _C.Projection
RotationOptions = _C.RotationOptions
Schedule = _C.Schedule
ShmTransport = _C.ShmTransport
SlotCount = _C.SlotCount
Step = _C.Step
c10d_transport = _C.c10d_transport
cross_entropy_backward = _C.cross_entropy_backward
cross_entropy_forward = _C.cross_entropy_forward
embedding_backward = _C.embedding_backward
embedding_forward = _C.embedding_forward
emulated_transport = _C.emulated_transport
experts_backward = _C.experts_backward
experts_forward = _C.experts_forward
linear_backward = _C.linear_backward
linear_forward = _C.linear_forward
make_schedule = _C.make_schedule
mlp_backward = _C.mlp_backward
mlp_forward = _C.mlp_forward
partial_linear_backward = _C.partial_linear_backward
partial_linear_forward = _C.partial_linear_forward
shard_sizes = _C.shard_sizes
wastes_last_wave = _C.wastes_last_wave


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


def nccl_transport(weight_id: bytes, gradient_id: bytes, rank: int, ranks: int, device: torch.device, timeout):
    """A transport with two NCCL communicators of its own. Collective over the ranks."""
    return _C.nccl_transport(weight_id, gradient_id, rank, ranks, device, timeout)
