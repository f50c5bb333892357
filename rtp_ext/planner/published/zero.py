"""Memory of model states by ZeRO stage: Rajbhandari et al., arXiv 1910.02054, section 5 and Table 1."""

from __future__ import annotations

from rtp_ext.planner.constants import check_at_least

OPTIMIZER_BYTES = 12  # K of mixed-precision Adam: float32 master weight and two moments


def model_state_bytes(
    parameters: float, dp: int = 1, stage: int = 0, optimizer_bytes: float = OPTIMIZER_BYTES
) -> float:
    """Returns the bytes of 16-bit weights and gradients and of optimizer state on each of `dp` GPUs.

    (2 + 2 + K) P without ZeRO; 4 P + K P / N with stage 1 (P_os); 2 P + (2 + K) P / N with stage 2 (P_os+g);
    (4 + K) P / N with stage 3 (P_os+g+p).

    Raises:
        ValueError: another stage, or no GPUs.
    """
    check_at_least("zero", 1, dp=dp)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero: expected stage 0, 1, 2 or 3, got {stage!r}")
    weights = 2 / dp if stage >= 3 else 2
    gradients = 2 / dp if stage >= 2 else 2
    optimizer = optimizer_bytes / dp if stage >= 1 else optimizer_bytes
    return parameters * (weights + gradients + optimizer)
