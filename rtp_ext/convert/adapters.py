"""Adapters of the peft package that were put around rotated layers: they merge into shards."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from rtp_ext.parameters.sharded_module import mixed_class
from rtp_ext.parameters.sharding import frozen_of


class MergingAdapter:
    """Mixin of peft's layers; the layer's own class comes second.

    An adapter is whole and the same on every rank; its base weight is a shard, to which every rank adds its part of the
    adapter.
    """

    NAME_PREFIX = ""  # peft writes names of classes into its messages

    def merge(self, *arguments: Any, **keywords: Any) -> Any:
        self._refuse_blocks("merge")
        with implicit_replication():
            return super().merge(*arguments, **keywords)  # type: ignore[misc]

    def unmerge(self, *arguments: Any, **keywords: Any) -> Any:
        self._refuse_blocks("unmerge")
        with implicit_replication():
            return super().unmerge(*arguments, **keywords)  # type: ignore[misc]

    def _refuse_blocks(self: Any, what: str) -> None:
        frozen = frozen_of(getattr(self.get_base_layer(), "weight", None))
        if frozen is not None:
            raise ValueError(
                f"{what}: expected a base weight in a floating-point dtype, got blocks of {frozen.format}, whose "
                "codes cannot hold the sum: merge into the plain model, with the values of rtp_ext.frozen_weights"
            )


def extend_adapters(root: nn.Module) -> None:
    """Changes the classes of a model's peft layers so that they merge into, and out of, sharded layers."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return
    for part in root.modules():
        if isinstance(part, MergingAdapter) or not isinstance(part, tuners.BaseTunerLayer):
            continue
        adapted: Any = part
        if any(isinstance(parameter, DTensor) for parameter in adapted.get_base_layer()._parameters.values()):
            part.__class__ = mixed_class(MergingAdapter, type(part))
