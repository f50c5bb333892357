"""Runs a kernel of PTX on all threads of a grid, in NumPy.

Threads that stand at the same instruction run it together. A random part of the warps runs until all its threads wait
at a barrier or have ended, then another part. Within it the threads that are furthest behind run first, so that
branches meet again as compilers lay them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ptx.arithmetic import (
    APPROXIMATE,
    DTYPES,
    PLAIN,
    UNSIGNED,
    compare,
    convert,
    flush,
    fma,
    insert,
    narrow,
    narrow_pair,
    pairs,
    shift,
    whole_quotient,
    widen,
)
from ptx.memory import Buffer, Fault, Space
from ptx.parse import Instruction, Kernel

WARP = 32
RUNNING, WAITING, ENDED = 0, 1, 2
GAP = 64  # bytes between arrays of shared memory
PARAMETERS = 1 << 40  # address of the parameters
CACHE_RULES = {"nc", "ca", "cg", "cs", "cv", "wb", "wt", "volatile", "relaxed", "gpu", "sys", "cta", "weak", "L1"}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its grid and block as (x, y, z), and the bytes of its parameters."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: bytes


class Machine:
    """One launch on buffers of global memory."""

    def __init__(self, kernel: Kernel, launch: Launch, buffers: Sequence[Buffer], rng: np.random.Generator) -> None:
        self.kernel, self.rng = kernel, rng
        self.per_block, blocks = int(np.prod(launch.block)), int(np.prod(launch.grid))
        self.threads = self.per_block * blocks
        number = np.arange(self.threads)
        self.block_of = number // self.per_block
        within = number % self.per_block
        warps_of_block = -(-self.per_block // WARP)
        self.lane, self.warp = within % WARP, self.block_of * warps_of_block + within // WARP
        self.warps = warps_of_block * blocks
        self.special = {
            f"%{register}.{axis}": np.broadcast_to(value, (self.threads,)).astype(np.uint32)
            for name, index, size in (("tid", within, launch.block), ("ctaid", self.block_of, launch.grid))
            for (axis, stride), extent in zip((("x", 1), ("y", size[0]), ("z", size[0] * size[1])), size, strict=True)
            for register, value in ((name, index // stride % extent), (f"n{name}", extent))
        } | {"%laneid": self.lane.astype(np.uint32)}
        self.registers: dict[str, np.ndarray] = {}
        self.written: dict[str, np.ndarray] = {}
        self.pc = np.zeros(self.threads, np.int64)
        self.state = np.full(self.threads, RUNNING)
        self.epoch = np.zeros(blocks, np.int64)
        self.symbols: dict[str, int] = {name: PARAMETERS + offset for name, (offset, _) in kernel.parameters.items()}
        raw = np.frombuffer(launch.parameters, np.uint8).copy()
        parameters = Buffer(PARAMETERS, raw, np.ones(raw.size, bool), "the parameters")
        shared, self.span = [], 0
        for name, size in kernel.shared.items():
            self.symbols[name] = self.span
            shared.append((name, self.span, size))
            self.span += -(-size // 16) * 16 + GAP
        places = [
            Buffer(block * self.span + offset, np.zeros(size, np.uint8), np.zeros(size, bool), f"shared {name[-24:]}")
            for block in range(blocks)
            for name, offset, size in shared
        ]
        self.spaces = {
            "global": Space("global", buffers, self.per_block),
            "shared": Space("shared", places, self.per_block),
            "param": Space("parameter", [parameters]),
        }

    def run(self) -> None:
        """Raises Fault where the kernel does what a GPU does not define."""
        with np.errstate(all="ignore"):
            while (running := self.state == RUNNING).any():
                alive = np.unique(self.warp[running])
                chosen = np.zeros(self.warps, bool)
                chosen[self.rng.permutation(alive)[: self.rng.integers(1, alive.size + 1)]] = True
                self._advance(np.flatnonzero(running & chosen[self.warp]))
                self._release()
        if (waiting := self.state == WAITING).any():
            raise Fault(f"{self.kernel.name}: {waiting.sum()} threads wait at a barrier that not all threads reach")

    def _release(self) -> None:
        for block in np.unique(self.block_of[self.state == WAITING]):
            mine = self.block_of == block
            if (self.state[mine] == RUNNING).any():
                continue
            waiting = mine & (self.state == WAITING)
            if not (self.state[mine] == WAITING).all() or np.unique(self.pc[waiting]).size > 1:
                raise Fault(f"{self.kernel.name}: only {waiting.sum()} of {self.per_block} threads reach a barrier")
            self.epoch[block] += 1
            self.state[waiting] = RUNNING

    def _advance(self, group: np.ndarray) -> None:
        """Runs threads until each waits or has ended."""
        while (group := group[self.state[group] == RUNNING]).size:
            places = self.pc[group]
            at = places.min()
            self._straight(int(at), group[places == at], int(min(places[places > at], default=len(self.kernel.code))))

    def _straight(self, at: int, lanes: np.ndarray, end: int) -> None:
        """Runs threads from instruction `at` until they branch, wait, end, or meet others at `end`."""
        while at < end:
            instruction = self.kernel.code[at]
            active = lanes
            if instruction.guard is not None:
                register, wanted = instruction.guard
                active = lanes[self._read(register, "pred", lanes) == wanted]
            word = instruction.name[0]
            at += 1
            if word == "bra":
                self.pc[lanes] = at
                self.pc[active] = self.kernel.labels[instruction.operands[0]]  # type: ignore[index]
                return
            if word in ("ret", "exit"):
                self.state[active] = ENDED
                self.pc[lanes] = at
                return
            if instruction.name[:2] == ("bar", "sync"):
                self.state[active] = WAITING
                self.pc[lanes] = at
                return
            if active.size:
                try:
                    self._execute(instruction, active)
                except Fault as fault:
                    raise Fault(f"{self.kernel.name}: {instruction.text}: {fault}") from None
        self.pc[lanes] = at

    # -- operands ----------------------------------------------------------------------------------------------------

    def _read(self, operand: str, kind: str, lanes: np.ndarray) -> np.ndarray:
        """Returns the values of an operand in a type: a register, an immediate number, a symbol."""
        dtype = DTYPES[kind]
        if operand in self.special:
            return self.special[operand][lanes].astype(dtype)
        if operand in self.symbols:
            return np.full(lanes.size, self.symbols[operand], dtype)
        if operand[0] == "%" or "@" in operand:
            if operand not in self.registers or not self.written[operand][lanes].all():
                raise Fault(f"{operand} is read before it is written")
            values = self.registers[operand][lanes]
            return values if kind == "pred" else values.astype(UNSIGNED[dtype.itemsize], copy=False).view(dtype)
        if found := re.fullmatch(r"0([fd])([0-9A-Fa-f]+)", operand):
            bits = np.array(int(found[2], 16), np.uint32 if found[1] == "f" else np.uint64)
            return np.full(lanes.size, bits.view(np.float32 if found[1] == "f" else np.float64), dtype)
        number = int(operand.rstrip("U"), 0)
        unsigned = np.array(number % (1 << 8 * dtype.itemsize), np.uint64).astype(UNSIGNED[dtype.itemsize])
        return np.full(lanes.size, unsigned, UNSIGNED[dtype.itemsize]).view(dtype)

    def _write(self, register: str, values: np.ndarray, lanes: np.ndarray) -> None:
        """Writes values of any type; narrower integers than the register are extended by their sign, or by zeros."""
        if register == "_":
            return
        if register not in self.registers:
            kind = self.kernel.types.get(register) or self.kernel.types[re.match(r"%([a-z]+)", register)[1]]  # type: ignore[index]
            self.registers[register] = np.zeros(
                self.threads, bool if kind == "pred" else UNSIGNED[DTYPES[kind].itemsize]
            )
            self.written[register] = np.zeros(self.threads, bool)
        into = self.registers[register]
        if values.dtype.kind == "i":
            values = values.astype(f"i{into.dtype.itemsize}", copy=False)
        if values.dtype.kind != "b":
            values = values.view(UNSIGNED[values.dtype.itemsize])
        into[lanes] = values
        self.written[register][lanes] = True

    def _addresses(self, operand: str, space: str, lanes: np.ndarray) -> np.ndarray:
        base, _, offset = operand[1:-1].replace(" ", "").partition("+")
        found = self._read(base, "u64", lanes) + np.uint64(int(offset or "0", 0) % (1 << 64))
        return found + (self.block_of[lanes] * self.span).astype(np.uint64) if space == "shared" else found

    # -- instructions ------------------------------------------------------------------------------------------------

    def _execute(self, instruction: Instruction, lanes: np.ndarray) -> None:
        word, *rest = instruction.name
        words, operands = tuple(rest), instruction.operands
        if word in ("ld", "st", "ldu"):
            self._move(word == "st", words, operands, lanes)
            return
        if word in ("atom", "red"):
            self._atomic(words, operands if word == "atom" else ("_", *operands), lanes)
            return
        if word == "mov" and any(isinstance(operand, tuple) for operand in operands):
            self._repack(words[-1], operands, lanes)
            return
        if word == "shfl":
            self._shuffle(words, operands, lanes)
            return
        into, *given = operands

        def read(index: int, kind: str) -> np.ndarray:
            return self._read(given[index], kind, lanes)  # type: ignore[arg-type]

        result = self._compute(word, words, given, read)
        if result is None:
            raise NotImplementedError(f"{self.kernel.name}: {instruction.text}: this instruction has no emulation")
        self._write(into, result, lanes)  # type: ignore[arg-type]

    def _compute(self, word: str, words: tuple[str, ...], given: list, read: Callable) -> np.ndarray | None:
        kind = words[-1]
        if word == "setp" and len(given) == 2:
            return compare(words[0], read(0, kind), read(1, kind))
        if word == "selp":
            return np.where(read(2, "pred"), read(0, kind), read(1, kind))
        if word == "cvt" and kind == "f32" and words[-2] in ("bf16x2", "f16x2"):
            narrowed = [narrow(read(i, "f32").astype(np.float64), words[-2][:-2]).view(np.uint16) for i in (1, 0)]
            return narrowed[0].astype(np.uint32) | narrowed[1].astype(np.uint32) << np.uint32(16)
        if word == "cvt" and words[:2] == ("rn", "satfinite"):
            return narrow_pair(read(0, "f32"), read(1, "f32"), words[2])
        if word == "cvt":
            return convert(words, read(0, kind))
        if word == "cvta":
            return read(0, kind)
        if word in ("shl", "shr"):
            return shift(read(0, kind), read(1, "u32"), left=word == "shl")
        if word == "bfi":
            return insert(read(0, kind), read(1, kind), read(2, "u32"), read(3, "u32"))
        if word == "fma" and kind in ("bf16x2", "f16x2"):
            return pairs(lambda a, b, c: fma(a, b, c, kind[:-2]), kind[:-2], *(read(i, kind) for i in range(3)))
        if word == "max" and kind == "u16x2":
            return pairs(np.maximum, "u16", read(0, "u32"), read(1, "u32"))
        if word == "fma" and words[0] in ("rn", "rm"):
            return fma(read(0, kind), read(1, kind), read(2, kind), kind, down=words[0] == "rm")
        if word in ("mul", "mad") and words[0] in ("lo", "wide"):
            wide = DTYPES[kind if words[0] == "lo" else f"{kind[0]}{2 * int(kind[1:])}"]
            product = read(0, kind).astype(wide) * read(1, kind).astype(wide)
            return product if word == "mul" else product + read(2, f"{kind[0]}{8 * wide.itemsize}")
        if word == "mul" and DTYPES[kind].kind == "f" and set(words[:-1]) <= {"rn"}:
            return read(0, kind) * read(1, kind)
        if word == "div" and words[0] == "rn":
            return read(0, kind) / read(1, kind)
        if word == "rcp" and words[0] == "rn":
            return np.divide(DTYPES[kind].type(1), read(0, kind))
        if word in ("div", "rem") and kind[0] in "us":
            return whole_quotient(read(0, kind), read(1, kind), word == "rem")
        if word in APPROXIMATE and words[0] == "approx" and kind == "f32":
            values = [read(i, kind) for i in range(len(given))]
            ftz = "ftz" in words
            values = [(flush(value) if ftz else value).astype(np.float64) for value in values]
            result = APPROXIMATE[word](*values).astype(np.float32)
            return flush(result) if ftz else result
        if word in PLAIN and set(words[:-1]) <= {"rn"}:
            arguments = [read(0, kind), *(read(i, "u32" if word == "prmt" else kind) for i in range(1, len(given)))]
            return PLAIN[word](*arguments)
        return None

    def _move(self, stores: bool, words: tuple[str, ...], operands: tuple, lanes: np.ndarray) -> None:
        space, *rules, kind = words
        space = "global" if space in CACHE_RULES else space
        count = next((int(rule[1:]) for rule in rules if re.fullmatch(r"v\d", rule)), 1)
        if unknown := {rule for rule in rules if not re.fullmatch(r"v\d", rule)} - CACHE_RULES:
            raise NotImplementedError(f"{self.kernel.name}: rules {unknown} of loads and stores have no emulation")
        width = DTYPES[kind].itemsize
        place, registers = (operands[0], operands[1]) if stores else (operands[1], operands[0])
        registers = registers if isinstance(registers, tuple) else (registers,)
        where = self._addresses(place, space, lanes)
        epochs = self.epoch[self.block_of[lanes]]
        if not stores:
            found = self.spaces[space].load(where, width * count, lanes, epochs)
            for number, register in enumerate(registers):
                column = np.ascontiguousarray(found[:, number * width : (number + 1) * width])
                self._write(register, column.view(DTYPES[kind])[:, 0], lanes)
            return
        columns = [self._read(register, kind, lanes) for register in registers]
        values = np.stack([column.view(np.uint8).reshape(lanes.size, width) for column in columns], 1)
        self.spaces[space].store(where, values.reshape(lanes.size, width * count), lanes, epochs)

    def _atomic(self, words: tuple[str, ...], operands: tuple, lanes: np.ndarray) -> None:
        *rules, kind = words
        space = "shared" if "shared" in rules else "global"
        where = self._addresses(operands[1], space, lanes)
        dtype = DTYPES[kind]
        given = [self._read(operand, kind, lanes) for operand in operands[2:]]
        old = np.zeros(lanes.size, dtype)
        for i in self.rng.permutation(lanes.size):
            mine = [each[i : i + 1] for each in given]

            def change(before: np.ndarray, mine: list[np.ndarray] = mine) -> np.ndarray:
                value = before.view(dtype)
                if "cas" in rules:
                    return (mine[1] if value == mine[0] else value).view(np.uint8)
                if "max" in rules:
                    return np.maximum(value, mine[0]).view(np.uint8)
                if "add" not in rules:
                    raise NotImplementedError(f"{self.kernel.name}: atomic {rules} has no emulation")
                if kind.endswith("x2"):
                    half = kind[:-2]
                    total = pairs(lambda a, b: narrow(widen(a, half) + widen(b, half), half), half, value, mine[0])
                    return total.view(np.uint8)
                return (value + mine[0]).astype(dtype).view(np.uint8)

            before = self.spaces[space].exchange(int(where[i]), dtype.itemsize, change, int(lanes[i]))
            old[i] = before.view(dtype)[0]
        self._write(operands[0], old, lanes)

    def _repack(self, kind: str, operands: tuple, lanes: np.ndarray) -> None:
        """Moves between a vector of narrow registers, the lowest bits first, and a wide one."""
        into, source = operands
        if isinstance(source, tuple):
            bits = 8 * DTYPES[kind].itemsize // len(source)
            total = np.zeros(lanes.size, DTYPES[kind])
            for number, operand in enumerate(source):
                total |= self._read(operand, f"u{bits}", lanes).astype(total.dtype) << total.dtype.type(bits * number)
            self._write(into, total, lanes)
            return
        value = self._read(source, kind, lanes)
        bits = 8 * value.dtype.itemsize // len(into)
        for number, register in enumerate(into):
            self._write(register, (value >> value.dtype.type(bits * number)).astype(DTYPES[f"u{bits}"]), lanes)

    def _shuffle(self, words: tuple[str, ...], operands: tuple, lanes: np.ndarray) -> None:
        mode = words[1]
        if words[0] != "sync" or mode not in ("bfly", "idx", "up", "down"):
            raise NotImplementedError(f"{self.kernel.name}: shfl {words} has no emulation")
        into, source, by, clamp, members = operands
        member = self._read(members, "u32", lanes).astype(np.int64)
        lane, by = self.lane[lanes], self._read(by, "u32", lanes).astype(np.int64) & 31
        if (member >> lane & 1 == 0).any():
            raise Fault("a lane is not in the mask of its shuffle")
        present = np.zeros(self.warps, np.int64)
        np.bitwise_or.at(present, self.warp[lanes], 1 << lane)
        if (present[self.warp[lanes]] != member).any():
            raise Fault("only some lanes of a warp reach a shuffle")
        control = self._read(clamp, "u32", lanes).astype(np.int64)
        segment, limit = control >> 8 & 31, control & 31
        last, first = (lane & segment) | (limit & ~segment), lane & segment
        other = {"bfly": lane ^ by, "idx": first | (by & ~segment), "up": lane - by, "down": lane + by}[mode]
        inside = other >= last if mode == "up" else other <= last
        other = np.where(inside, other, lane)
        values = np.zeros(self.threads, np.uint32)
        values[lanes] = self._read(source, "b32", lanes)
        target, _, predicate = into.partition("|")
        self._write(target, values[lanes - lane + other], lanes)
        if predicate:
            self._write(predicate, inside, lanes)
