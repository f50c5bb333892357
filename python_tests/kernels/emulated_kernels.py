"""Runs the kernels on NumPy memory, built for emulated threads (`kernel_emulation`)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path

import numpy as np
from kernel_arrays import BYTES, CANARY, ELEMENTS, POISON, Array, decode, encode
from quantize_checks import bytes_array, layout

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")  # in the order of the kernels' enumeration


class HiddenForward(Structure):
    _fields_ = [
        ("type", c_int32), ("activation", c_uint8), ("rows", c_int64), ("columns", c_int64),
        ("pre", c_void_p), ("gate", c_void_p), ("value", c_void_p),
        ("pre_stride", c_int64), ("gate_stride", c_int64), ("value_stride", c_int64), ("windows", c_int64),
    ]  # fmt: skip


class HiddenBackward(Structure):
    _fields_ = [
        ("type", c_int32), ("activation", c_uint8), ("rows", c_int64), ("columns", c_int64),
        ("d_value", c_void_p), ("pre", c_void_p), ("gate", c_void_p),
        ("value", c_void_p), ("d_pre", c_void_p), ("d_gate", c_void_p),
        ("d_value_stride", c_int64), ("pre_stride", c_int64), ("gate_stride", c_int64),
        ("value_stride", c_int64), ("d_pre_stride", c_int64), ("d_gate_stride", c_int64), ("windows", c_int64),
    ]  # fmt: skip


class Logits(Structure):
    _fields_ = [
        ("type", c_int32), ("rows", c_int64), ("columns", c_int64), ("values", c_void_p), ("stride", c_int64),
        ("targets", c_void_p), ("first_column", c_int64), ("ignore_index", c_int64), ("soft_cap", c_float),
    ]  # fmt: skip


class LogitSums(Structure):
    _fields_ = [
        ("logits", Logits), ("most", c_void_p), ("scaled", c_void_p), ("hit", c_void_p), ("total", c_void_p),
    ]  # fmt: skip


class LogitGradient(Structure):
    _fields_ = [
        ("logits", Logits), ("gradient_type", c_int32), ("gradient", c_void_p), ("gradient_stride", c_int64),
        ("most", c_void_p), ("factor", c_void_p), ("upstream", c_void_p),
        ("hit_factor", c_float), ("everywhere", c_float), ("windows", c_int64),
    ]  # fmt: skip


class EmbeddingGather(Structure):
    _fields_ = [
        ("ids", c_void_p), ("tokens", c_int64), ("table", c_void_p), ("first_row", c_int64), ("rows", c_int64),
        ("row_bytes", c_int64), ("out", c_void_p), ("out_stride_bytes", c_int64),
    ]  # fmt: skip


class EmbeddingScatter(Structure):
    _fields_ = [
        ("ids", c_void_p), ("tokens", c_int64), ("values_type", c_int32), ("values", c_void_p),
        ("values_stride", c_int64), ("table_type", c_int32), ("table", c_void_p), ("table_stride", c_int64),
        ("first_row", c_int64), ("rows", c_int64), ("columns", c_int64), ("padding_idx", c_int64), ("alpha", c_float),
    ]  # fmt: skip


class PackEntry(Structure):
    _fields_ = [
        ("from_", c_void_p), ("to", c_void_p), ("elements", c_int64), ("from_type", c_int32), ("to_type", c_int32),
    ]  # fmt: skip


class Quantize(Structure):
    _fields_ = [
        ("type", c_int32), ("numbers", c_int64), ("values", c_void_p), ("rounded", c_void_p), ("scales", c_void_p),
    ]  # fmt: skip


class Dequantize(Structure):
    _fields_ = [
        ("type", c_int32), ("numbers", c_int64), ("rounded", c_void_p), ("scales", c_void_p), ("out", c_void_p),
        ("add", c_uint8),
    ]  # fmt: skip


class AddWidened(Structure):
    _fields_ = [("type", c_int32), ("numbers", c_int64), ("values", c_void_p), ("sum", c_void_p)]


STRUCTURES = (
    *(HiddenForward, HiddenBackward, LogitSums, LogitGradient, EmbeddingGather, EmbeddingScatter, PackEntry),
    *(Quantize, Dequantize, AddWidened),
)


class KernelError(RuntimeError):
    """The emulation found a race, a barrier that not all threads reach, or the like."""


class Memory:
    """One array in memory of its own, with canaries around it; where sanitized, the end of the memory is its end."""

    def __init__(self, library: ctypes.CDLL, array: Array, sanitized: bool) -> None:
        self.library, self.array = library, array
        self.bits = np.dtype(np.uint32 if BYTES[array.element] == 4 else np.uint16)
        front = array.offset * self.bits.itemsize + (0 if sanitized else 64)
        size = front + array.extent * self.bits.itemsize + (0 if sanitized else 64)
        self.base = library.allocate(max(size, 1))
        assert self.base % 16 == 0
        self.address = self.base + front
        self.bytes = (
            np.frombuffer((c_uint8 * size).from_address(self.base), np.uint8) if size else np.zeros(0, np.uint8)
        )
        self.bytes[:] = CANARY
        self.mine = np.zeros(size, bool)
        rows, columns = array.shape
        if array.extent:
            body = slice(front, front + array.extent * self.bits.itemsize)
            self.cells = np.lib.stride_tricks.as_strided(
                self.bytes[body].view(self.bits),
                (rows, columns),
                (array.stride * self.bits.itemsize, self.bits.itemsize),
            )
            mine = np.lib.stride_tricks.as_strided(
                self.mine[body], (rows, columns * self.bits.itemsize), (array.stride * self.bits.itemsize, 1)
            )
            mine[:] = True
        else:
            self.cells = np.zeros((rows, columns), self.bits)
        if array.values is None:
            self.bytes[self.mine] = POISON
        else:
            self.cells[:] = encode(array.values, array.element)

    def read(self) -> np.ndarray:
        """The values, after a look at the canaries."""
        assert (self.bytes[~self.mine] == CANARY).all(), "bytes around an array were written"
        return decode(np.ascontiguousarray(self.cells), self.array.element)

    def __del__(self) -> None:
        self.library.release(self.base)


class Emulated:
    """Runs kernels on emulated threads. See `kernel_checks` for what every method is given and returns."""

    name = "emulated"
    logit_elements = ELEMENTS
    gradient_elements = ELEMENTS
    hidden_roundings = 0  # between the steps of a hidden value: everything is in float32

    def __init__(self, library: Path, *, sanitized: bool = False, seed: int = 0) -> None:
        self.library = load(library)
        self.sanitized = sanitized
        self.rng = np.random.default_rng(seed)

    def memory(self, array: Array) -> Memory:
        return Memory(self.library, array, self.sanitized)

    def room(self, like: Array, element: str | None = None) -> Memory:
        """Returns an output shaped like `like`, with a different alignment and stride."""
        element = element or like.element
        stride = like.shape[1] + int(self.rng.choice([0, 0, 3, 8]))
        return self.memory(Array(None, element, stride, int(self.rng.integers(16 // BYTES[element])), like.shape))

    def launch(self, name: str, structure: Structure) -> None:
        self.library.set_backward(int(self.rng.integers(2)))
        if getattr(self.library, name)(byref(structure)) != 0:
            raise KernelError(f"{name}: {self.library.message().decode()}")

    def hidden_forward(self, activation: str, pre: Array, gate: Array | None) -> np.ndarray:
        up, out = self.memory(pre), self.room(pre)
        through = None if gate is None else self.memory(gate)
        rows, columns = pre.shape
        self.launch(
            "hidden_forward",
            HiddenForward(
                ELEMENTS.index(pre.element), ACTIVATIONS.index(activation), rows, columns,
                up.address, through and through.address, out.address,
                pre.stride, gate.stride if gate else 0, out.array.stride,
            ),
        )  # fmt: skip
        return out.read()

    def hidden_backward(self, activation: str, d_value: Array, pre: Array, gate: Array | None) -> list[np.ndarray]:
        d, up, out = self.memory(d_value), self.memory(pre), self.room(pre)
        through = None if gate is None else self.memory(gate)
        in_place = bool(self.rng.integers(2))
        first = d if in_place else self.room(pre)  # gradient of the gate, or of pre where there is none
        d_pre = first if through is None else self.room(pre)
        rows, columns = pre.shape
        self.launch(
            "hidden_backward",
            HiddenBackward(
                ELEMENTS.index(pre.element), ACTIVATIONS.index(activation), rows, columns,
                d.address, up.address, through and through.address,
                out.address, d_pre.address, first.address,
                d_value.stride, pre.stride, gate.stride if gate else 0,
                out.array.stride, d_pre.array.stride, first.array.stride,
            ),
        )  # fmt: skip
        return [out.read(), d_pre.read(), *([] if gate is None else [first.read()])]

    def _logits(self, logits: Memory, targets: np.ndarray, rules: tuple[int, int, float]) -> Logits:
        rows, columns = logits.array.shape
        return Logits(
            ELEMENTS.index(logits.array.element), rows, columns, logits.address, logits.array.stride,
            targets.ctypes.data, *rules,
        )  # fmt: skip

    def add_logits(self, logits: Array, targets: np.ndarray, rules, sums: list[np.ndarray | None]) -> list:
        z = self.memory(logits)
        rows = [None if s is None else self.memory(Array(s[None, :], "float32", s.size, 0, (1, s.size))) for s in sums]
        self.launch("logit_sums", LogitSums(self._logits(z, targets, rules), *(row and row.address for row in rows)))
        z.read()
        return [None if row is None else row.read()[0] for row in rows]

    def logit_gradient(
        self, logits: Array, targets: np.ndarray, rules, terms: list[np.ndarray], factors: tuple[float, float], element
    ) -> np.ndarray:
        z = self.memory(logits)
        out = z if element == logits.element and self.rng.integers(2) else self.room(logits, element)
        rows = [self.memory(Array(t[None, :], "float32", t.size, 0, (1, t.size))) for t in terms]
        self.launch(
            "logit_gradient",
            LogitGradient(
                self._logits(z, targets, rules), ELEMENTS.index(element), out.address, out.array.stride,
                *(row.address for row in rows), *factors,
            ),
        )  # fmt: skip
        return out.read()

    def gather_rows(self, ids: np.ndarray, table: Array, first_row: int, out: Array) -> np.ndarray:
        source, target = self.memory(table), self.memory(out)
        size = BYTES[table.element]
        self.launch(
            "embedding_gather",
            EmbeddingGather(
                ids.ctypes.data, ids.size, source.address, first_row, table.shape[0],
                table.shape[1] * size, target.address, out.stride * size,
            ),
        )  # fmt: skip
        return target.read()

    def add_rows(self, out: Array, ids: np.ndarray, values: Array, first_row: int, padding: int, alpha: float):
        target, source = self.memory(out), self.memory(values)
        self.launch(
            "embedding_scatter",
            EmbeddingScatter(
                ids.ctypes.data, ids.size, ELEMENTS.index(values.element), source.address, values.stride,
                ELEMENTS.index(out.element), target.address, out.stride, first_row, *out.shape, padding, alpha,
            ),
        )  # fmt: skip
        return target.read()

    def pack(self, sources: list[Array], targets: list[Array]) -> list[np.ndarray]:
        pairs = [(self.memory(a), self.memory(b)) for a, b in zip(sources, targets, strict=True)]
        for start in range(0, len(pairs), 64):
            part = pairs[start : start + 64]
            entries = (PackEntry * len(part))(
                *(
                    PackEntry(
                        a.address, b.address, int(np.prod(a.array.shape)),
                        ELEMENTS.index(a.array.element), ELEMENTS.index(b.array.element),
                    )
                    for a, b in part
                )
            )  # fmt: skip
            if self.library.pack(entries, len(part)) != 0:
                raise KernelError(f"pack: {self.library.message().decode()}")
        return [b.read() for _, b in pairs]

    def quantize(self, values: Array) -> np.ndarray:
        numbers = values.shape[1]
        source, room = self.memory(values), self.memory(bytes_array(self.rng, numbers))
        places = room.address, room.address + layout(numbers)[0]
        self.launch("quantize", Quantize(ELEMENTS.index(values.element), numbers, source.address, *places))
        room.read()
        return np.ascontiguousarray(room.cells).reshape(-1).view(np.uint8).copy()

    def dequantize(self, packed: np.ndarray, out: Array, add: bool) -> np.ndarray:
        numbers = out.shape[1]
        source, target = self.memory(bytes_array(self.rng, numbers)), self.memory(out)
        source.cells[:] = packed.view(np.uint32)
        places = source.address, source.address + layout(numbers)[0]
        self.launch("dequantize", Dequantize(ELEMENTS.index(out.element), numbers, *places, target.address, add))
        return target.read()

    def add_converted(self, total: Array, values: Array) -> np.ndarray:
        target, source = self.memory(total), self.memory(values)
        kind = ELEMENTS.index(values.element)
        self.launch("add_converted", AddWidened(kind, values.shape[1], source.address, target.address))
        return target.read()


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.allocate.restype = c_void_p
    library.allocate.argtypes = [c_size_t]
    library.release.argtypes = [c_void_p]
    library.message.restype = ctypes.c_char_p
    library.pack.argtypes = [POINTER(PackEntry), c_int]
    library.planted.argtypes = [c_int, c_void_p, c_int]
    for name in ("bfloat16", "float16"):
        getattr(library, f"{name}_bits").argtypes = [c_float]
        getattr(library, f"{name}_bits").restype = ctypes.c_uint16
        getattr(library, f"{name}_value").argtypes = [ctypes.c_uint16]
        getattr(library, f"{name}_value").restype = c_float
    for number, structure in enumerate(STRUCTURES):
        size = library.structure_bytes(number)
        if size != ctypes.sizeof(structure):
            raise RuntimeError(f"{structure.__name__}: {size} bytes in C++, {ctypes.sizeof(structure)} in its mirror")
    return library
