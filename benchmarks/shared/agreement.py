"""Checks that strategies compute the same results: the compared values, the method, and the tolerances."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

# Relative, of losses and of gradients; in bfloat16 four roundings, and those of a backward through all layers. Weights
# in 8 bits have about four times the error of 16 bits.
TOLERANCES = {"float32": (2e-5, 1e-4), "bfloat16": (2.0**-6, 10 * 2.0**-6), "int8": (2.0**-4, 40 * 2.0**-6)}
# Muon makes all singular values of an update about as large, those that are rounding errors of a gradient too.
TOLERANCES["float8_rowwise"] = TOLERANCES["int8"]  # e4m3: of all operands, with three bits of mantissa
TOLERANCES |= {"adamw": TOLERANCES["float32"], "muon": (1e-4, TOLERANCES["float32"][1])}
NEGLIGIBLE = 1e-3  # of the norm of all gradients: what differences are at least compared with
PROBED = 2**16  # elements of a gradient that are summed

Signature = list[float]


def tolerances(row: dict[str, Any]) -> tuple[float, float]:
    """Returns the tolerances of a strategy's row, of losses and of gradients: those of the coarsest dtype that it
    computes with or sends, or of its optimizer."""
    kinds = (row[key] for key in ("dtype", "reduce_dtype", "travel", "gradient_travel", "optimizer"))
    return max(TOLERANCES[kind] for kind in (*kinds, row.get("recipe")) if kind is not None)


def spreads(
    rows: list[dict[str, Any]], losses: list[list[float]], gradients: list[list[list[Signature]]], first: float
) -> list[tuple[float, float]]:
    """Returns `loss_spread` and `gradient_spread` of each row. Rows with the smallest tolerances are compared with one
    another; each other row with all of these.

    losses: of each row, by step. gradients: of each row, by rank and parameter. first: the first loss of the reference.
    """
    exact = min(map(tolerances, rows))
    same = [index for index, row in enumerate(rows) if tolerances(row) == exact]

    def of(indices: list[int]) -> tuple[float, float]:
        every = [signatures for index in indices for signatures in gradients[index]]
        return loss_spread([losses[index] for index in indices], first), gradient_spread(every)

    return [of(same if index in same else [*same, index]) for index in range(len(rows))]


def signature(parameter: torch.Tensor) -> Signature:
    """The norm of the gradient, and a weighted sum of evenly spaced elements of it.

    The sum depends on signs and positions, which a norm does not show; for a random gradient it is about as large as
    the norm. Both are zero without a gradient. Collective for a sharded parameter.
    """
    gradient = parameter.grad
    return signature_of(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)


def signature_of(whole: torch.Tensor | None) -> Signature:
    """Returns the `signature` of a parameter with this gradient."""
    if whole is None:
        return [0.0, 0.0]
    count = min(whole.numel(), PROBED)
    some = torch.linspace(0, whole.numel() - 1, count, dtype=torch.float64, device=whole.device).long()
    weights = torch.arange(count, dtype=torch.float64, device=whole.device).cos()
    probe = (whole.flatten()[some].double() @ weights) * (whole.numel() / count) ** 0.5
    return [float(torch.linalg.vector_norm(whole, dtype=torch.float64)), float(probe)]


def gradient_spread(signatures: list[list[Signature]]) -> float:
    """The largest difference between signatures [strategies and ranks, parameters] of a parameter, to its norm."""
    values = torch.tensor(signatures, dtype=torch.float64)
    norms = values[..., 0].amax(0)
    scale = norms.clamp_min(NEGLIGIBLE * norms.norm()).clamp_min(torch.finfo(torch.float64).tiny)
    return ((values.amax(0) - values.amin(0)).amax(1) / scale).max().item()


def loss_spread(losses: list[list[float]], first: float) -> float:
    """The largest relative difference between losses [strategies, steps] of a step, the first also from `first`."""
    values = torch.tensor(losses, dtype=torch.float64)
    plain = values[:1].clone()
    plain[0, 0] = first
    values = torch.cat([plain, values])
    return ((values.amax(0) - values.amin(0)) / values.mean(0).abs()).max().item()
