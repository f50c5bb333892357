"""The Newton-Schulz iteration of Muon on a matrix, and on its Gram matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The largest growth of a small singular value over all steps, c0 to their number, for which the Gram form is accurate:
# it rounds squares of singular values, and each step lets that error grow with them. At 485 (5 steps of 3.4445) the
# error of the iterate is below 1e-3 for any matrix, at 2e4 (8 steps) above 0.1.
GRAM_GROWTH = {torch.float32: 500.0, torch.float64: 500.0 * 2**14}


def iteration_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the iteration for updates of `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Iteration:
    """Settings of a parameter group: the polynomial c0 x + c1 x^3 + c2 x^5, the number of steps, and the least norm
    that a matrix is divided by."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float

    @classmethod
    def of(cls, group: dict[str, Any]) -> Iteration:
        return cls(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])

    def allows_gram(self, dtype: torch.dtype) -> bool:
        """Returns whether the Gram form is accurate for updates of `dtype`."""
        return abs(self.coefficients[0]) ** self.steps <= GRAM_GROWTH[iteration_dtype(dtype)]

    def gram_flops(self, long: int, short: int) -> int:
        """Floating-point operations on the Gram matrix: all of these are the owner's."""
        return max(8 * self.steps - 6, 0) * short**3

    def product_flops(self, long: int, short: int) -> int:
        """Floating-point operations that the Gram form makes with the matrix itself: these are spread over the ranks
        that hold it."""
        return 4 * long * short**2

    def whole_flops(self, long: int, short: int) -> int:
        """Floating-point operations of the iteration on the matrix."""
        return self.steps * (4 * long * short**2 + 2 * short**3)

    def on_matrix(self, matrix: Tensor) -> Tensor:
        """Returns the iterate of a matrix [m, n], as torch.optim.Muon computes it, in the dtype of `matrix`."""
        c0, c1, c2 = self.coefficients
        x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
        x = x / x.norm().clamp(min=self.eps)
        for _ in range(self.steps):
            gram = x @ x.T
            gram = torch.addmm(gram, gram, gram, beta=c1, alpha=c2)
            x = torch.addmm(x, gram, x, beta=c0)
        return x.T if matrix.shape[0] > matrix.shape[1] else x

    def on_gram(self, gram: Tensor) -> Tensor:
        """Returns the symmetric Q [n, n] such that X Q is the iterate of X [m, n]. Overwrites `gram`, X^T X [n, n].

        All iterates of X are products of X with polynomials of G = X^T X, which commute: with P = c0 I + c1 G + c2 G^2
        each step is Q <- P Q, G <- P G P. Rounding makes both a little asymmetric, which the next steps amplify: each
        is replaced by its symmetric part, which halves the error.
        """
        c0, c1, c2 = self.coefficients
        norm = gram.trace().clamp(min=0.0).sqrt().clamp(min=self.eps)  # of X; the trace of a sum is never much below 0
        gram.div_(norm).div_(norm)
        gram = torch.where(norm.isinf(), 0.0, gram)  # X divided by its norm is zero then, as in torch.optim.Muon
        result: Tensor | None = None
        for step in range(self.steps):
            factor = torch.addmm(gram, gram, gram, beta=c1, alpha=c2)
            factor.diagonal().add_(c0)
            result = factor if result is None else _symmetric(factor @ result)
            if step + 1 < self.steps:
                gram = _symmetric(factor @ gram @ factor)
        if result is None:
            result = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return result / norm


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T).mul_(0.5)


# -- triangles ---------------------------------------------------------------------------------------------------------


def triangle_numel(n: int) -> int:
    return n * (n + 1) // 2


def pack_triangle(matrix: Tensor, out: Tensor) -> None:
    """Writes one triangle of a symmetric matrix [n, n], diagonal included, to `out` [n (n + 1) / 2].

    The layout is that of LAPACK's rectangular full packed format: the off-diagonal block, and then a rectangle of the
    two diagonal blocks, one in the upper and one in the lower triangle. No index tensors are needed.
    """
    corner, rectangle, upper, lower = _areas(out, len(matrix))
    half = len(matrix) // 2
    corner.copy_(matrix[:half, half:])
    rectangle.zero_()
    upper.copy_(matrix[:half, :half].triu())
    lower.add_(matrix[half:, half:].tril())


def unpack_triangle(packed: Tensor, n: int) -> Tensor:
    """Returns the symmetric matrix [n, n] of a triangle [n (n + 1) / 2]."""
    corner, _, upper, lower = _areas(packed, n)
    half = n // 2
    matrix = packed.new_empty(n, n)
    matrix[:half, half:].copy_(corner)
    matrix[half:, :half].copy_(corner.T)
    first, second = upper.triu(), lower.tril()
    matrix[:half, :half].copy_(first).add_(first.triu(1).T)
    matrix[half:, half:].copy_(second).add_(second.tril(-1).T)
    return matrix


def _areas(packed: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns views of a packed triangle: the off-diagonal block, the rectangle, and in it the places of the first
    diagonal block, of which the upper triangle counts, and of the second one, of which the lower triangle counts."""
    first, second = n // 2, n - n // 2
    odd = second - first
    corner = packed[: first * second].view(first, second)
    rectangle = packed[first * second :].view(first + 1, second)
    return corner, rectangle, rectangle[:first, odd : odd + first], rectangle[1 - odd :]
