"""LocalSGD: replicas train on their own gradients and average their weights periodically."""

from __future__ import annotations

from rtp_ext.outer.local_training.after_steps import AfterSteps
from rtp_ext.outer.policy import OuterPolicy


class LocalSGD(AfterSteps):
    """Averages weights over replicas after every `period` steps; each replica trains on its own gradients.

    The optimizer's state is not averaged. With period=1, SGD (including momentum and weight decay) trains as in data
    parallelism; AdamW does not, because its steps are not linear in the gradient. Gradient scaling that skips steps
    (GradScaler) has to skip them on every replica.

    Args:
        period: steps between averages.
        warmup: number of initial steps that are averaged each; the periods begin after them.

    Source: Stich, Local SGD converges fast and communicates little (arXiv 1805.09767); Lin et al., post-local SGD
    (arXiv 1808.07217), whose first phase averages gradients instead.
    """

    def __init__(self, period: int, warmup: int = 0) -> None:
        super().__init__()
        self.period, self.warmup = at_least("LocalSGD", "period", period, 1), at_least("LocalSGD", "warmup", warmup, 0)

    def __repr__(self) -> str:
        return f"LocalSGD(period={self.period}, warmup={self.warmup})"

    def _with_same_settings(self) -> OuterPolicy:
        return LocalSGD(self.period, self.warmup)

    def _act(self) -> None:
        if self._steps <= self.warmup or (self._steps - self.warmup) % self.period == 0:
            self._agree("the mean of weights")
            self._average_weights()


def at_least(policy: str, what: str, value: int, least: int) -> int:
    """Returns `value`. Raises TypeError if it is no int, ValueError if it is smaller than `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{policy}: expected {what} to be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{policy}: expected {what} >= {least}, got {value}")
    return value
