"""Parameters of any shape and cut, with gradients of full rank, beside torch's Muon on whole matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matrix_optimizers import Muon as Stock
from reference import random
from torch import Tensor, nn

from rtp_ext.optim import Muon
from rtp_ext.parameters.sharding import held, shard_parameter, take_shard
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import as_gradient

CLOSE = 1e-5
# X^T X of a square matrix has squared its condition number before float32 rounds it: 1.1e-5 was seen for 11 x 11.
SQUARE_GRAM = 3e-5


@dataclass(frozen=True)
class Shape:
    """A parameter [m, n] or [E, m, n] that the ring cuts along `dim`; None: it is a plain tensor."""

    shape: tuple[int, ...]
    dim: int | None = 0
    blocks: int = 1

    def matrices(self, whole: Tensor) -> list[Tensor]:
        """The matrices of a whole parameter, as views."""
        stack = whole.unbind(0) if whole.dim() == 3 else [whole]
        return [block for matrix in stack for block in matrix.chunk(self.blocks, 0)]


# Tall, wide and square; cut along the long or the short side; sizes that no ring of 2 to 4 divides.
SHAPES = [
    *(Shape(shape, dim) for shape in ((23, 9), (9, 23), (11, 11)) for dim in (0, 1)),
    *(Shape((3, 14), 0), Shape((2, 5), 0), Shape((13, 1), 0), Shape((1, 6), 1)),  # ranks without a part
    *(Shape((21, 6), 0, 3), Shape((10, 12), 0, 5), Shape((30, 5), 1, 2)),  # blocks that end inside of a shard
    *(Shape((5, 12, 7), 0), Shape((3, 8, 6), 1, 2), Shape((2, 6, 13), 2)),  # experts
    *(Shape((9, 7), None), Shape((8, 6), None, 2)),
]
# Cut along the long side, as bundles are: their exchange may be `gram`.
LONG = [shape for shape in SHAPES if shape.dim is not None and shape.shape[shape.dim] == max(shape.shape[-2:])]


class Pair:
    """Parameters on a ring with our optimizer, and the same whole with torch's; gradients set by hand.

    apart: the wrong way: this rank's shards as plain tensors, each orthogonalised by itself.
    """

    def __init__(
        self,
        ring: Ring,
        shapes: Sequence[Shape],
        dtype: torch.dtype = torch.float32,
        *,
        exchange: str = "auto",
        apart: bool = False,
        **options: Any,
    ) -> None:
        self.ring, self.shapes, self.exchange, self.step = ring, shapes, exchange, 0
        self.wholes = [random(*each.shape, dtype=dtype, seed=number) * 0.1 for number, each in enumerate(shapes)]
        self.parameters = [self._shard(each, whole, apart) for each, whole in zip(shapes, self.wholes, strict=True)]
        groups = [{"params": [p], "blocks": each.blocks} for each, p in zip(shapes, self.parameters, strict=True)]
        if apart:
            groups = [{"params": [p]} for p in self.parameters if p.numel()]
        self.optimizer = Muon(groups, exchange=exchange, **options)
        self.expected = [
            [nn.Parameter(matrix.clone()) for matrix in each.matrices(whole)]
            for each, whole in zip(shapes, self.wholes, strict=True)
        ]
        self.stock = Stock([matrix for some in self.expected for matrix in some], **options)

    def _shard(self, shape: Shape, whole: Tensor, apart: bool) -> nn.Parameter:
        if shape.dim is None:
            return nn.Parameter(whole.clone())
        if apart:
            return nn.Parameter(take_shard(whole, self.ring, shape.dim))
        return shard_parameter(nn.Parameter(whole), self.ring, shape.dim)

    def gradients(self, scale: float = 1.0) -> None:
        """Adds gradients, as another micro-batch does."""
        for number, (shape, parameter, some) in enumerate(
            zip(self.shapes, self.parameters, self.expected, strict=True)
        ):
            whole = random(*shape.shape, dtype=parameter.dtype, seed=100 * self.step + number) * scale
            for matrix, gradient in zip(some, shape.matrices(whole), strict=True):
                matrix.grad = gradient.clone() if matrix.grad is None else matrix.grad + gradient
            local = whole if shape.dim is None else take_shard(whole, self.ring, shape.dim)
            if parameter.grad is not None:
                local = local + held(parameter.grad)
            parameter.grad = as_gradient(local, parameter._spec) if hasattr(parameter, "_spec") else local
        self.step += 1

    def take_steps(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.stock.zero_grad()
            self.gradients()
            self.optimizer.step()
            self.stock.step()

    def errors(self) -> list[tuple[Shape, float]]:
        """The norm of the difference of each update so far, all steps together, relative to that of the update. The
        same on all ranks."""
        own = []
        for shape, whole, parameter, some in zip(self.shapes, self.wholes, self.parameters, self.expected, strict=True):
            update = torch.cat([matrix.detach() for matrix in some]).view(shape.shape).double() - whole.double()
            before = whole
            if shape.dim is not None:
                update, before = (take_shard(each, self.ring, shape.dim) for each in (update, whole))
            found = held(parameter).detach().double() - before.double()
            own.append([(found - update).square().sum().item(), update.square().sum().item()])
        off, size = torch.tensor(self.ring.exchange(own)).sum(0).sqrt().T
        return list(zip(self.shapes, (off / size).tolist(), strict=True))

    def assert_alike(self, tolerance: float = CLOSE) -> None:
        square = SQUARE_GRAM if self.exchange == "gram" else 0.0
        for shape, error in self.errors():
            sides = {*shape.matrices(torch.empty(shape.shape, device="meta"))[0].shape}
            allowed = max(tolerance, square) if len(sides) == 1 and tolerance == CLOSE else tolerance
            assert error <= allowed, f"{shape}: relative error {error:.1e} of the update"
