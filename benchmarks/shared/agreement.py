"""Checks that strategies compute the same results: the compared values, the method, and the tolerances."""

import argparse

import torch
from torch.distributed.tensor import DTensor

# Relative, of losses and of gradients; in bfloat16 four roundings, and those of a backward through all layers. Weights
# in 8 bits have about four times the error of 16 bits.
TOLERANCES = {"float32": (2e-5, 1e-4), "bfloat16": (2.0**-6, 10 * 2.0**-6), "int8": (2.0**-4, 40 * 2.0**-6)}
# Muon makes all singular values of an update about as large, those that are rounding errors of a gradient too.
TOLERANCES |= {"adamw": TOLERANCES["float32"], "muon": (1e-4, TOLERANCES["float32"][1])}
NEGLIGIBLE = 1e-3  # of the norm of all gradients: what differences are at least compared with
PROBED = 2**16  # elements of a gradient that are summed

Signature = list[float]


def tolerances(args: argparse.Namespace) -> tuple[float, float]:
    """Returns the tolerances of a comparison: those of the coarsest dtype in it, or of its optimizer."""
    return max(
        TOLERANCES[kind]
        for kind in (args.dtype, args.reduce_dtype, args.travel, args.gradient_travel, args.optimizer)
        if kind is not None
    )


def signature(parameter: torch.Tensor) -> Signature:
    """The norm of the gradient, and a weighted sum of evenly spaced elements of it.

    The sum depends on signs and positions, which a norm does not show; for a random gradient it is about as large as
    the norm. Both are zero without a gradient. Collective for a sharded parameter.
    """
    if parameter.grad is None:
        return [0.0, 0.0]
    whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
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
