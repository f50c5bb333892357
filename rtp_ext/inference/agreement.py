"""The comparison of an update of weights among the ranks."""

from __future__ import annotations

import hashlib
from typing import Any

from rtp_ext._native import RotationError
from rtp_ext.ring.inference import InferenceRing


def agree(ring: InferenceRing, failure: Exception | None, tensors: Any, *, written: bool) -> None:
    """Raises where an update has failed on a rank, or where `tensors`, a description of what is updated, differs
    between ranks. Collective.

    failure: that of this rank, which is raised here. written: weights may have been written; otherwise the failure of
    another rank is a ValueError here, too.
    """
    problem = None if failure is None else f"{type(failure).__name__}: {failure}"
    answers = ring.exchange((problem, hashlib.sha256(repr(tensors).encode()).hexdigest()))
    if failure is not None:
        raise failure
    for rank, (theirs, digest) in enumerate(answers):
        if theirs is not None and written:
            raise RotationError(f"update_weights failed on rank {rank}, the weights are partly new: {theirs}")
        if theirs is not None:
            raise ValueError(f"update_weights failed on rank {rank}, no weight has changed: {theirs}")
        if digest != answers[0][1]:
            raise ValueError(f"update_weights: expected the tensors of rank 0 on every rank, got others on rank {rank}")
