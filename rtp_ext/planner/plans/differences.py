"""Settings in which plans differ other than the layout, so that their comparison would be unfair."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rtp_ext.planner.specs.strategy import Strategy


def _recompute(strategy: Strategy) -> str:
    return "bundle" if strategy.bundle == "recompute" and strategy.recompute == "none" else strategy.recompute


def _field(name: str) -> Callable[[Strategy], str]:
    return lambda strategy: str(getattr(strategy, name))


# Settings that are independent of the layout, or that change the arithmetic of a step.
_ASPECTS: dict[str, Callable[[Strategy], str]] = {
    "loss": _field("effective_loss"),
    "stack": _field("effective_stack"),
    "recompute": _recompute,
    "products in 8 bits": lambda each: each.recipe or ("fp8 " + each.fp8_scaling if each.fp8 else "no"),
    **{
        name: _field(name)
        for name in (
            *("param_dtype", "reduce_dtype", "optimizer", "flash_attention", "compiled", "fused_norm"),
            *("offload", "travel", "gradient_travel", "outer"),
        )
    },
}


def differences(strategies: Sequence[Strategy]) -> dict[str, list[str]]:
    """Returns the different values by aspect, for aspects with several values; {} where the comparison is fair.

    Aspects are the loss head, the stack (dtypes of states, kernels), the recomputed activations, and the fields of
    `Strategy` on dtypes, kernels, offloading and policies between rings. Degrees, schedules and micro-batches are the
    layout, and are not compared.
    """
    found = {name: list(dict.fromkeys(map(aspect, strategies))) for name, aspect in _ASPECTS.items()}
    return {name: values for name, values in found.items() if len(values) > 1}


def differences_line(strategies: Sequence[Strategy]) -> str:
    """Formats `differences` as one line; empty where there are none."""
    text = "; ".join(f"{name} ({', '.join(values)})" for name, values in differences(strategies).items())
    return f"besides the layout, these plans differ in: {text}" if text else ""
