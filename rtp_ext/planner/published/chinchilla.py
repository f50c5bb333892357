"""Compute-optimal model size for a budget of operations: Hoffmann et al., "Training Compute-Optimal Large Language
Models" (Chinchilla), arXiv 2203.15556, which the lecture calls the "Chinchilla law".

C = 6 N D operations train N parameters on D tokens. Two of the paper's three approaches have closed forms: parameters
and tokens grow in proportion (approaches 1 and 2; Chinchilla itself has 20 tokens per parameter), and the fitted loss
L(N, D) = E + A / N^alpha + B / D^beta (approach 3, equation 10), whose optimum under a budget is equation 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

E, A, B, ALPHA, BETA = 1.69, 406.4, 410.7, 0.34, 0.28  # equation 10
TOKENS_PER_PARAMETER = 20.0  # 1.4e12 tokens for 70e9 parameters (Table 3: 67e9 parameters, 1.5e12 tokens)


@dataclass(frozen=True)
class Sizing:
    """A model size and a number of tokens. `flops`: 6 N D; `loss`: by equation 10, in nats per token."""

    parameters: float
    tokens: float

    @property
    def flops(self) -> float:
        return 6 * self.parameters * self.tokens

    @property
    def loss(self) -> float:
        return loss(self.parameters, self.tokens)


def loss(parameters: float, tokens: float) -> float:
    """Returns E + A / N^alpha + B / D^beta (equation 10), in nats per token."""
    return E + A / parameters**ALPHA + B / tokens**BETA


def by_ratio(flops: float, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> Sizing:
    """Returns N = sqrt(C / (6 ratio)) parameters and ratio N tokens. Raises ValueError for a non-positive budget."""
    _check(flops)
    parameters = math.sqrt(flops / (6 * tokens_per_parameter))
    return Sizing(parameters, tokens_per_parameter * parameters)


def by_loss(flops: float) -> Sizing:
    """Returns the sizing with the least loss of equation 10 under the budget (equation 4).

    N = G (C/6)^(beta/(alpha+beta)), D = (C/6)^(alpha/(alpha+beta))/G, G = (alpha A / (beta B))^(1/(alpha+beta)). Gives
    smaller models and more tokens than the ratio of 20. Raises ValueError for a non-positive budget.
    """
    _check(flops)
    balance = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
    return Sizing(balance * (flops / 6) ** (BETA / (ALPHA + BETA)), (flops / 6) ** (ALPHA / (ALPHA + BETA)) / balance)


def _check(flops: float) -> None:
    if not 0 < flops < math.inf:
        raise ValueError(f"chinchilla: expected a positive number of operations, got {flops!r}")
