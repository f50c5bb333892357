"""The steps of operations on torch tensors, for `kernel_checks`: our kernels on a GPU, ATen on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from kernel_arrays import BYTES, CANARY, Array
from quantize_checks import bytes_array
from torch import Tensor

from rtp_ext._native import kernels


class Torch:
    """See `kernel_checks` for what every method is given and returns."""

    def __init__(self, device: str) -> None:
        self.name = f"torch on {device}"
        self.device = torch.device(device)
        on_gpu = torch.empty(0, device=device).is_cuda  # not where a GPU is a fake
        # On a CPU the engine's logits are float32 and so are their gradients.
        self.logit_elements = ("float32", "bfloat16", "float16") if on_gpu else ("float32",)
        self.gradient_elements = self.logit_elements
        self.hidden_roundings = 0 if on_gpu else 3  # ATen's steps, each rounded to the element type
        self.placed: list[tuple[Tensor, Tensor]] = []

    def tensor(self, array: Array) -> Tensor:
        """The array at its alignment, with canaries around it."""
        dtype = getattr(torch, array.element)
        size, front = BYTES[array.element], 64 // BYTES[array.element] + array.offset
        memory = torch.full(((front + array.extent + 64) * size,), CANARY, dtype=torch.uint8, device=self.device)
        elements = memory.view(dtype)
        view = elements.as_strided(array.shape, (max(array.stride, 1), 1), front)
        if array.values is None:
            view.view(torch.int16 if size == 2 else torch.int32).fill_(-1)
        else:
            view.copy_(torch.from_numpy(np.ascontiguousarray(array.values)).to(dtype))
        mine = torch.zeros(memory.shape, dtype=torch.bool, device=self.device)
        mine.view(-1, size)[:, 0].as_strided(array.shape, (max(array.stride, 1) * size, size), front * size).fill_(True)
        mine = mine.view(-1, size)[:, :1].expand(-1, size).reshape(-1)
        self.placed.append((memory, mine))
        return view

    def read(self, tensor: Tensor) -> np.ndarray:
        for memory, mine in self.placed:
            assert (memory[~mine] == CANARY).all(), "bytes around an array were written"
        self.placed.clear()
        return tensor.double().cpu().numpy()

    def row(self, values: np.ndarray | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values).float().to(self.device)

    def ids(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def hidden_forward(self, activation: str, pre: Array, gate: Array | None) -> np.ndarray:
        return self.read(kernels.hidden_forward(activation, self.tensor(pre), gate and self.tensor(gate)))

    def hidden_backward(self, activation: str, d_value: Array, pre: Array, gate: Array | None) -> list[np.ndarray]:
        found = kernels.hidden_backward(activation, self.tensor(d_value), self.tensor(pre), gate and self.tensor(gate))
        return [self.read(tensor) for tensor in found if tensor is not None]

    def chunk(self, logits: Array, targets: np.ndarray, rules):
        first, ignored, soft_cap = rules
        return kernels.LogitChunk(
            self.tensor(logits), self.ids(targets), first_column=first, ignore_index=ignored, soft_cap=soft_cap
        )

    def add_logits(self, logits: Array, targets: np.ndarray, rules, sums: list[np.ndarray | None]) -> list:
        rows = [self.row(values) for values in sums]
        kernels.add_logits(self.chunk(logits, targets, rules), *rows)
        return [None if row is None else self.read(row) for row in rows]

    def logit_gradient(
        self, logits: Array, targets: np.ndarray, rules, terms: list[np.ndarray], factors: tuple[float, float], element
    ) -> np.ndarray:
        gradient = kernels.logit_gradient(
            self.chunk(logits, targets, rules),
            *(self.row(values) for values in terms),
            label_smoothing=1 - factors[0],
            everywhere=factors[1],
            dtype=getattr(torch, element),
        )
        return self.read(gradient)

    def gather_rows(self, ids: np.ndarray, table: Array, first_row: int, out: Array) -> np.ndarray:
        target = self.tensor(out)
        kernels.gather_rows(self.ids(ids), self.tensor(table), first_row, target)
        return self.read(target)

    def add_rows(self, out: Array, ids: np.ndarray, values: Array, first_row: int, padding: int, alpha: float):
        target = self.tensor(out)
        kernels.add_rows(target, self.ids(ids), self.tensor(values), first_row, padding, alpha)
        return self.read(target)

    def pack(self, sources: list[Array], targets: list[Array]) -> list[np.ndarray]:
        to = [self.tensor(target) for target in targets]
        kernels.pack([self.tensor(source) for source in sources], to)
        return [self.read(tensor) for tensor in to]

    def quantize(self, values: Array) -> np.ndarray:
        room = self.tensor(bytes_array(np.random.default_rng(values.offset), values.shape[1]))
        kernels.quantize(room.view(torch.uint8).reshape(-1), self.tensor(values))
        packed = room.view(torch.uint8).reshape(-1).cpu().numpy().copy()
        self.read(room)
        return packed

    def dequantize(self, packed: np.ndarray, out: Array, add: bool) -> np.ndarray:
        target = self.tensor(out)
        given = torch.from_numpy(packed).to(self.device)
        (kernels.dequantize_add if add else kernels.dequantize)(target, given)
        return self.read(target)

    def dequantize_blocks(self, packed: np.ndarray, out: Array, kind: str) -> np.ndarray:
        target = self.tensor(out)
        kernels.dequantize_blocks(target, torch.from_numpy(packed).to(self.device), kind)
        return self.read(target)

    def add_converted(self, total: Array, values: Sequence[Array]) -> np.ndarray:
        target = self.tensor(total)
        kernels.add_converted(target, [self.tensor(each) for each in values])
        return self.read(target)

    def block_amax(self, array: Array, block: tuple[int, int]) -> np.ndarray:
        amax = torch.full([-(-size // step) for size, step in zip(array.shape, block, strict=True)], -1.0)
        amax = amax.to(self.device)
        kernels.block_amax(amax, self.tensor(array), block)
        return self.read(amax).astype(np.float32)

    def quantize_codes(
        self, array: Array, amax: np.ndarray | None, block, format: str, rule: str, transposed: bool, swizzle: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        values, shape = self.tensor(array), array.shape[::-1] if transposed else array.shape
        codes = torch.full(shape, 255, dtype=torch.uint8, device=self.device)
        codes = codes.view({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format])
        taken = codes.t() if transposed else codes
        exponents = rule.startswith("e8m0")
        blocks = tuple(-(-size // step) for size, step in zip(array.shape, block, strict=True))
        high, wide = blocks[::-1] if block[1] == 1 < block[0] else blocks
        room = [-(-high // 128) * -(-wide // 4) * 512] if swizzle else blocks[::-1]
        dtype = torch.uint8 if exponents else torch.float32
        scales = torch.full(room, 7, dtype=dtype, device=self.device)
        scales = scales if swizzle else scales.t()
        given = scales.view(torch.float8_e8m0fnu) if exponents else scales
        largest = None if amax is None else torch.from_numpy(amax).to(self.device)
        kernels.quantize_codes(taken, given, values, largest, block, rule)
        self.read(values)
        return taken.view(torch.uint8).cpu().numpy(), scales.cpu().numpy()
