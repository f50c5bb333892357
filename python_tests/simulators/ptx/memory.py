"""Memory of a kernel: bounds, alignment, bytes that were never written, and races."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

NONE, SEVERAL, ATOMIC = -1, -2, -3  # in place of the number of a thread


class Fault(RuntimeError):
    """A kernel does what a GPU does not define."""


class Buffer:
    """Bytes from `base` on. valid: which of them were written. For races: the last thread that wrote or read a byte,
    and the number of barriers that its block had passed."""

    def __init__(self, base: int, data: np.ndarray, valid: np.ndarray, what: str) -> None:
        self.base, self.data, self.valid, self.what = base, data, valid, what
        self.forget()

    @classmethod
    def at(cls, address: int, valid: np.ndarray, what: str) -> Buffer:
        """Returns `valid.size` bytes of this process from an address on."""
        data = np.frombuffer((ctypes.c_uint8 * valid.size).from_address(address), np.uint8)
        return cls(address, data, valid.copy(), what)

    def forget(self) -> None:
        """Begins a kernel: those of one stream run one after the other."""
        self.writer, self.write_epoch = np.full(self.data.size, NONE), np.zeros(self.data.size, np.int64)
        self.reader, self.read_epoch = self.writer.copy(), self.write_epoch.copy()


class Space:
    """Buffers that do not overlap.

    threads, epochs: for each access, the number of its thread and of the barriers that its block has passed.
    block: number of threads in a block; None where nothing is written.
    """

    def __init__(self, name: str, buffers: Sequence[Buffer], block: int | None = None) -> None:
        self.name, self.block = name, block
        self.buffers = sorted(buffers, key=lambda buffer: buffer.base)
        self.bases = np.array([buffer.base for buffer in self.buffers], np.uint64)
        for buffer in self.buffers:
            buffer.forget()

    def _places(self, addresses: np.ndarray, width: int):
        """Yields (buffer, which accesses are in it, their bytes [accesses, width])."""
        if (wrong := addresses % np.uint64(width) != 0).any():
            raise Fault(
                f"{self.name} address {int(addresses[wrong][0]):#x} is no multiple of the {width} bytes accessed"
            )
        owners = np.searchsorted(self.bases, addresses, "right") - 1
        alone = owners.size > 0 and (owners == owners[0]).all()
        for owner in owners[:1] if alone else np.unique(owners):
            which = np.arange(owners.size) if alone else np.flatnonzero(owners == owner)
            buffer = self.buffers[owner]
            first = addresses[which].astype(np.int64) - buffer.base
            if owner < 0 or (outside := first + width > buffer.data.size).any():
                at = int(addresses[which][0 if owner < 0 else np.flatnonzero(outside)[0]])
                end = f"; {buffer.what} ends at {buffer.base + buffer.data.size:#x}" if owner >= 0 else ""
                raise Fault(f"{width} bytes at {self.name} address {at:#x} are outside of all arrays{end}")
            yield buffer, which, first[:, None] + np.arange(width)

    def load(self, addresses: np.ndarray, width: int, threads: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Returns uint8 [accesses, width]."""
        out = np.empty((addresses.size, width), np.uint8)
        for buffer, which, places in self._places(addresses, width):
            if not buffer.valid[places].all():
                raise Fault(f"{buffer.what} is read where nothing was written")
            out[which] = buffer.data[places]
            if self.block is not None:
                self._check(buffer, places, threads[which], epochs[which], writes=False)
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray, epochs: np.ndarray) -> None:
        """values: uint8 [accesses, width]."""
        for buffer, which, places in self._places(addresses, values.shape[1]):
            if np.unique(places).size != places.size:
                raise Fault(f"two threads write to one place of {buffer.what} in one instruction")
            self._check(buffer, places, threads[which], epochs[which], writes=True)
            buffer.data[places] = values[which]
            buffer.valid[places] = True

    def exchange(self, address: int, width: int, change, thread: int) -> np.ndarray:
        """An atomic operation: replaces uint8 [width] by `change` of it. Returns the old bytes."""
        ((buffer, _, places),) = self._places(np.array([address], np.uint64), width)
        if not buffer.valid[places].all():
            raise Fault(f"{buffer.what} is read where nothing was written")
        writer = buffer.writer[places]
        if ((writer >= 0) & (writer != thread)).any():
            raise Fault(f"{buffer.what}: thread {thread} changes atomically what thread {writer.max()} wrote")
        old = buffer.data[places[0]].copy()
        buffer.data[places[0]] = change(old)
        buffer.writer[places] = ATOMIC
        return old

    def _check(self, buffer: Buffer, places: np.ndarray, threads: np.ndarray, epochs: np.ndarray, writes: bool) -> None:
        """Records the accesses. Raises Fault where they and an earlier one of another thread have no order."""
        mine = np.repeat(threads[:, None], places.shape[1], 1)
        now = np.repeat(epochs[:, None], places.shape[1], 1)
        for other, epoch, verb in (
            (buffer.writer[places], buffer.write_epoch[places], "wrote"),
            *([(buffer.reader[places], buffer.read_epoch[places], "read")] if writes else []),
        ):
            apart = (other >= 0) & (other != mine)
            ordered = (other // self.block == mine // self.block) & (epoch < now)
            wrong = (apart & ~ordered) | ((other == SEVERAL) & (epoch >= now))
            wrong |= (other == ATOMIC) & writes
            if wrong.any():
                at = tuple(np.argwhere(wrong)[0])
                does = "writes" if writes else "reads"
                raise Fault(
                    f"{buffer.what}: thread {mine[at]} {does} what thread {other[at]} {verb}, with no barrier between"
                )
        if writes:
            buffer.writer[places], buffer.write_epoch[places] = mine, now
            buffer.reader[places] = NONE
            return
        flat, thread, epoch = places.ravel(), mine.ravel(), now.ravel()
        before = buffer.reader[flat]
        several = (before != NONE) & (before != thread) & (buffer.read_epoch[flat] >= epoch)
        buffer.reader[flat] = np.where(several, SEVERAL, thread)
        shared = np.unique(flat, return_counts=True)
        buffer.reader[shared[0][shared[1] > 1]] = SEVERAL
        buffer.read_epoch[flat] = np.maximum(buffer.read_epoch[flat], epoch)
