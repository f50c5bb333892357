"""RotatedLinearCrossEntropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rtp_ext.functional._operation import rotate
from rtp_ext.functional.cross_entropy import LinearCrossEntropy, Loss, check_settings
from rtp_ext.nn._base import RotatedModule
from rtp_ext.parameters.initial import construct
from rtp_ext.ring import Ring
from rtp_ext.words import Reduction


class RotatedLinearCrossEntropy(RotatedModule, nn.Linear):
    """A vocabulary head and its cross-entropy: `CrossEntropyLoss(...)(linear(input), target)` without the logits.

    Args:
        in_features, out_features, bias, device, dtype: as in nn.Linear; D features, a vocabulary of V.
        ring: the ranks to shard the weight [V, D] and the bias [V] over, along the vocabulary. Collective: use the same
            seed on every rank.
        ignore_index, label_smoothing, reduction: as in nn.CrossEntropyLoss.
        soft_cap, z_loss: see functional.rotated_linear_cross_entropy.

    forward(input [..., D], target [...]) -> loss, a scalar, or [...] where reduction is "none"; this rank's own batch.
    See functional.rotated_linear_cross_entropy.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ring: Ring,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        soft_cap: float | None = None,
        z_loss: float = 0.0,
    ) -> None:
        values = construct(self, super().__init__, in_features, out_features, bias, device, dtype)
        self._rotate(
            ring,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
            soft_cap=soft_cap,
            z_loss=z_loss,
        )
        values.fill(ring)

    @classmethod
    def from_module(
        cls, module: nn.Linear, ring: Ring, loss: nn.CrossEntropyLoss | None = None, **options: Any
    ) -> RotatedLinearCrossEntropy:
        """Returns a rotated copy of a head (meta device included) with its loss; `module` and `loss` do not change.

        Args:
            loss: source of ignore_index, label_smoothing and reduction. Class weights raise ValueError.
            options: the other keyword arguments of the constructor; all of them if there is no `loss`.
        """
        if loss is not None:
            options.update(_settings_of(loss, options))
        twin = cls._from(module, nn.Linear)
        twin._rotate(ring, **options)
        return twin

    def _rotate(
        self,
        ring: Ring,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        soft_cap: float | None = None,
        z_loss: float = 0.0,
        **options: Any,
    ) -> None:
        loss = Loss(ignore_index, label_smoothing, reduction, soft_cap, z_loss)
        check_settings(type(self).__name__, loss)
        self.ignore_index, self.label_smoothing, self.reduction, self.soft_cap, self.z_loss = loss
        self._adopt(ring, {"weight": 0, "bias": 0}, **options)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return rotate(self._operation(), [self._cast(input), target], self)[0]

    def _operation(self, key: str = "") -> LinearCrossEntropy:
        loss = Loss(self.ignore_index, self.label_smoothing, self.reduction, self.soft_cap, self.z_loss)
        return LinearCrossEntropy(self._options(), self.weight, self.bias, loss)

    def extra_repr(self) -> str:
        settings = ("ignore_index", "label_smoothing", "reduction", "soft_cap", "z_loss")
        return ", ".join([super().extra_repr(), *(f"{name}={getattr(self, name)}" for name in settings)]) + (
            f", ring={self.ring.size}"
        )


def _settings_of(loss: nn.CrossEntropyLoss, options: dict[str, Any]) -> dict[str, Any]:
    name = "RotatedLinearCrossEntropy.from_module"
    if type(loss) is not nn.CrossEntropyLoss:
        raise TypeError(f"{name}: expected a CrossEntropyLoss, got a {type(loss).__name__}")
    if loss.weight is not None:
        raise ValueError(
            f"{name}: expected a CrossEntropyLoss without class weights, got one with {loss.weight.numel()}"
        )
    settings = {key: getattr(loss, key) for key in ("ignore_index", "label_smoothing", "reduction")}
    twice = sorted(settings.keys() & options.keys())
    if twice:
        raise ValueError(f"{name}: expected {', '.join(twice)} from the loss or as an argument, got both")
    return settings
