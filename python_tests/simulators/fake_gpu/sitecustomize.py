"""A GPU for programs that need none: with FAKE_GPU=1 and this folder in PYTHONPATH every Python process finds one H100.

"cuda" is the CPU, streams, events and graphs do nothing, emulated rings over every link copy memory of the CPU, and
rings over `nccl` and `ce` run over `shm`. `bin/` has the driver's programs.

It proves that the tests of python_tests/gpu and the benchmarks of benchmarks/gpu start, that their options, files and
shapes fit together, and that what they expect follows from what they do. It proves nothing of a GPU: no kernel, stream,
capture, copy engine, NCCL call or time. Transports and captures have simulators of their own (`simulated_cuda`), and so
do kernels (`ptx`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

GIB = 1 << 30
NCCL = 23007  # the version that several ranks on one GPU need
LINKS = re.compile(r"sm-local|ce-local(:[124])?|nccl-self(:[1-9]\d*)?|pcie")
ON_GPUS = ("nccl", "ce")
BUILDS = ("setup.py", "-m pip ")  # commands that need no GPU


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, _: Any) -> None: ...

    wait_event = wait_stream

    def synchronize(self) -> None: ...

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return max(1e3 * (other.at - self.at), 1e-4)


class Graph:
    def replay(self) -> None: ...


class Properties:
    name = "NVIDIA H100 80GB HBM3"
    multi_processor_count, max_threads_per_multi_processor = 132, 2048
    total_memory, major, minor, uuid = 80 * GIB, 9, 0, "GPU-0"


@contextlib.contextmanager
def graph(*_: Any, **__: Any) -> Iterator[None]:
    yield


def always(value: Any) -> Callable[..., Any]:
    """A function of its own for each name: torch.compile knows those of torch.cuda by identity."""
    return lambda *_, **__: value


CUDA: dict[str, Any] = {
    "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": graph,
    "stream": lambda stream: stream or Stream(), "current_stream": lambda *_: Stream(),
    "is_available": always(True), "is_initialized": always(True), "is_current_stream_capturing": always(False),
    "device_count": always(1), "current_device": always(0), "get_device_properties": always(Properties()),
    "get_device_name": always(Properties.name), "get_device_capability": always((9, 0)),
    "can_device_access_peer": always(False), "mem_get_info": always((79 * GIB, 80 * GIB)),
}  # fmt: skip
BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
SILENT = (
    *("init", "_lazy_init", "set_device", "synchronize", "_sleep", "empty_cache", "reset_peak_memory_stats"),
    *("set_sync_debug_mode", "set_per_process_memory_fraction", "manual_seed_all"),
)


def on_cpu(value: Any) -> Any:
    """Returns the CPU in place of the GPU; any other value as it is. RuntimeError for a GPU beyond the only one."""
    import torch

    if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value):
        value = torch.device(value)
    if not isinstance(value, torch.device) or value.type != "cuda":
        return value
    if value.index:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({value}, of one fake GPU)")
    return torch.device("cpu")


def install() -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    class CudaIsCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.device:
                return func(*args, **kwargs)
            if func is torch.Tensor.cuda:
                return args[0].clone()
            return func(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    counted = {name: always(0) for name in BYTES} | {name: always(None) for name in SILENT}
    for name, value in (CUDA | counted).items():
        setattr(torch.cuda, name, value)
    torch.accelerator.current_stream = lambda *_: Stream()  # type: ignore[assignment, return-value]
    install_devices()
    CudaIsCpu().__enter__()
    with contextlib.suppress(ImportError):  # a program without the package
        install_rings()


def install_devices() -> None:
    """What takes a device and is no operator."""
    import torch
    import torch.distributed as dist
    from torch.amp import autocast_mode
    from torch.distributed import device_mesh

    plain: Any = torch.Generator

    class Generator(plain):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            return plain.__new__(plain, on_cpu(device))

    torch.Generator = Generator  # type: ignore[misc]
    autocast, mesh, group = autocast_mode.autocast.__init__, device_mesh.init_device_mesh, dist.init_process_group

    @functools.wraps(autocast)
    def made_autocast(self: Any, device_type: str, *args: Any, **options: Any) -> None:
        autocast(self, str(on_cpu(device_type)), *args, **options)

    @functools.wraps(group)
    def made_group(backend: str | None = None, *args: Any, device_id: Any = None, **options: Any) -> None:
        group("gloo" if backend and "nccl" in backend else backend, *args, **options)

    @functools.wraps(mesh)
    def made_mesh(device_type: str, *args: Any, **options: Any) -> Any:
        return mesh(str(on_cpu(device_type)), *args, **options)

    autocast_mode.autocast.__init__ = made_autocast  # type: ignore[method-assign]
    dist.init_process_group = made_group
    device_mesh.init_device_mesh = dist.init_device_mesh = made_mesh  # type: ignore[attr-defined]


def install_rings() -> None:
    import rtp_ext
    from rtp_ext import _native

    ring_type: Any = rtp_ext.Ring
    init, emulated = ring_type.__init__, ring_type.emulated.__func__

    @functools.wraps(init)
    def made(self: Any, *args: Any, transport: str = "auto", **options: Any) -> None:
        if transport in ON_GPUS:
            options.pop("collective", None)  # which shm does not have
        init(self, *args, transport="shm" if transport in ON_GPUS else transport, **options)
        if transport in ON_GPUS:
            self.transport = transport

    @functools.wraps(emulated)
    def made_emulated(cls: Any, size: int, *, device: Any = "cpu", link: Any = None, **options: Any) -> Any:
        place = on_cpu(device)
        if place is device:
            return emulated(cls, size, device=device, link=link, **options)
        if link is not None and not LINKS.fullmatch(link):
            raise ValueError(f"Ring.emulated: expected a link of a GPU, got {link}")
        options["graphs"] = "off"
        ring = emulated(cls, size, device=place, **options)
        ring.link = link or "sm-local"
        return ring

    ring_type.__init__ = made
    ring_type.emulated = classmethod(made_emulated)
    _native.nccl_versions = lambda: (NCCL, NCCL)  # type: ignore[assignment]


if os.environ.get("FAKE_GPU") == "1" and not any(word in " ".join(sys.orig_argv) for word in BUILDS):
    with contextlib.suppress(ImportError):  # a Python without torch
        install()
