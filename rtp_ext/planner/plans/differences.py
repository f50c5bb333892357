"""Whether plans are compared like with like: what they differ in beside the way to share the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rtp_ext.planner.specs.strategy import Strategy


def _recompute(strategy: Strategy) -> str:
    return "bundle" if strategy.bundle == "recompute" and strategy.recompute == "none" else strategy.recompute


def _field(name: str) -> Callable[[Strategy], str]:
    return lambda strategy: str(getattr(strategy, name))


# What any way to share the work can have, and what changes the arithmetic of a step.
_ASPECTS: dict[str, Callable[[Strategy], str]] = {
    "loss": _field("effective_loss"),
    "stack": _field("effective_stack"),
    "recompute": _recompute,
    **{
        name: _field(name)
        for name in (
            *("param_dtype", "reduce_dtype", "optimizer", "flash_attention", "fp8", "compiled", "fused_norm"),
            *("offload", "travel", "gradient_travel", "outer"),
        )
    },
}


def differences(strategies: Sequence[Strategy]) -> dict[str, list[str]]:
    """By aspect, the values that occur, where there are several; empty where plans are compared like with like.

    Aspects are the loss head, the stack (dtypes of states, kernels), what is recomputed, and the fields of `Strategy`
    on dtypes, kernels, offloading and policies between rings. Degrees, schedules and micro-batches are the way to share
    the work.
    """
    found = {name: list(dict.fromkeys(map(aspect, strategies))) for name, aspect in _ASPECTS.items()}
    return {name: values for name, values in found.items() if len(values) > 1}


def differences_line(strategies: Sequence[Strategy]) -> str:
    """The same in words; empty where there is nothing to say."""
    text = "; ".join(f"{name} ({', '.join(values)})" for name, values in differences(strategies).items())
    return f"beside the way to share the work, these plans differ in: {text}" if text else ""
