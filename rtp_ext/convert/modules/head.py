"""The vocabulary head and the loss of a causal language model as one operation: logits never exist."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from rtp_ext.convert.modules.bundled import unhooked
from rtp_ext.families.blocks import has_usual_loss
from rtp_ext.functional._operation import Operation, rotate
from rtp_ext.functional.cross_entropy import LinearCrossEntropy, Loss
from rtp_ext.nn.linear import RotatedLinear
from rtp_ext.parameters.sharded_module import ShardedModule, mixin_of
from rtp_ext.words import Reduction

_IGNORED = -100  # transformers' own


class FusedHead(RotatedLinear):
    """A vocabulary head that returns its input while its model computes head and loss as one operation."""

    fusing = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input if self.fusing else super().forward(input)

    def _operation(self, key: str = "") -> Operation:
        return self.fused(Loss(_IGNORED)) if key == LinearCrossEntropy.key else super()._operation(key)

    def fused(self, loss: Loss) -> LinearCrossEntropy:
        return LinearCrossEntropy(self._options(), self.weight, self.bias, loss)


class FusedLossModel(ShardedModule):
    """Mixin of causal language models of the transformers package; the model's own class comes second.

    Where labels are given, the loss comes from `rotated_linear_cross_entropy` and the output has no logits. Without
    labels, and where the head has been replaced (by an adapter) or hooked, or the loss function changed, the model's
    own forward runs.
    """

    NAME_PREFIX = ""  # transformers writes the class name into the model's configuration

    lm_head: nn.Module

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        plain = super().forward  # type: ignore[misc]
        head: Any = self.lm_head
        labels, place = keywords.get("labels"), self.place_of_labels()
        if labels is None and len(arguments) > place:
            labels = arguments[place]
        if labels is None or not self.fuses():
            return plain(*arguments, **keywords)
        by_name = keywords.get("return_dict")
        if by_name is None:
            by_name = self.config.return_dict  # type: ignore[attr-defined]
        head.fusing = True
        try:
            output = plain(*arguments, **{**keywords, "return_dict": True})
        finally:
            head.fusing = False
        output = type(output)(**{key: value for key, value in output.items() if key != "logits"})
        return output if by_name else output.to_tuple()

    def place_of_labels(self) -> int:
        """Index of the labels among the arguments of the model's own forward."""
        return [*inspect.signature(super().forward).parameters].index("labels")  # type: ignore[misc]

    def fuses(self) -> bool:
        """Whether head and loss are unchanged since the conversion."""
        head: Any = self.lm_head
        return mixin_of(head) is FusedHead and unhooked(head) and has_usual_loss(self)

    place_of_labels._dynamo_marked_constant = True  # type: ignore[attr-defined]  # evaluated when a graph is compiled
    fuses._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @property
    def loss_function(self) -> Any:
        head = self._modules["lm_head"]  # type: ignore[attr-defined]
        if getattr(head, "fusing", False):
            return self._fused_loss
        return super().loss_function  # type: ignore[misc]

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value

    def _fused_loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Returns the loss of next tokens from the head's input, [..., T, D], as transformers' ForCausalLMLoss does."""
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        head: Any = self.lm_head
        shift_labels = shift_labels.to(logits.device)
        reduction: Reduction = "mean" if num_items_in_batch is None else "sum"
        settings, owner = Loss(ignore_index, reduction=reduction), head if ignore_index == _IGNORED else None
        (loss,) = rotate(head.fused(settings), [head._cast(logits), shift_labels], owner)
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch
