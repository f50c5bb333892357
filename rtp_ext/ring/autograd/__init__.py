"""The ring's rules for autograd: refused transforms, double backward, delivery of gradients, checks of operands."""

from rtp_ext._native import accumulates, read_within
from rtp_ext.ring.autograd.gradient_delivery import (
    FROZEN,
    GRADIENT_HANDLER,
    OFFLOADED,
    Delivery,
    GradientHandler,
    as_gradient,
    as_parameter,
    deliver_gradient,
    gradient_handler_of,
    offloaded_shard_of,
    rounded,
    run_collective,
    summing_dtype,
    unrounded,
)
from rtp_ext.ring.autograd.once_differentiable import first_order_only, wanted
from rtp_ext.ring.autograd.readable_memory import computes_plainly, expect_memory, holds_memory
from rtp_ext.ring.autograd.transforms import other_modes, refuse_transforms, returns, seen_by, storing_modes, unseen

__all__ = [
    "FROZEN",
    "GRADIENT_HANDLER",
    "OFFLOADED",
    "Delivery",
    "GradientHandler",
    "accumulates",
    "as_gradient",
    "as_parameter",
    "computes_plainly",
    "deliver_gradient",
    "expect_memory",
    "first_order_only",
    "gradient_handler_of",
    "holds_memory",
    "offloaded_shard_of",
    "other_modes",
    "read_within",
    "refuse_transforms",
    "returns",
    "rounded",
    "run_collective",
    "seen_by",
    "storing_modes",
    "summing_dtype",
    "unrounded",
    "unseen",
    "wanted",
]
