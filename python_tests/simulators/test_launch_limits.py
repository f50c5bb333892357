"""Every launch of a kernel is within the limits of GPUs of compute capability 8.0, 9.0 and 10.0, for large arrays.

Registers: a thread has at most 255, and 256 threads then fit into the 65,536 of an SM. A kernel of more threads needs
`__launch_bounds__`, by which ptxas gives each thread fewer.
"""

import re
from ctypes import byref, c_uint
from itertools import product

import ptx
import pytest
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
)
from ptx_kernels import Ptx

ROWS, COLUMNS = 1 << 20, 1 << 18  # tokens, and entries of a vocabulary
AT = 1 << 12  # an address; nothing runs
THREADS, UNBOUNDED, SHARED, GRID_Y = 1024, 256, 48 << 10, 65535
MOST_BLOCKS = int(ptx.FLAGS[-1].partition("RTP_MOST_BLOCKS=")[2])

needs_nvcc = pytest.mark.skipif(ptx.nvcc() is None, reason="no nvcc in PATH or /usr/local/cuda")


def structures(rows: int, columns: int):
    """(launcher, its arguments) for all kernels and element types."""
    for kind, activation, gate in product(range(3), range(4), (AT, None)):
        yield "hidden_forward", HiddenForward(kind, activation, rows, columns, AT, gate, AT, *[columns] * 3)
        yield (
            "hidden_backward",
            HiddenBackward(*(kind, activation, rows, columns, AT, AT, gate, AT, AT, AT), *[columns] * 6),
        )
    for kind, other in product(range(3), range(3)):
        logits = Logits(kind, rows, columns, AT, columns, AT, 0, -100, 0.0)
        table = other, AT, columns, 0, rows, columns, -1, 1
        yield "logit_gradient", LogitGradient(logits, other, AT, columns, *[AT] * 3, 1.0, 1.0)
        yield "embedding_scatter", EmbeddingScatter(AT, rows, kind, AT, columns, *table)
    for kind in range(3):
        logits = Logits(kind, rows, columns, AT, columns, AT, 0, -100, 0.0)
        yield "logit_sums", LogitSums(logits, *[AT] * 4)
        yield "quantize", Quantize(kind, rows * columns, AT, AT, AT)
        yield "dequantize", Dequantize(kind, rows * columns, AT, AT, AT, False)
        for blocks in range(6):
            yield "dequantize_blocks", DequantizeBlocks(kind, blocks, rows * columns, AT, AT)
        yield "add_converted", AddConverted(kind, rows * columns, Addends.at(AT), AT)
        for block in ((1, 32), (32, 1), (1, 96)):
            matrix = CodeMatrix(kind, rows, columns, AT, columns, *block, AT)
            yield "block_amax", matrix
            strides = (1, rows) if block[1] == 1 else (columns, 1)
            for format in range(2):
                yield "quantize_codes", Codes(matrix, format, 0, AT, *strides, AT, columns, 1, 0, 0)
        rows_of_all = CodeMatrix(kind, rows, 1 << 12, AT, 1 << 12, 1, 1 << 12, None)
        for format in range(2):
            yield "quantize_codes", Codes(rows_of_all, format, 0, AT, 1 << 12, 1, AT, 1, 1, 0, 0)
    for odd in (0, 4, 2):  # the alignment decides which words the kernel copies
        yield "embedding_gather", EmbeddingGather(AT, rows, AT + odd, 0, rows, columns * 16, AT, columns * 16)


def launches(kernels: Ptx):
    """Yields (kernel, blocks, threads) of every launch."""
    library = kernels.library

    def recorded():
        for index in range(library.launch_count()):
            shape = (c_uint * 6)()
            library.launch_shape(index, shape)
            yield library.launch_kernel(index).decode(), tuple(shape[:3]), tuple(shape[3:])

    for name, structure in [each for size in ((ROWS, COLUMNS), (1, 1)) for each in structures(*size)]:
        library.forget_launches()
        assert getattr(library, name)(byref(structure)) == 0, name
        yield from recorded()
    library.forget_launches()
    entries = (PackEntry * 64)(*(PackEntry(AT, AT, ROWS * COLUMNS, 0, 1) for _ in range(64)))
    assert library.pack(entries, 64) == 0
    yield from recorded()


def bodies(texts) -> dict[str, str]:
    """The text of each kernel's PTX, by its name."""
    parts = re.split(r"\.entry\s+(\w+)", "\n".join(texts))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def problems(kernel: str, blocks: tuple, threads: tuple, body: str):
    """Yields what a GPU would refuse."""
    count = threads[0] * threads[1] * threads[2]
    bound = re.search(r"\.maxntid\s+(\d+)(?:,\s*(\d+),\s*(\d+))?", body)
    most = 1
    for number in bound.groups(default="1") if bound else (str(UNBOUNDED),):
        most *= int(number)
    if not 0 < count <= min(most, THREADS) or threads[2] > 64:
        yield f"{kernel}: {threads} threads, at most {most}"
    if min(blocks) < 1 or max(blocks[1:]) > GRID_Y or blocks[0] * blocks[1] * blocks[2] > MOST_BLOCKS:
        yield f"{kernel}: {blocks} blocks"
    shared = sum(map(int, re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+\w+\[(\d+)\]", body)))
    if shared > SHARED:
        yield f"{kernel}: {shared} bytes of shared memory"


@needs_nvcc
def test_launches_are_within_the_limits():
    compiled = ptx.build()
    texts, seen = bodies(compiled.texts), set()
    for kernel, blocks, threads in launches(Ptx(compiled)):
        assert not [*problems(kernel, blocks, threads, texts[kernel])]
        seen.add(kernel)
    assert seen == set(texts), "not launched here"
    source = (ptx.ROOT / "csrc" / "kernels" / "common" / "launch.h").read_text()
    (default,) = re.findall(r"#define RTP_MOST_BLOCKS (\d+)", source)
    assert int(default) <= GRID_Y


@pytest.mark.parametrize(
    "blocks, threads, body, said",
    [
        ((6, 1, 1), (256, 1, 1), "", None),
        ((6, 1, 1), (512, 1, 1), ".maxntid 512, 1, 1", None),
        ((6, 1, 1), (512, 1, 1), "", "512, 1, 1"),
        ((6, 1, 1), (1024, 2, 1), ".maxntid 2048", "threads"),
        ((1, 70000, 1), (32, 1, 1), "", "blocks"),
        ((0, 1, 1), (32, 1, 1), "", "blocks"),
        ((1, 1, 1), (32, 1, 1), ".shared .align 4 .b8 area[65536];", "shared memory"),
    ],
)
def test_violations_are_found(blocks, threads, body, said):
    found = [*problems("kernel", blocks, threads, body)]
    assert not found if said is None else said in "".join(found)
