"""Bytes per rank: what a training step keeps, and the most it holds at once.

Persistent bytes are those of the storages behind this rank's parameters, gradients and optimizer state (a DTensor
counts its local part; a shared storage counts once).

`MemoryProbe` watches the tensor allocator from before a model is built until a few steps have run, and reports the last
step. *Peak* is the most bytes alive at one moment of that step, of everything allocated since the probe began: weights,
gradients, optimizer state, activations, unsharded weights, gradient buckets, send and receive buffers. The step keeps
its gradients in place (zeroed, not freed), so that peak minus persistent, the *transient*, compares across strategies:
it holds activations, temporaries and communication buffers, and no strategy hides one behind gradients not yet made.

On CUDA the caching allocator counts (`torch.cuda.max_memory_allocated`). On CPU the allocator keeps no count; torch's
profiler records every allocation and release on the thread that called for it. Not seen: scratch memory inside a GEMM
library and what a communication library takes for itself. The slots that a ring keeps in shared memory are outside the
allocator too; the ring counts them and they are added.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from strategies import Trainer
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

# The first step makes gradients and optimizer state, DDP lays out its buckets anew in the second.
PROBED_STEPS = 3
# The profiler's own messages (a CUDA build without a GPU among them) would run into the progress line.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
_PHASES = ("forward_backward", "optimizer")


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors` on this rank, each counted once."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `transient_*` is the peak of a phase beyond the persistent bytes; `slots` is part of it."""

    parameters: int
    gradients: int
    optimizer: int
    transient_forward_backward: int
    transient_optimizer: int
    slots: int

    @property
    def persistent(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def transient(self) -> int:
        return max(self.transient_forward_backward, self.transient_optimizer)

    @property
    def peak(self) -> int:
        return self.persistent + self.transient


class MemoryProbe:
    """Measures the memory of a trainer that is built, and takes `PROBED_STEPS` steps, inside `with probe:`.

    The steps are ordinary ones: nothing is undone afterwards. On CPU they are slower, since the profiler runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._profiler: Any = None
        self._base = 0
        self._peaks: dict[str, int] = {}

    def __enter__(self) -> "MemoryProbe":
        if self._cuda:
            self._base = torch.cuda.memory_allocated(self._device)
        else:
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profiler is not None:
            self._profiler.__exit__(*error)

    def step(self, trainer: Trainer, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One step of the trainer under observation. Returns its loss."""
        if trainer.ring is not None:
            trainer.ring.reset_peak()
        return trainer.step(inputs, targets, keep_gradients=True, phase=self._phase)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self._peaks[name] = torch.cuda.max_memory_allocated(self._device) - self._base
        else:
            with record_function(f"memory.{name}"):
                yield

    def memory(self, trainer: Trainer) -> Memory:
        """Memory of the last observed step. Call it after the `with` block, before the next step."""
        parameters = list(trainer.model.parameters())
        kept = (
            storage_bytes(parameters),
            storage_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
            storage_bytes(trainer.optimizer_tensors()),
        )
        peaks = self._peaks if self._cuda else _profiled_peaks(self._profiler)
        slots = unseen = 0
        if trainer.ring is not None:
            slots = sum(trainer.ring.slot_count(channel).peak_bytes for channel in ("weight", "gradient"))
            unseen = slots if trainer.ring.transport == "shm" else 0
        forward_backward, optimizer = (peaks[name] + unseen - sum(kept) for name in _PHASES)
        return Memory(*kept, forward_backward, optimizer, slots)


def _profiled_peaks(profiler: profile) -> dict[str, int]:
    """Most bytes alive during the last occurrence of each phase, from the allocator's events on the CPU."""
    events: list[tuple[int, int, int]] = []
    spans: dict[str, tuple[int, int]] = {}
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name.startswith("memory."):
            name = event.name.removeprefix("memory.")
            spans[name] = max(spans.get(name, (0, 0)), (event.start_time_ns, event.end_time_ns))

    # The profiler's own total outlives a recording, and a release may belong to an allocation before this one.
    sizes: dict[int, int] = {}
    live = 0
    levels: list[tuple[int, int]] = [(0, 0)]
    for time, address, size in sorted(events, key=lambda event: event[0]):
        if size > 0:
            sizes[address] = size
            live += size
        else:
            live -= sizes.pop(address, 0)
        levels.append((time, live))
    peaks = {}
    for name, (start, end) in spans.items():
        at_start = next(level for time, level in reversed(levels) if time < start)
        peaks[name] = max([at_start] + [level for time, level in levels if start <= time <= end])
    return peaks
