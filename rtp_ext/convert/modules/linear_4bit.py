"""Linear layers with weights in 4 bits of other packages, whose blocks rotate."""

from __future__ import annotations

from typing import Any

import torch

from rtp_ext.functional import rotated_linear
from rtp_ext.nn import RotatedLinear


class RotatedLinear4bit(RotatedLinear):
    """Mixin of `Linear4bit` of bitsandbytes, and of nn.Linear with an NF4Tensor of torchao; the layer's own class comes
    second. Its bits do not change.

    As there, products are computed in the layer's `compute_dtype`, which layers of torchao have not, or in the dtype of
    the input, and the output has the dtype of the input. A `param_dtype` of the policy and torch.autocast take
    precedence.
    """

    compute_dtype: torch.dtype | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.mp_policy.param_dtype is not None or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        options: dict[str, Any] = {**self._rotation(), "compute_dtype": self.compute_dtype or input.dtype}
        return rotated_linear(input.to(options["compute_dtype"]), self.weight, self.bias, **options).to(input.dtype)
