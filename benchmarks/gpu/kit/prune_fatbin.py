"""Zeroes the GPU code of other architectures in a shared library, so that it compresses to what one GPU needs.

    python benchmarks/gpu/kit/prune_fatbin.py LIBRARY OUT --keep 90

The file keeps its size and layout: payloads in the fat binaries are overwritten and headers stay, and a driver never
reads the payload of another architecture. PTX is zeroed too. The kept code is byte for byte that of the library.
Printed are the sizes of all payloads.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50  # of a fat binary
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")  # linked code, and code before device linking
KINDS = {1: "ptx", 2: "elf"}


def section(data: mmap.mmap, name: bytes) -> tuple[int, int]:
    """Returns offset and size of a section of a 64-bit ELF file; zeros if it has none of this name."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)

    def header(index: int) -> tuple[int, ...]:
        return struct.unpack_from("<IIQQQQ", data, table + index * entry_size)

    names = header(names_index)[4]
    for index in range(count):
        name_at, _, _, _, offset, size = header(index)
        if data[names + name_at : data.find(b"\0", names + name_at)] == name:
            return offset, size
    return 0, 0


def payloads(data: mmap.mmap, start: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields offset, bytes, kind and architecture of every payload of the fat binaries of a section."""
    at, end = start, start + size
    while at < end:
        if struct.unpack_from("<I", data, at)[0] != MAGIC:
            at += 8  # padding between fat binaries
            continue
        header, length = struct.unpack_from("<HQ", data, at + 6)
        inner, stop = at + header, at + header + length
        while inner < stop:
            kind, _, head, payload = struct.unpack_from("<HHIQ", data, inner)
            (architecture,) = struct.unpack_from("<I", data, inner + 28)
            yield inner + head, payload, kind, architecture
            inner += head + payload
        at = stop


def prune(library: Path, out: Path, keep: int) -> Counter[tuple[str, int]]:
    """Writes `out`. Returns the bytes of payloads by kind and architecture. ValueError where none is left."""
    shutil.copyfile(library, out)
    found: Counter[tuple[str, int]] = Counter()
    with open(out, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for place in (section(data, name) for name in SECTIONS):
            for at, length, kind, architecture in payloads(data, *place):
                name = KINDS.get(kind, str(kind))
                found[name, architecture] += length
                if (name, architecture) != ("elf", keep):
                    data[at : at + length] = bytes(length)
    if not found["elf", keep]:
        out.unlink()
        known = sorted(architecture for kind, architecture in found if kind == "elf")
        raise ValueError(f"{library}: expected code for {keep}, got {known}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--keep", type=int, default=90, help="the compute capability, such as 90")
    args = parser.parse_args()
    for (kind, architecture), length in sorted(prune(args.library, args.out, args.keep).items()):
        print(f"{kind} {architecture}: {length / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
