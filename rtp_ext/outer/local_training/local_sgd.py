"""LocalSGD: replicas train apart and average their weights now and then."""

from __future__ import annotations

from rtp_ext.outer.local_training.after_steps import AfterSteps
from rtp_ext.outer.policy import OuterPolicy


class LocalSGD(AfterSteps):
    """Weights are averaged over replicas after every `period` steps; between, each trains on its own gradients.

    The optimizer's state stays every replica's own. With period=1, SGD (momentum and weight decay included) trains as
    data parallelism does; AdamW does not, whose steps are no linear function of the gradient. Gradient scaling that
    leaves out steps (GradScaler) has to leave them out on every replica.

    Args:
        period: steps from one average to the next.
        warmup: so many first steps are averaged each; the periods begin after them.

    Source: Stich, Local SGD converges fast and communicates little (arXiv 1805.09767); Lin et al., post-local SGD
    (arXiv 1808.07217), whose first phase averages gradients instead.
    """

    def __init__(self, period: int, warmup: int = 0) -> None:
        super().__init__()
        self.period, self.warmup = at_least("LocalSGD", "period", period, 1), at_least("LocalSGD", "warmup", warmup, 0)

    def __repr__(self) -> str:
        return f"LocalSGD(period={self.period}, warmup={self.warmup})"

    def _anew(self) -> OuterPolicy:
        return LocalSGD(self.period, self.warmup)

    def _act(self) -> None:
        if self._steps <= self.warmup or (self._steps - self.warmup) % self.period == 0:
            self._meet("the mean of weights")
            self._average_weights()


def at_least(policy: str, what: str, value: int, least: int) -> int:
    """`value`, an int. Raises ValueError where it is less, TypeError where it is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{policy}: expected {what} to be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{policy}: expected {what} >= {least}, got {value}")
    return value
