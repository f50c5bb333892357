"""Compressors: gradients travel as smaller payloads.

A compressor converts a tensor to a payload, and a payload to an approximation of the tensor. Contractive compressors
(TopK, Sign, Quantize, PowerSGD, RandomK with error feedback) lose less than the whole tensor and need error feedback:
the lost part is added to the next tensor. An unbiased compressor (RandomK without error feedback) is correct in
expectation.

`Compressor.way` is a generator that runs the exchange with the replicas: it yields a round to send, receives the
result of that round, and returns the mean over the replicas and this replica's contribution. PowerSGD and Neolithic
need several rounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Memory = dict[str, torch.Tensor]  # state of a compressor for one tensor, by name
Way = Generator["Round", Any, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Payload:
    """Compressed form of a tensor. `note`: values that every replica has and that do not travel."""

    parts: tuple[torch.Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype
    note: Any = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Round:
    """One round of an exchange. `linear`: the result is the mean of all payloads; otherwise the list of them."""

    payload: Payload
    linear: bool


class Compressor:
    """Base class of all compressors.

    Args:
        error_feedback: whether the error of a payload is added to the next tensor of the same parameter.
    """

    linear = False  # whether the mean of payloads is the payload of the mean
    shared: tuple[str, ...] = ()  # state that must be equal on all replicas

    def __init__(self, error_feedback: bool = True) -> None:
        self.error_feedback = error_feedback
        self._alone: Memory = {}  # for tensors without a memory of their own

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings()}error_feedback={self.error_feedback})"

    def _settings(self) -> str:
        return ""

    def remember(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Memory:
        """Returns the initial state for a tensor. Its names are the same for all shapes."""
        return {}

    def compress(self, values: torch.Tensor, memory: Memory | None = None) -> Payload:
        """Compresses a float32 or float64 tensor of any shape.

        `memory`: state of this tensor, updated in place; None: the compressor's own state, for a single tensor.
        """
        raise NotImplementedError

    def decompress(self, payload: Payload) -> torch.Tensor:
        """Returns the approximation, in the tensor's shape and dtype."""
        raise NotImplementedError

    def way(self, values: torch.Tensor, memory: Memory) -> Way:
        """Runs the exchange of one tensor; see the docstring of the module."""
        payload = self.compress(values, memory)
        own = self.decompress(payload)
        if self.linear:
            return self.decompress((yield Round(payload, True))), own
        payloads = yield Round(payload, False)
        total = torch.zeros_like(values)
        for each in payloads:  # in replica order, so that all get the same bits
            total += self.decompress(each)
        return total / len(payloads), own

    def _memory(self, values: torch.Tensor, memory: Memory | None) -> Memory:
        if memory is not None:
            return memory
        if not self._alone:
            self._alone.update(self.remember(values.shape, values.dtype, values.device))
        return self._alone


class TopK(Compressor):
    """Sends the fraction `fraction` of a tensor's values that is largest in magnitude, and their indices."""

    def __init__(self, fraction: float, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        self.fraction = _fraction("TopK", fraction)

    def _settings(self) -> str:
        return f"{self.fraction}, "

    def compress(self, values: torch.Tensor, memory: Memory | None = None) -> Payload:
        flat = values.reshape(-1)
        where = flat.abs().topk(_count(self.fraction, flat.numel()), sorted=False).indices.sort().values
        index = torch.int32 if flat.numel() < 1 << 31 else torch.int64
        return Payload((flat[where], where.to(index)), values.shape, values.dtype)

    def decompress(self, payload: Payload) -> torch.Tensor:
        values, where = payload.parts
        return values.new_zeros(math.prod(payload.shape)).scatter_(0, where.long(), values).view(payload.shape)


class RandomK(Compressor):
    """Sends the fraction `fraction` of a tensor's values, at random indices that are the same on all replicas.

    Without error feedback the values are multiplied by d/k, which makes the result unbiased. With error feedback they
    are not, which makes it contractive: error feedback of an unbiased compressor grows without bound.
    """

    linear = True
    shared = ("draws",)

    def __init__(self, fraction: float, error_feedback: bool = True, seed: int = 0) -> None:
        super().__init__(error_feedback)
        self.fraction, self.seed = _fraction("RandomK", fraction), seed

    def _settings(self) -> str:
        return f"{self.fraction}, seed={self.seed}, "

    def remember(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Memory:
        return {"draws": torch.zeros((), dtype=torch.int64, device="cpu")}

    def compress(self, values: torch.Tensor, memory: Memory | None = None) -> Payload:
        kept = self._memory(values, memory)
        flat = values.reshape(-1)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + int(kept["draws"]))
        kept["draws"] += 1
        count = _count(self.fraction, flat.numel())
        where = torch.randperm(flat.numel(), generator=generator)[:count].to(flat.device)
        scale = 1.0 if self.error_feedback else flat.numel() / count
        return Payload((flat[where] * scale,), values.shape, values.dtype, where)

    def decompress(self, payload: Payload) -> torch.Tensor:
        (values,) = payload.parts
        return values.new_zeros(math.prod(payload.shape)).scatter_(0, payload.note, values).view(payload.shape)


class Sign(Compressor):
    """Sends the sign of each value (1 bit) and the mean magnitude of all values."""

    def compress(self, values: torch.Tensor, memory: Memory | None = None) -> Payload:
        flat = values.reshape(-1)
        scale = flat.abs().mean().view(1)
        return Payload((_pack((flat >= 0).to(torch.uint8), 1), scale), values.shape, values.dtype)

    def decompress(self, payload: Payload) -> torch.Tensor:
        bits, scale = payload.parts
        positive = _unpack(bits, 1, math.prod(payload.shape)).to(payload.dtype)
        return ((positive * 2 - 1) * scale).view(payload.shape)


class Quantize(Compressor):
    """Rounds each value to evenly spaced levels of `bits` (2, 4 or 8) bits, with a float32 scale per block.

    The error of a value is at most half a level: the largest magnitude of its block over 2^bits - 2.
    """

    def __init__(self, bits: int, block: int = 128, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        if bits not in (2, 4, 8):
            raise ValueError(f"Quantize: expected bits to be 2, 4 or 8, got {bits} (one bit is Sign)")
        if block < 1:
            raise ValueError(f"Quantize: expected block >= 1, got {block}")
        self.bits, self.block = bits, block

    def _settings(self) -> str:
        return f"{self.bits}, block={self.block}, "

    def compress(self, values: torch.Tensor, memory: Memory | None = None) -> Payload:
        flat, levels = values.reshape(-1), (1 << (self.bits - 1)) - 1
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.block)).view(-1, self.block)
        scales = (padded.abs().amax(1) / levels).to(torch.float32)
        steps = torch.where(scales == 0, 1.0, scales).to(flat.dtype).unsqueeze(1)
        numbers = (padded / steps).round().clamp(-levels, levels) + levels
        packed = _pack(numbers.view(-1)[: flat.numel()].to(torch.uint8), self.bits)
        return Payload((packed, scales), values.shape, values.dtype)

    def decompress(self, payload: Payload) -> torch.Tensor:
        packed, scales = payload.parts
        count, levels = math.prod(payload.shape), (1 << (self.bits - 1)) - 1
        numbers = _unpack(packed, self.bits, count).to(payload.dtype) - levels
        return (numbers * scales.to(payload.dtype).repeat_interleave(self.block)[:count]).view(payload.shape)


class PowerSGD(Compressor):
    """Sends a matrix [n, m] as a product [n, rank] x [rank, m], from one step of a warm-started power iteration.

    A tensor of more dimensions becomes a matrix with the first dimension as rows. Tensors of fewer dimensions, and
    those that would not shrink, travel uncompressed. In exact arithmetic, the mean over replicas equals the compression
    of the mean in one process. Source: Vogels et al. (arXiv 1905.13727).
    """

    linear = True
    shared = ("q",)

    def __init__(self, rank: int, error_feedback: bool = True, seed: int = 0) -> None:
        super().__init__(error_feedback)
        if rank < 1:
            raise ValueError(f"PowerSGD: expected rank >= 1, got {rank}")
        self.rank, self.seed = rank, seed

    def _settings(self) -> str:
        return f"{self.rank}, seed={self.seed}, "

    def _shrinks(self, shape: Sequence[int]) -> bool:
        rows, columns = _matrix(shape)
        return len(shape) > 1 and self.rank * (rows + columns) < rows * columns

    def remember(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Memory:
        generator = torch.Generator().manual_seed(self.seed)
        _, columns = _matrix(shape)
        size = (columns, self.rank) if self._shrinks(shape) else (0, self.rank)
        return {"q": torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(device)}

    def compress(self, values: torch.Tensor, memory: Memory | None = None) -> Payload:
        if not self._shrinks(values.shape):
            return Payload((values,), values.shape, values.dtype)
        kept, matrix = self._memory(values, memory), values.reshape(_matrix(values.shape))
        left = _orthogonal(matrix @ kept["q"])
        kept["q"] = right = matrix.T @ left
        return Payload((left, right), values.shape, values.dtype)

    def decompress(self, payload: Payload) -> torch.Tensor:
        if len(payload.parts) == 1:
            return payload.parts[0]
        left, right = payload.parts
        return (left @ right.T).view(payload.shape)

    def way(self, values: torch.Tensor, memory: Memory) -> Way:
        if not self._shrinks(values.shape):
            return (yield from super().way(values, memory))
        matrix = values.reshape(_matrix(values.shape))

        def mean(part: torch.Tensor) -> Generator[Round, Any, torch.Tensor]:
            answer = yield Round(Payload((part,), part.shape, part.dtype), True)
            return answer.parts[0]

        left = _orthogonal((yield from mean(matrix @ memory["q"])))
        own = matrix.T @ left
        memory["q"] = yield from mean(own)
        return (left @ memory["q"].T).view(values.shape), (left @ own.T).view(values.shape)


class _WrappingCompressor(Compressor):
    """Base class of compressors that contain another one, whose state is stored within their own."""

    def __init__(self, compressor: Compressor, error_feedback: bool) -> None:
        super().__init__(error_feedback)
        name = type(self).__name__
        if not isinstance(compressor, Compressor) or isinstance(compressor, _WrappingCompressor):
            raise TypeError(f"{name}: expected one of TopK, RandomK, Sign, Quantize, PowerSGD, got {compressor!r}")
        if not compressor.error_feedback:
            raise ValueError(f"{name}: expected a compressor with error_feedback=True, the contractive form")
        self.compressor = compressor
        self.shared = tuple(f"inner.{key}" for key in compressor.shared)

    def _settings(self) -> str:
        return f"{self.compressor!r}, "

    def remember(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Memory:
        return {f"inner.{key}": value for key, value in self.compressor.remember(shape, dtype, device).items()}

    def _inner(self, memory: Memory) -> Memory:
        return {key[6:]: value for key, value in memory.items() if key.startswith("inner.")}

    def _keep(self, inner: Memory, memory: Memory) -> None:
        memory.update({f"inner.{key}": value for key, value in inner.items()})


class EF21(_WrappingCompressor):
    """Keeps an estimate of each replica's gradient, sends the compressed difference, and returns the mean of the
    estimates. Source: Richtarik et al. (arXiv 2106.05203)."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__(compressor, False)
        self.shared += ("mean",)

    def remember(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Memory:
        zeros = {key: torch.zeros(tuple(shape), dtype=dtype, device=device) for key in ("estimate", "mean")}
        return {**zeros, **super().remember(shape, dtype, device)}

    def compress(self, values: torch.Tensor, memory: Memory | None = None) -> Payload:
        """Compresses the difference from the estimate, and updates the estimate."""
        kept = self._memory(values, memory)
        inner = self._inner(kept)
        payload = self.compressor.compress(values - kept["estimate"], inner)
        self._keep(inner, kept)
        kept["estimate"] = kept["estimate"] + self.decompress(payload)
        return payload

    def decompress(self, payload: Payload) -> torch.Tensor:
        return self.compressor.decompress(payload)

    def way(self, values: torch.Tensor, memory: Memory) -> Way:
        inner = self._inner(memory)
        mean, own = yield from self.compressor.way(values - memory["estimate"], inner)
        self._keep(inner, memory)
        memory["estimate"] = memory["estimate"] + own
        memory["mean"] = memory["mean"] + mean
        return memory["mean"].clone(), memory["estimate"]  # a copy: clipping writes to the gradient


class Neolithic(_WrappingCompressor):
    """Compresses the remaining error `rounds` times and sends all payloads: `rounds` times the bytes, and an error that
    shrinks with each round. Compresses between the replicas only: there is no server whose answers are compressed.
    Source: Huang et al., NEOLITHIC (arXiv 2206.03665)."""

    def __init__(self, compressor: Compressor, rounds: int = 2, error_feedback: bool = True) -> None:
        super().__init__(compressor, error_feedback)
        if rounds < 1:
            raise ValueError(f"Neolithic: expected rounds >= 1, got {rounds}")
        self.rounds = rounds

    def _settings(self) -> str:
        return f"{self.compressor!r}, {self.rounds}, "

    def compress(self, values: torch.Tensor, memory: Memory | None = None) -> Payload:
        kept = self._memory(values, memory)
        inner, payloads, left = self._inner(kept), [], values
        for _ in range(self.rounds):
            payloads.append(self.compressor.compress(left, inner))
            left = left - self.compressor.decompress(payloads[-1])
        self._keep(inner, kept)
        parts = tuple(part for payload in payloads for part in payload.parts)
        return Payload(parts, values.shape, values.dtype, payloads)

    def decompress(self, payload: Payload) -> torch.Tensor:
        total = torch.zeros(payload.shape, dtype=payload.dtype, device=payload.parts[0].device)
        parts = iter(payload.parts)
        for each in payload.note:
            own = tuple(next(parts) for _ in each.parts)
            total += self.compressor.decompress(dataclasses.replace(each, parts=own))
        return total

    def way(self, values: torch.Tensor, memory: Memory) -> Way:
        inner, left = self._inner(memory), values
        total = torch.zeros_like(values)
        for _ in range(self.rounds):
            mean, own = yield from self.compressor.way(left, inner)
            total, left = total + mean, left - own
        self._keep(inner, memory)
        return total, values - left


def _fraction(name: str, value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"{name}: expected fraction in (0, 1], got {value}")
    return float(value)


def _count(fraction: float, elements: int) -> int:
    return min(elements, max(1, round(fraction * elements)))


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[0] if shape else 1), math.prod(shape[1:])


def _orthogonal(columns: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(columns).Q


def _pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs numbers of `bits` bits into bytes, the first in the lowest bits."""
    each = 8 // bits
    rows = torch.nn.functional.pad(numbers, (0, -numbers.numel() % each)).view(-1, each)
    packed = torch.zeros_like(rows[:, 0])
    for place in range(each):
        packed |= rows[:, place] << (place * bits)
    return packed


def _unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> places) & ((1 << bits) - 1)).view(-1)[:count]
