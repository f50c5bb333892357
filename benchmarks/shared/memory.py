"""Bytes per rank: what training keeps, and the most that one step holds.

*Persistent* bytes are those of the storages of this rank's parameters, gradients and optimizer state (a DTensor counts
its local part; a shared storage counts once).

*Transient* bytes are the maximum beyond them at any moment of a step: activations, temporaries, unsharded weights,
gradient buckets, send and receive buffers. *Peak* is the sum. `MemoryProbe` observes a trainer from before its model is
built until it has taken a few steps, and reports the last step. These steps keep their gradients in place (zeroed, not
freed), so that transients are comparable across strategies and do not use memory of gradients not yet allocated.

On CUDA the caching allocator counts; memory that a communication library allocates itself is not included. On CPU no
allocator counts (torch's profiler misses memory that communication threads release), so the kernel does: the C library
is configured to map every block of 64 KiB and more separately and to unmap it when freed, and the high-water mark of
resident memory is reset before each phase of a step. The count of blocks that survive from step to step is the C
library's count of mapped bytes; memory shared between ranks is the size of the memory files that this rank created. A
transient is then exact to about 3 MiB. Needs Linux and glibc 2.33.

That counts memory shared between ranks where it was created, however many ranks map it. `pss` is the kernel's own
measure, on CPUs: the largest proportional set size (each page divided by the number of processes that map it) of the
last step, beyond that at the start. The kernel keeps no high-water mark of it, so that a thread reads it again and
again, some 20 to 200 times a second: what lives for less is missed. It contains small blocks and what libraries
allocate.
"""

import ctypes
import gc
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shared.strategies import Trainer

# The first step makes gradients and optimizer state, DDP lays out its buckets anew in the second.
PROBED_STEPS = 3
_PHASES = ("forward_backward", "optimizer")
_MAPPED = 64 * 1024
_PAGE = 4096
_BETWEEN_READINGS = 0.004, 0.05  # seconds, at least and at most; page faults wait while one is taken
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `transient_*` is the peak of a phase beyond the persistent bytes; `slots` is part of it.

    pss: the largest proportional set size, None on a GPU.
    """

    parameters: int
    gradients: int
    optimizer: int
    transient_forward_backward: int
    transient_optimizer: int
    slots: int
    pss: int | None

    @property
    def transient(self) -> int:
        return max(self.transient_forward_backward, self.transient_optimizer)

    @property
    def kept(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        return self.kept + self.transient

    def row(self) -> dict[str, int]:
        """Returns the bytes under the names of a line of results, without `pss`."""
        return {
            "parameter_bytes": self.parameters,
            "gradient_bytes": self.gradients,
            "optimizer_bytes": self.optimizer,
            "peak_bytes": self.peak,
            "transient_bytes": self.transient,
            "transient_forward_backward_bytes": self.transient_forward_backward,
            "transient_optimizer_bytes": self.transient_optimizer,
            "slot_bytes": self.slots,
        }


class MemoryProbe:
    """Measures the memory of a trainer that is built, and takes `PROBED_STEPS` steps, inside `with probe:`.

    The steps are ordinary ones: nothing is undone afterwards. On CPU they are slower, and afterwards the C library
    keeps freed blocks below 32 MiB for reuse, as it would have learnt to by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._meter = _CudaMeter(device) if device.type == "cuda" else _HostMeter()
        self._peaks: dict[str, int] = {}
        self._pss: dict[str, int | None] = {}

    def __enter__(self) -> "MemoryProbe":
        self._meter.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._meter.stop()

    def step(self, trainer: Trainer, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Runs one step of the trainer under observation. Returns its loss."""
        if trainer.ring is not None:
            trainer.ring.reset_peak()
        return trainer.step(inputs, targets, keep_gradients=True, phase=self._phase)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._meter.reset()
        with self._meter.watching():
            yield
        self._peaks[name] = self._meter.peak()
        self._pss[name] = self._meter.pss()

    def memory(self, trainer: Trainer) -> Memory:
        """Memory of the last observed step. Call it inside the `with` block."""
        every = (trainer.parameter_tensors(), trainer.gradient_tensors(), trainer.optimizer_tensors())
        kinds = [_storages(tensors) for tensors in every]
        kept = sum(self._meter.footprint(size) for kind in kinds for size in kind)
        forward_backward, optimizer = (self._peaks[name] - kept for name in _PHASES)
        slots = 0
        if trainer.ring is not None:
            slots = sum(trainer.ring.slot_count(channel).peak_bytes for channel in ("weight", "gradient"))
        sets = [size for size in self._pss.values() if size is not None]
        sizes = (*(sum(kind) for kind in kinds), forward_backward, optimizer, slots)
        return Memory(*sizes, max(sets) if sets else None)


def _load_libraries(device: torch.device) -> None:
    """Takes a step with a small layer, so that what torch sets up on first use is not taken for the model's."""
    layer = torch.nn.Linear(512, 512, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(512, 512, device=device)).sum().backward()
    optimizer.step()
    del layer, optimizer
    gc.collect()


def _storages(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Sizes in bytes of the storages behind `tensors` on this rank, each once."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = (tensor.untyped_storage() for tensor in local)
    return list({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _CudaMeter:
    """Bytes in use in torch's caching allocator, beyond those at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0

    def start(self) -> None:
        _load_libraries(self._device)
        self._base = torch.cuda.memory_allocated(self._device)

    def stop(self) -> None:
        pass

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._base

    def watching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pss(self) -> int | None:
        return None

    def footprint(self, size: int) -> int:
        """Bytes that the allocator counts for a storage of `size` bytes."""
        return -(-size // 512) * 512


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


class _HostMeter:
    """Bytes in mapped blocks of the C library and in shared memory files of this process, beyond those at the start."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        if not hasattr(self._libc, "mallinfo2") or not Path("/proc/self/clear_refs").exists():
            raise RuntimeError(
                "memory on CPU is measured through Linux's /proc and glibc 2.33 or newer: not found here"
            )
        self._libc.mallinfo2.restype = _MallocInfo
        self._libc.malloc.restype = ctypes.c_void_p
        self._holes: list[int] = []
        self._base = 0
        self._held = 0
        self._resident = 0
        self._least = 0  # PSS at the start
        self._largest = 0

    def start(self) -> None:
        self._libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED)
        _load_libraries(torch.device("cpu"))
        self._fill_holes()
        self._base = self._mapped()
        self._least = proportional_bytes()

    def stop(self) -> None:
        while self._holes:
            self._libc.free(ctypes.c_void_p(self._holes.pop()))
        self._libc.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        self._libc.mallopt(_M_TRIM_THRESHOLD, 64 * 2**20)

    def reset(self) -> None:
        self._libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._held = self._mapped() - self._shared()
        self._resident = status_bytes("VmRSS")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Reads the PSS while the body runs, and once after it."""
        ended, sizes = threading.Event(), list[int]()

        def watch() -> None:
            taken = 0.0
            while not ended.wait(min(max(_BETWEEN_READINGS[0], 9 * taken), _BETWEEN_READINGS[1])):
                start = time.perf_counter()
                sizes.append(proportional_bytes())
                taken = time.perf_counter() - start

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
        self._largest = max([*sizes, proportional_bytes()])

    def pss(self) -> int | None:
        return self._largest - self._least

    def peak(self) -> int:
        # shared memory is allocated once and kept, so its level at the end is its peak
        return self._held + status_bytes("VmHWM") - self._resident + self._shared() - self._base

    def footprint(self, size: int) -> int:
        """Bytes that `_mapped` counts for a storage of `size` bytes: whole pages with a header; nothing if small."""
        return -(-(size + 80) // _PAGE) * _PAGE if size >= _MAPPED else 0

    def _fill_holes(self) -> None:
        """Takes every free block of the heap that a tensor could land in, unseen, instead of being mapped."""
        while True:
            before = self._libc.mallinfo2().hblkhd
            block = self._libc.malloc(_MAPPED)
            if self._libc.mallinfo2().hblkhd > before:
                self._libc.free(ctypes.c_void_p(block))
                return
            self._holes.append(block)

    def _mapped(self) -> int:
        return self._libc.mallinfo2().hblkhd + self._shared()

    def _shared(self) -> int:
        total = 0
        for entry in os.scandir("/proc/self/fd"):
            try:
                if os.readlink(entry.path).startswith("/memfd:"):
                    total += os.stat(entry.path).st_size
            except FileNotFoundError:  # closed meanwhile, such as the listing's own
                continue
        return total


def proportional_bytes() -> int:
    """Returns the proportional set size of this process, in bytes."""
    return _bytes_of("/proc/self/smaps_rollup", "Pss")


def resources() -> dict[str, int]:
    """Returns what a process must not take more and more of in a long run."""
    threads = re.search(r"^Threads:\s*(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    descriptors = len(os.listdir("/proc/self/fd"))
    return {"resident_bytes": status_bytes("VmRSS"), "descriptors": descriptors, "threads": int(threads[1])}


def status_bytes(field: str) -> int:
    """Returns a size from /proc/self/status, in bytes."""
    return _bytes_of("/proc/self/status", field)


def _bytes_of(file: str, field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB$", Path(file).read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{file} has no {field}")
    return int(found.group(1)) * 1024
