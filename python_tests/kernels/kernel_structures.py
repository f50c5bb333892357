"""The parameters of kernels and of their launches, as ctypes mirrors them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path


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


class DequantizeBlocks(Structure):
    _fields_ = [
        ("type", c_int32), ("format", c_uint8), ("numbers", c_int64), ("blocks", c_void_p), ("out", c_void_p),
    ]  # fmt: skip


class Addends(Structure):
    MOST = 15
    _fields_ = [("count", c_int32), ("values", c_void_p * MOST)]

    @classmethod
    def at(cls, *addresses: int) -> Addends:
        return cls(len(addresses), (c_void_p * cls.MOST)(*addresses))


class AddConverted(Structure):
    _fields_ = [("type", c_int32), ("numbers", c_int64), ("addends", Addends), ("sum", c_void_p)]


class CodeMatrix(Structure):
    _fields_ = [
        ("type", c_int32), ("rows", c_int64), ("columns", c_int64), ("values", c_void_p), ("stride", c_int64),
        ("block_rows", c_int64), ("block_columns", c_int64), ("amax", c_void_p),
    ]  # fmt: skip


class Codes(Structure):
    _fields_ = [
        ("matrix", CodeMatrix), ("format", c_int32), ("rule", c_int32), ("codes", c_void_p),
        ("row_stride", c_int64), ("column_stride", c_int64), ("scales", c_void_p),
        ("scale_row_stride", c_int64), ("scale_column_stride", c_int64), ("swizzled_columns", c_int64),
        ("transposed", c_uint8),
    ]  # fmt: skip


STRUCTURES = (
    *(HiddenForward, HiddenBackward, LogitSums, LogitGradient, EmbeddingGather, EmbeddingScatter, PackEntry),
    *(Quantize, Dequantize, AddConverted, DequantizeBlocks, CodeMatrix, Codes),
)


def load_exports(path: Path) -> ctypes.CDLL:
    """Loads a library that has the functions of kernel_exports.cpp."""
    library = ctypes.CDLL(str(path))
    library.allocate.restype = c_void_p
    library.allocate.argtypes = [c_size_t]
    library.release.argtypes = [c_void_p]
    library.pack.argtypes = [POINTER(PackEntry), c_int]
    for number, structure in enumerate(STRUCTURES):
        size = library.structure_bytes(number)
        if size != ctypes.sizeof(structure):
            raise RuntimeError(f"{structure.__name__}: {size} bytes in C++, {ctypes.sizeof(structure)} in its mirror")
    return library
