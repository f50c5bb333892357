"""Loads the compiled extension. All other modules use it through this one."""

from __future__ import annotations

from typing import Any

import torch  # first: the extension links against the libraries that torch loads

from rtp_ext._rules import *  # noqa: F403

try:
    from rtp_ext import _C  # type: ignore[attr-defined]
    from rtp_ext._C import *  # type: ignore[import-not-found]  # noqa: F403
except ImportError as error:
    raise ImportError(
        f"rtp_ext: the compiled extension could not be loaded with torch {torch.__version__} ({error}). It must be "
        "built with the minor version and the CUDA of the torch that runs it: another wheel (docs/install.md), or "
        "pip install --no-build-isolation --force-reinstall --no-deps ."
    ) from error

if _C.compiled_torch.split(".")[:2] != torch.__version__.split(".")[:2]:
    raise ImportError(
        f"rtp_ext: built with torch {_C.compiled_torch}, but torch {torch.__version__} is loaded, of another minor "
        "version. Take another wheel (docs/install.md), or rebuild: "
        "pip install --no-build-isolation --force-reinstall --no-deps ."
    )

for _error, _meaning in (
    (_C.RotationError, "A ring cannot run an operation: it failed, was closed, or cannot be created."),
    (_C.RingTimeout, "A rank of the ring did not answer in time, or is gone. The ring cannot be used any more."),
    (_C.CudaError, "A call of CUDA failed."),
    (_C.NcclError, "A call of NCCL failed."),
):
    _error.__module__ = "rtp_ext"
    _error.__doc__ = _meaning


def __getattr__(name):  # for mypy, to which the extension has no types
    raise AttributeError(f"rtp_ext: the compiled extension has no {name}")


def nccl_versions() -> tuple[int, int] | None:
    """Returns the version of NCCL at compile time and that of the NCCL that torch loaded, as codes such as 23007; None
    in a build without CUDA."""
    if not _C.with_cuda:
        return None
    return _C.nccl_compiled_version(), _C.nccl_loaded_version()


def version_name(code: int) -> str:
    """Returns the usual spelling of an `NCCL_VERSION_CODE`: 23007 is 2.30.7."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def nccl_unique_id() -> bytes:
    """Returns a new NCCL unique id (128 bytes), for one communicator."""
    return _C.nccl_unique_id()


def ring_end(rank: int, ranks: int, device: torch.device, timeout: Any, news: Any) -> Any:
    """Returns a rank of a ring over CUDA devices. `news`: a connected PeerStatus, or None."""
    return _C.RingEnd(rank, ranks, device, timeout, news)


def ring_levels(end: Any, per_host: int) -> tuple[Any, Any]:
    """Returns the ends of the two transports of a rank: among the `per_host` ranks of its host, and between hosts."""
    return end.levels(per_host)


def nccl_transport(ids: list[bytes], end: Any, options: Any, registered: bool) -> Any:
    """Returns a transport with two NCCL communicators of its own. `options`: a TransportOptions. `registered`: its
    slots are registered with NCCL. Collective over the ranks."""
    settled = _C.NcclOptions(
        min_ctas=options.min_ctas, max_ctas=options.max_ctas, blocking=options.blocking, registered=registered
    )
    return _C.nccl_transport(ids, end, settled)


def ce_refusal() -> str | None:
    """Returns why this process cannot use copy engines between GPUs; None if it can, as far as one rank can find."""
    return _C.ce_refusal() if _C.with_cuda else "rtp_ext was built without CUDA"


def ce_transport(unique_id: bytes, end: Any) -> Any:
    """Returns a transport of copies between slots that all ranks can address. Collective over the ranks."""
    return _C.ce_transport(unique_id, end)


def set_ce_mode(transport: Any, channel: str, mode: str) -> None:
    """Sets the mode, `push` or `pull`, of hops of `channel` (weight or gradient) over a transport `ce`."""
    _C.set_ce_mode(transport, channel, mode)
