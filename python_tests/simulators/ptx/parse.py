"""Reads PTX: kernels with their parameters, shared arrays and instructions."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)\s*(?:\.\w+[^{;]*)*\{", re.DOTALL)
_ARRAY = re.compile(r"\.(param|shared)\s+(?:\.align\s+(\d+)\s+)?\.[bfsu](\d+)\s+(\w+)(?:\[(\d+)\])?")
_LABEL = re.compile(r"^\$?[\w$]+:")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+%(\w+)<(\d+)>|\.reg\s+\.(\w+)\s+([\w%, ]+)")


@dataclass(frozen=True)
class Instruction:
    """One instruction. guard: a predicate register and the value that it must have; None: always.

    name: the words of the opcode, such as ("ld", "global", "v4", "u32"). operands: as written, a vector as a tuple;
    registers that a block of inline assembly declares have unique names.
    """

    text: str
    name: tuple[str, ...]
    operands: tuple[str | tuple[str, ...], ...]
    guard: tuple[str, bool] | None


@dataclass
class Kernel:
    """A kernel. parameters: name -> (offset, bytes) in the memory of its parameters. shared: name -> bytes.

    labels: name -> index of the instruction behind it. types: name of a register, or the letters of its name -> type.
    """

    name: str
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)

    @property
    def parameter_bytes(self) -> int:
        return max((offset + size for offset, size in self.parameters.values()), default=0)


@functools.cache
def parse(text: str) -> dict[str, Kernel]:
    """Returns the kernels of a PTX file by name, the same ones each time. Raises ValueError for functions and variables
    outside of kernels."""
    text = _COMMENT.sub("", text)
    if found := re.search(r"\.(func|const)\b", text):
        raise ValueError(f"PTX: expected kernels alone, got .{found[1]}")
    kernels = {}
    for entry in _ENTRY.finditer(text):
        kernel = Kernel(entry[1])
        offset = 0
        for _, align, bits, name, count in _ARRAY.findall(entry[2]):
            size = _BYTES[bits] * int(count or 1)
            align = int(align or _BYTES[bits])
            offset = -(-offset // align) * align
            kernel.parameters[name] = (offset, size)
            offset += size
        _read_body(kernel, text[entry.end() : _closing(text, entry.end())])
        kernels[kernel.name] = kernel
    return kernels


def _closing(text: str, start: int) -> int:
    """Returns the place of the brace that closes the one before `start`."""
    depth = 1
    for found in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.start()
    raise ValueError("PTX: a kernel without an end")


def _read_body(kernel: Kernel, body: str) -> None:
    scopes = 0
    scope: dict[str, str] = {}  # registers of a block of inline assembly -> unique names
    for statement in _statements(body):
        if statement in "{}":
            scopes += statement == "{"
            scope = {}
        elif statement.endswith(":"):
            kernel.labels[statement[:-1]] = len(kernel.code)
        elif statement.startswith(".reg"):
            found = _REGISTERS.match(statement)
            if found is None:
                raise ValueError(f"PTX of {kernel.name}: cannot read {statement!r}")
            if found[2]:
                kernel.types[found[2]] = found[1]
            else:
                for name in (each.strip() for each in found[5].split(",")):
                    scope[name] = f"{name}@{scopes}"
                    kernel.types[scope[name]] = found[4]
        elif statement.startswith(".shared"):
            _, _, bits, name, count = _ARRAY.match(statement).groups()  # type: ignore[union-attr]
            kernel.shared[name] = _BYTES[bits] * int(count or 1)
        elif statement.startswith(".pragma") or statement.startswith(".loc"):
            continue
        else:
            kernel.code.append(_instruction(statement, scope))


def _statements(body: str) -> list[str]:
    """Returns instructions and declarations without their semicolons, labels with a colon, and lone braces."""
    found = []
    for part in body.split(";"):
        part = part.strip()
        while part:
            if part[0] in "{}":
                found.append(part[0])
                part = part[1:].strip()
            elif label := _LABEL.match(part):
                found.append(label[0])
                part = part[label.end() :].strip()
            else:
                found.append(part)
                break
    return found


def _instruction(statement: str, scope: dict[str, str]) -> Instruction:
    text, guard = statement, None
    if statement[0] == "@":
        flag, statement = statement.split(None, 1)
        guard = flag.lstrip("@!"), "!" not in flag
    opcode, *rest = statement.split(None, 1)
    operands: list[str | tuple[str, ...]] = []
    for found in re.finditer(r"\{([^}]*)\}|\[([^\]]*)\]|([^,{}\[\]\s]+)", "".join(rest)):
        if found[1] is not None:
            operands.append(tuple(scope.get(each.strip(), each.strip()) for each in found[1].split(",")))
        elif found[2] is not None:
            operands.append(f"[{found[2].strip()}]")
        else:
            operands.append(scope.get(found[3], found[3]))
    return Instruction(text, tuple(opcode.split(".")), tuple(operands), guard)
