"""The begin and the end of each forward of a model, by which shards are pulled ahead within it."""

from __future__ import annotations

from typing import Any

from torch import nn

from rtp_ext.convert.modules.bundled import OWN_HOOKS
from rtp_ext.ring.inference import InferenceRing


def mark_forwards(model: nn.Module, ring: InferenceRing) -> None:
    """Installs hooks that tell the ring when a forward of the model begins and ends."""
    model.register_forward_pre_hook(_Begin(ring), prepend=True)
    model.register_forward_hook(_End(ring), always_call=True)


class _Begin:
    def __init__(self, ring: InferenceRing) -> None:
        self.ring = ring

    def __call__(self, *_: Any) -> None:
        self.ring.begin_forward()


class _End(_Begin):
    def __call__(self, *_: Any) -> None:
        self.ring.end_forward()


for _hook in (_Begin, _End):
    setattr(_hook, OWN_HOOKS, True)
