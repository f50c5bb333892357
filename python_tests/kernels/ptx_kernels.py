"""Runs the PTX of the kernels on NumPy memory, as nvcc emits it (`simulators/ptx`)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_void_p
from pathlib import Path

import numpy as np
from code_checks import FORMATS, RULES, bytes_room
from kernel_arrays import BYTES, CANARY, ELEMENTS, POISON, Array, decode, encode
from kernel_structures import (
    AddConverted,
    Addends,
    CodeMatrix,
    Codes,
    Dequantize,
    DequantizeBlocks,
    EmbeddingGather,
    EmbeddingScatter,
    HiddenBackward,
    HiddenForward,
    LogitGradient,
    Logits,
    LogitSums,
    PackEntry,
    Quantize,
    load_exports,
)
from ptx import Compiled
from ptx.machine import Launch, Machine
from ptx.memory import Buffer
from ptx.parse import parse
from quantize_checks import BLOCKS, bytes_array, layout

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")  # in the order of the kernels' enumeration


class Memory:
    """One array in memory of its own, with canaries around it and between its rows."""

    def __init__(self, library: ctypes.CDLL, array: Array) -> None:
        self.library, self.array = library, array
        self.bits = np.dtype(np.uint32 if BYTES[array.element] == 4 else np.uint16)
        front = array.offset * self.bits.itemsize + 64
        size = front + array.extent * self.bits.itemsize + 64
        self.base = library.allocate(size)
        assert self.base % 16 == 0
        self.address = self.base + front
        self.bytes = np.frombuffer((c_uint8 * size).from_address(self.base), np.uint8)
        self.bytes[:] = CANARY
        self.mine = np.zeros(size, bool)
        rows, columns = array.shape
        self.body = body = slice(front, front + array.extent * self.bits.itemsize)
        if array.extent:
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
        self.written = array.values is not None
        if self.written:
            self.put(encode(array.values, array.element))
        else:
            self.bytes[self.mine] = POISON

    def put(self, cells: np.ndarray) -> None:
        self.cells[:] = cells
        self.written = True

    def read(self) -> np.ndarray:
        """The values, after a look at the canaries."""
        assert (self.bytes[~self.mine] == CANARY).all(), "bytes around an array were written"
        return decode(np.ascontiguousarray(self.cells), self.array.element)

    def __del__(self) -> None:
        self.library.release(self.base)


class Ptx:
    """Runs kernels by their PTX. See `kernel_checks` for what every method is given and returns.

    compiled: by `ptx.build`.
    """

    name = "ptx"
    logit_elements = ELEMENTS
    gradient_elements = ELEMENTS
    hidden_roundings = 0  # between the steps of a hidden value: everything is in float32

    def __init__(self, compiled: Compiled, *, seed: int = 0) -> None:
        self.kernels = {name: kernel for text in compiled.texts for name, kernel in parse(text).items()}
        self._arrays: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._numbers: list[np.ndarray] = []
        self.launched: list[str] = []  # names of kernels
        self.aligned = False  # codes begin at multiples of 16 bytes, not anywhere
        self.rng = np.random.default_rng(seed)
        self.library = self._load(compiled.library)

    def _load(self, library: Path) -> ctypes.CDLL:
        loaded = load_exports(library)
        loaded.set_parameter_bytes.argtypes = [c_char_p, c_size_t]
        loaded.launch_kernel.restype = c_char_p
        loaded.launch_parameters.restype = c_void_p
        loaded.launch_parameter_bytes.restype = c_size_t
        loaded.launch_shape.argtypes = [c_int, POINTER(c_uint)]
        for kernel in self.kernels.values():
            loaded.set_parameter_bytes(kernel.name.encode(), kernel.parameter_bytes)
        return loaded

    def memory(self, array: Array) -> Memory:
        made = Memory(self.library, array)
        self._arrays.add(made)
        return made

    def numbers(self, values: np.ndarray) -> int:
        """Returns the address of an array of integers, for the next launch."""
        self._numbers.append(values)
        return values.ctypes.data

    def launch(self, name: str, structure: Structure) -> None:
        self.call(name, byref(structure))

    def call(self, name: str, *arguments) -> None:
        self.library.forget_launches()
        if getattr(self.library, name)(*arguments) != 0:
            raise RuntimeError(f"{name}: a launch of a kernel that is not known")
        buffers = [
            Buffer.at(
                each.address, each.mine[each.body] & each.written, f"{each.array.element} array {each.array.shape}"
            )
            for each in self._arrays
            if each.array.extent
        ]
        for values in self._numbers:
            if values.size:
                buffers.append(Buffer.at(values.ctypes.data, np.ones(values.nbytes, bool), "an array of integers"))
        for index in range(self.library.launch_count()):
            shape = (c_uint * 6)()
            self.library.launch_shape(index, shape)
            size = self.library.launch_parameter_bytes(index)
            parameters = ctypes.string_at(self.library.launch_parameters(index), size)
            launch = Launch(self.library.launch_kernel(index).decode(), tuple(shape[:3]), tuple(shape[3:]), parameters)
            self.launched.append(launch.kernel)
            Machine(self.kernels[launch.kernel], launch, buffers, self.rng).run()
        self._numbers.clear()

    def room(self, like: Array, element: str | None = None) -> Memory:
        """Returns an output shaped like `like`, with a different alignment and stride."""
        element = element or like.element
        stride = like.shape[1] + int(self.rng.choice([0, 0, 3, 8]))
        return self.memory(Array(None, element, stride, int(self.rng.integers(16 // BYTES[element])), like.shape))

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
        d, up, d_pre, d_gate = self.memory(d_value), self.memory(pre), self.room(pre), self.room(pre)
        through = None if gate is None else self.memory(gate)
        in_place = bool(self.rng.integers(2))
        out = d if in_place else self.room(pre)
        rows, columns = pre.shape
        self.launch(
            "hidden_backward",
            HiddenBackward(
                ELEMENTS.index(pre.element), ACTIVATIONS.index(activation), rows, columns,
                d.address, up.address, through and through.address,
                out.address, d_pre.address, d_gate.address,
                d_value.stride, pre.stride, gate.stride if gate else 0,
                out.array.stride, d_pre.array.stride, d_gate.array.stride,
            ),
        )  # fmt: skip
        return [out.read(), d_pre.read(), *([] if gate is None else [d_gate.read()])]

    def _logits(self, logits: Memory, targets: np.ndarray, rules: tuple[int, int, float]) -> Logits:
        rows, columns = logits.array.shape
        return Logits(
            ELEMENTS.index(logits.array.element), rows, columns, logits.address, logits.array.stride,
            self.numbers(targets), *rules,
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
                self.numbers(ids), ids.size, source.address, first_row, table.shape[0],
                table.shape[1] * size, target.address, out.stride * size,
            ),
        )  # fmt: skip
        return target.read()

    def add_rows(self, out: Array, ids: np.ndarray, values: Array, first_row: int, padding: int, alpha: float):
        target, source = self.memory(out), self.memory(values)
        self.launch(
            "embedding_scatter",
            EmbeddingScatter(
                self.numbers(ids), ids.size, ELEMENTS.index(values.element), source.address, values.stride,
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
            self.call("pack", entries, len(part))
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
        source.put(packed.view(np.uint32))
        places = source.address, source.address + layout(numbers)[0]
        self.launch("dequantize", Dequantize(ELEMENTS.index(out.element), numbers, *places, target.address, add))
        return target.read()

    def dequantize_blocks(self, packed: np.ndarray, out: Array, kind: str) -> np.ndarray:
        words = -(-packed.size // 4)
        source = self.memory(Array(None, "float32", words, int(self.rng.integers(4)), (1, words)))
        source.put(np.pad(packed, (0, 4 * words - packed.size)).view(np.uint32))
        target, which = self.memory(out), [*BLOCKS].index(kind)
        element = ELEMENTS.index(out.element)
        self.launch("dequantize_blocks", DequantizeBlocks(element, which, out.shape[1], source.address, target.address))
        return target.read()

    def add_converted(self, total: Array, values: Sequence[Array]) -> np.ndarray:
        target, kind = self.memory(total), ELEMENTS.index(values[0].element)
        sources = [self.memory(each) for each in values]
        addends = Addends.at(*(source.address for source in sources))
        self.launch("add_converted", AddConverted(kind, total.shape[1], addends, target.address))
        return target.read()

    def _bytes(self, count: int, values: np.ndarray | None = None) -> Memory:
        """Room for so many bytes, or with those of an array."""
        array = bytes_room(self.rng, count)
        array.offset = 0 if self.aligned else array.offset
        room = self.memory(array)
        if values is not None:
            room.put(values.view(np.uint32))
        return room

    def _taken(self, room: Memory, count: int) -> np.ndarray:
        """The first bytes of a room; those behind them must be as they were."""
        assert (room.bytes[~room.mine] == CANARY).all(), "bytes around an array were written"
        found = np.ascontiguousarray(room.cells).reshape(-1).view(np.uint8)
        assert (found[count:] == POISON).all(), "bytes behind an array were written"
        return found[:count].copy()

    def _code_matrix(self, array: Array, block: tuple[int, int], amax: np.ndarray | None) -> tuple[CodeMatrix, Memory]:
        """Returns the matrix and the memory of its amax."""
        source = self.memory(array)
        shape = [-(-size // step) for size, step in zip(array.shape, block, strict=True)]
        given = np.zeros(shape, np.float32) if amax is None else np.ascontiguousarray(amax)
        room = self._bytes(given.nbytes, given.reshape(-1))
        self._kept = source, room
        matrix = CodeMatrix(
            ELEMENTS.index(array.element), *array.shape, source.address, array.stride, *block, room.address
        )
        return matrix, room

    def block_amax(self, array: Array, block: tuple[int, int]) -> np.ndarray:
        matrix, room = self._code_matrix(array, block, None)
        self.launch("block_amax", matrix)
        shape = [-(-size // step) for size, step in zip(array.shape, block, strict=True)]
        return self._taken(room, 4 * shape[0] * shape[1]).view(np.float32).reshape(shape)

    def quantize_codes(
        self, array: Array, amax: np.ndarray | None, block, format: str, rule: str, transposed: bool, swizzle: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        rows, columns = array.shape
        size = 1 if rule.startswith("e8m0") else 4
        along_rows = block[1] == 1 and block[0] > 1
        shape = tuple(-(-size // step) for size, step in zip(array.shape, block, strict=True))
        high, wide = shape[::-1] if along_rows else shape
        count = -(-high // 128) * -(-wide // 4) * 512 if swizzle else shape[0] * shape[1] * size
        codes = self._bytes(rows * columns)
        scales = self._bytes(count, np.zeros(count, np.uint8) if swizzle else None)
        matrix, _ = self._code_matrix(array, block, amax)
        strides = (1, rows) if transposed else (columns, 1)
        # Scales that are not swizzled lie in the order of columns.
        places = (0, 0, wide, along_rows) if swizzle else (1, shape[0], 0, False)
        where = codes.address, *strides, scales.address, *places
        given = Codes(matrix, [*FORMATS].index(format), RULES.index(rule), *where)
        if amax is None and self.library.finds_amax(byref(given)):
            given.matrix.amax = None
        elif amax is None:
            self.launch("block_amax", matrix)
        self.launch("quantize_codes", given)
        found = self._taken(codes, rows * columns)
        codes_found = found.reshape(columns, rows).T if transposed else found.reshape(rows, columns)
        scales_found = self._taken(scales, count)
        if swizzle:
            return codes_found, scales_found
        return codes_found, scales_found.view(np.uint8 if size == 1 else np.float32).reshape(shape[::-1]).T
