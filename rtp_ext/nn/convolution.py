"""RotatedConv1d, RotatedConv2d and RotatedConv3d."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rtp_ext.functional import rotated_convolution
from rtp_ext.nn._base import RotatedModule
from rtp_ext.parameters.initial import construct
from rtp_ext.ring import Ring
from rtp_ext.words import Padding, PaddingMode


class _RotatedConvolution(RotatedModule):
    """Base class of the three rotated convolutions."""

    _plain: type[nn.Module]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ring: Ring,
    ) -> None:
        shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        values = construct(self, super().__init__, *shape, device, dtype)  # type: ignore[arg-type]
        self._rotate(ring)
        values.fill(ring)

    @classmethod
    def from_module(cls, module: Any, ring: Ring) -> Any:
        """A rotated twin of `module` (meta device included), which is left as it is."""
        twin = cls._from(module, cls._plain)
        twin._rotate(ring)
        return twin

    def _rotate(self, ring: Ring, **options: Any) -> None:
        self._adopt(ring, {"weight": 0, "bias": 0}, **options)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        module: Any = self
        return rotated_convolution(
            module._cast(input),
            module.weight,
            module.bias,
            stride=module.stride,
            padding=module.padding,
            dilation=module.dilation,
            groups=module.groups,
            padding_mode=module.padding_mode,
            **self._rotation(),
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ring={self.ring.size}"  # type: ignore[misc]


class RotatedConv1d(_RotatedConvolution, nn.Conv1d):
    """nn.Conv1d whose weight and bias shards, cut along the output channels, rotate.

    Args: those of nn.Conv1d, and
        ring: the ranks to shard the parameters over. Collective: use the same seed on every rank.

    Input [N, C, L] or [C, L], this rank's own batch; output [N, O, L'] or [O, L']. See functional.rotated_convolution.
    """

    _plain = nn.Conv1d


class RotatedConv2d(_RotatedConvolution, nn.Conv2d):
    """nn.Conv2d whose weight and bias shards, cut along the output channels, rotate. See RotatedConv1d."""

    _plain = nn.Conv2d


class RotatedConv3d(_RotatedConvolution, nn.Conv3d):
    """nn.Conv3d whose weight and bias shards, cut along the output channels, rotate. See RotatedConv1d."""

    _plain = nn.Conv3d
