"""Counts the bytes of live tensors, and compares slots with a footprint."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rtp_ext


class LiveBytes(TorchDispatchMode):
    """Bytes of the CPU storages that were created since the `with` block was entered and still live, and their peak.

        with LiveBytes() as live:
            ...
        live.current, live.peak

    Every storage counts once, however many tensors share it. A DTensor counts its local part. The meter examines every
    operator call of this thread, including calls from C++; memory that an operator allocates and frees internally does
    not count. Storages that map a file are not counted, since they are the file's pages.

    Args:
        rings: their slots count too. Slots over shm are memory files, which only `slot_count` counts; slots of other
            transports are ordinary storages, which do not need `slot_count`.
    """

    def __init__(self, *rings: rtp_ext.Ring) -> None:
        super().__init__()
        self.rings = [ring for ring in rings if ring.transport == "shm"]
        self.peak = 0
        self._references: dict[int, weakref.ref] = {}  # by address of the storage
        self._bytes: dict[int, int] = {}  # of those that count

    @property
    def current(self) -> int:
        slots = (ring.slot_count(channel) for ring in self.rings for channel in ("weight", "gradient"))
        return sum(self._bytes.values()) + sum(slot.bytes for slot in slots)

    def reset_peak(self) -> None:
        """Resets the peak to the current bytes."""
        self.peak = self.current

    def __enter__(self) -> LiveBytes:
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):  # isinstance would evaluate properties of modules
                self._see(thing, allocated=False, counts=False)
        self.reset_peak()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_wraps(kind) for kind in types):
            return NotImplemented  # DTensor dispatches first, and this mode receives its operator calls
        # an argument seen for the first time was made without an operator: by torch.tensor, or over some memory
        self._see_all((args, kwargs), allocated=False)
        result = func(*args, **(kwargs or {}))
        self._see_all(result, allocated=func.overloadpacket not in _NOT_ALLOCATING)
        self.peak = max(self.peak, self.current)
        return result

    def _see_all(self, tree: Any, allocated: bool) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._see(leaf, allocated)

    def _see(self, tensor: Tensor, allocated: bool, counts: bool = True) -> None:
        if _wraps(type(tensor)) or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu":  # a fake tensor says "cpu" and has a storage on meta
            return
        key = storage._cdata
        if key not in self._references:
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
            if counts and (allocated or not _maps_a_file(storage.data_ptr())):
                self._bytes[key] = storage.nbytes()
        elif key in self._bytes:
            self._bytes[key] = storage.nbytes()  # it may have been resized

    def _forget(self, key: int) -> None:
        del self._references[key]
        self._bytes.pop(key, None)


# operators whose result may have a storage that they did not allocate
_NOT_ALLOCATING = (torch.ops.aten.set_, torch.ops.aten.from_file)


def _wraps(kind: type) -> bool:
    """Whether tensors of this type hold others, as DTensors do, and no storage."""
    return hasattr(kind, "__tensor_flatten__")


def _maps_a_file(address: int) -> bool:
    """Whether an address lies in a mapping of a file, or of memory shared between processes."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, _, _, _, inode = line.split()[:5]
            first, last = (int(bound, 16) for bound in bounds.split("-"))
            if first <= address < last:
                return inode != "0"
    return False


# Steps until hops are as far ahead as a footprint assumes: LookAhead::kManyTurns, and those that make the slots.
STEADY = 11


def assert_pool(ring: rtp_ext.Ring, planned: Any, where: str) -> None:
    """The slots of a ring are those of a footprint, to the byte."""
    for channel in ("weight", "gradient"):
        count, expected = ring.slot_count(channel), getattr(planned, channel)
        assert (count.slots, count.bytes) == (expected.slots, expected.bytes), f"{where}, {channel}"
        assert count.peak_bytes == expected.peak_bytes, f"{where}, {channel}"
