"""Mistakes in the kernels' sources, for the tests that must find them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Planted:
    """A mistake: `old` is replaced by `new` in a source; an empty `old` takes away the flags of the source.

    check: a check that reaches it. message: how the interpreter of PTX, or the check, reports it. capability: of the
    GPUs that have it.
    """

    source: str
    old: str
    new: str
    check: str
    message: str
    capability: int = 80

    def write(self, folder: Path) -> Path:
        """Returns a changed copy of the source."""
        text = (ROOT / "csrc" / "kernels" / self.source).read_text()
        assert not self.old or text.count(self.old) == 1, f"{self.source} has {text.count(self.old)} times {self.old!r}"
        copy = folder / self.source
        copy.write_text(text.replace(self.old, self.new) if self.old else text)
        return copy


WRONG = "expected|quantize float|pack float"  # the result differs from the reference

PLANTED = {
    "a bound that is one too large": Planted(
        "quantize.cu",
        "if (first + i < parameters.numbers) parameters.rounded",
        "if (first + i <= parameters.numbers) parameters.rounded",
        "quantize",
        "with no barrier between",  # the byte behind the numbers is that of a scale
    ),
    "no barrier before shared memory is read": Planted(
        "logits.cu",
        "__syncthreads();\n    if (thread < kWarp) {",
        "if (thread < kWarp) {",
        "logit_sums",
        "with no barrier between|where nothing was written",
    ),
    "no barrier before shared memory is written again": Planted(
        "logits.cu",
        "__syncthreads();  // before the warps of the next row write",
        "",
        "logit_sums",
        "with no barrier between",
    ),
    "words wider than the alignment": Planted(
        "embedding.cu",
        "if (alignment % sizeof(uint4) == 0)",
        "if (alignment % sizeof(uint32_t) == 0)",
        "gather_rows",
        "is no multiple of the 16 bytes",
    ),
    "truncation in place of rounding": Planted(
        "quantize.cu",
        "static_cast<int8_t>(bits_of(whole + kToInteger) - bits_of(kToInteger))",
        "static_cast<int8_t>(whole)",
        "quantize",
        WRONG,
    ),
    "products and sums contracted": Planted("quantize.cu", "", "", "dequantize", WRONG),
    "a sum that begins with no value": Planted(
        "logits.cu",
        "    PartialSums sums{kLowest, 0.0f, 0.0f};",
        "    PartialSums sums;\n    sums.most = kLowest, sums.scaled = 0.0f;",
        "logit_sums",
        "read before it is written|" + WRONG,
    ),
    "a mask of half a warp": Planted(
        "quantize.cu",
        "__shfl_xor_sync(kAllLanes, most, lanes)",
        "__shfl_xor_sync(0xffffu, most, lanes)",
        "quantize",
        "not in the mask of its shuffle",
    ),
    "lanes that leave before a shuffle": Planted(
        "quantize.cu",
        "    uint32_t most = 0;\n",
        "    uint32_t most = 0;\n    if (first >= parameters.numbers) return;\n",
        "quantize",
        "only some lanes of a warp reach a shuffle",
    ),
    "the scale of the next block": Planted(
        "quantize.cu",
        "const float scale = parameters.scales[first / kQuantizeBlock]",
        "const float scale = parameters.scales[(first + kWidth) / kQuantizeBlock]",
        "dequantize",
        "outside of all arrays|nothing was written|" + WRONG,
    ),
    "the two codes of a byte swapped": Planted(
        "blocks.cu",
        "const uint32_t code = high ?",
        "const uint32_t code = !high ?",
        "dequantize_blocks",
        WRONG,
    ),
    "the numbers of another format": Planted(
        "blocks.cu",
        "return kCodeNumber<kFormat, kFirst>",
        "return kCodeNumber<BlockFormat::nf4, kFirst>",
        "dequantize_blocks",
        WRONG,
    ),
    "a scale of the first column's block": Planted(
        "codes.cu",
        "float_of(Written(tile, m, cell).most_of(most))",
        "float_of(Written(tile, m, cell / kParts * kParts).most_of(most))",
        "code_paths",
        WRONG,
    ),
    "a given magnitude of the first column's block": Planted(
        "codes.cu",
        "m.amax ? m.amax[at.number]",
        "m.amax ? m.amax[at.band]",
        "code_paths",
        WRONG,
    ),
    "factors of a tile that others still read": Planted(
        "codes.cu",
        "find_most(most, values, tile, m);\n    __syncthreads();\n",
        "find_most(most, values, tile, m);\n",
        "code_paths",
        "with no barrier between|where nothing was written",
    ),
    "magnitudes of a tile that others still read": Planted(
        "codes.cu",
        "__syncthreads();  // before the next tile's are written",
        "",
        "code_paths",
        "with no barrier between",
    ),
    "a largest magnitude without an atomic operation": Planted(
        "codes.cu",
        "atomicMax(reinterpret_cast<unsigned*>(m.amax) + at.number, written.most_of(most));",
        "reinterpret_cast<unsigned*>(m.amax)[at.number] = written.most_of(most);",
        "code_paths",
        "with no barrier between|write to one place|" + WRONG,
    ),
    "windows at any address": Planted(
        "codes.cu",
        "misalignment(m.values) == 0 &&",
        "",
        "code_paths",
        "is no multiple of the 16 bytes",
    ),
    "codes in words at any address": Planted(
        "codes.cu",
        "|| misalignment(p.codes) % kWidth != 0",
        "",
        "quantize_codes",
        "is no multiple of the 8 bytes",
    ),
    "turned words of columns with a rest": Planted(
        "codes.cu",
        "return m.rows % kWidth == 0 && (",
        "return (",
        "code_paths",
        "is no multiple of the 8 bytes|outside of all arrays",
    ),
    "a row that its warps do not hold": Planted(
        "codes.cu",
        "m.block_columns >= m.columns && m.columns <= kWarps * kHeld",
        "m.block_columns >= m.columns",
        "code_paths",
        WRONG + "|other kernels",
    ),
    "NaNs as the GPU converts them": Planted(
        "codes.cu",
        "if (!nan) return",
        "if (true) return",
        "code_paths",
        WRONG,
        90,
    ),
    "the first of two numbers doubled": Planted(
        "codes.cu",
        "__nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, kKind)",
        "__nv_cvt_float2_to_fp8x2({2 * scaled.x, scaled.y}, __NV_SATFINITE, kKind)",
        "code_paths",
        WRONG,
        90,
    ),
    "a stride of a block in place of the grid": Planted(
        "pack.cu",
        "tile += gridDim.x",
        "tile += blockDim.x",
        "pack",
        WRONG,
    ),
    "a sum without an atomic addition": Planted(
        "embedding.cu",
        "atomicAdd(sums + i, value);",
        "round_to(sums[i], to_float(sums[i]) + to_float(value));",
        "add_rows",
        "with no barrier between|changes atomically|write to one place",
    ),
    "no guard of the warps that exist": Planted(
        "logits.cu",
        "if (thread < warps) sums = ",
        "if (warps > 0) sums = ",
        "logit_sums",
        "where nothing was written",
    ),
}
