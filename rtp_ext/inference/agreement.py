"""The comparison of an update of weights among the ranks."""

from __future__ import annotations

import hashlib

from rtp_ext._native import RotationError
from rtp_ext.ring.inference import InferenceRing
from rtp_ext.ring.links.agree import expect_same_lines, expect_success, in_words


def agree_on_update(ring: InferenceRing, failure: Exception | None, tensors: list[str], *, written: bool) -> None:
    """Raises where an update has failed on a rank, or where `tensors`, lines that describe what is updated, differ
    between ranks. Collective.

    failure: that of this rank, which is raised here. written: this rank may have written weights. Where one has, the
    failure of another rank is a RotationError here, and forwards are refused until an update succeeds; otherwise it is
    a ValueError.
    """
    answers = ring.exchange((in_words(failure), hashlib.sha256(repr(tensors).encode()).hexdigest(), written))
    failures, digests, wrote = zip(*answers, strict=True)
    partly_new, gate = any(wrote), ring.agreement.gate
    raises: type[Exception] = RotationError if partly_new else ValueError
    hint = ", the weights are partly new" if partly_new else ", no weight has changed"
    try:
        expect_success("update_weights", failures, failure, raises=raises, hint=hint)
        if len(set(digests)) > 1:
            expect_same_lines("update_weights, the tensors of all ranks", ring.exchange(tensors))
    except Exception as error:
        gate.partly_new = str(error) if partly_new else gate.partly_new
        raise
    gate.partly_new = "" if partly_new else gate.partly_new
