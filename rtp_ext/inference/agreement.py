"""The comparison of an update of weights among the ranks."""

from __future__ import annotations

import hashlib
from typing import Any

from rtp_ext._native import RotationError
from rtp_ext.ring.inference import InferenceRing


def agree_on_update(ring: InferenceRing, failure: Exception | None, tensors: Any, *, written: bool) -> None:
    """Raises where an update has failed on a rank, or where `tensors`, a description of what is updated, differs
    between ranks. Collective.

    failure: that of this rank, which is raised here. written: this rank may have written weights. Where one has, the
    failure of another rank is a RotationError here, and forwards are refused until an update succeeds; otherwise it is
    a ValueError.
    """
    problem = None if failure is None else f"{type(failure).__name__}: {failure}"
    answers = ring.exchange((problem, hashlib.sha256(repr(tensors).encode()).hexdigest(), written))
    partly_new = any(theirs for _, _, theirs in answers)
    error = failure
    for rank, (theirs, digest, _) in enumerate(answers):
        if error is None and theirs is not None and partly_new:
            error = RotationError(f"update_weights failed on rank {rank}, the weights are partly new: {theirs}")
        elif error is None and theirs is not None:
            error = ValueError(f"update_weights failed on rank {rank}, no weight has changed: {theirs}")
        elif error is None and digest != answers[0][1]:
            error = ValueError(
                f"update_weights: expected the tensors of rank 0 on every rank, got others on rank {rank}"
            )
    if partly_new:
        ring.agreement.gate.partly_new = "" if error is None else str(error)
    if error is not None:
        raise error
