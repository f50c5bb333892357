"""Experts that other code has divided among ranks, and dispatches tokens to; here their shards rotate."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from rtp_ext.families.recognised import computes_grouped_experts, grouped_experts
from rtp_ext.functional.experts import Experts
from rtp_ext.nn._base import RotatedModule
from rtp_ext.parameters.sharding import shard_anew
from rtp_ext.ring import Ring


class RotatedGroupedExperts(RotatedModule, nn.Module):
    """A module of stacked experts, as torchtitan's GroupedExperts, whose tokens its own hooks send to other ranks.

    A call has rows [n, D] in the order of all E experts, and their numbers [E]. The hooks send them on, and `forward`
    gets the rows of this rank's experts, in their order, and their numbers [E / N]; rows behind the last are padding.
    The hooks send each rank the rows of E / N consecutive experts. In a mesh whose ring comes before the experts, parts
    have others: there rows are in the order of parts from before the hooks until after them.
    """

    recompute: bool

    @staticmethod
    def refusal(module: nn.Module) -> str | None:
        """Returns why the experts of a module cannot rotate; None if they can."""
        names = grouped_experts(module)
        if names is None:
            own = {key: tuple(each.shape) for key, each in module._parameters.items() if each is not None}
            return f"expected the parameters w1 and w3 [E, H, D] and w2 [E, D, H], got {own}"
        if not computes_grouped_experts(module, names):
            return "its forward does not compute w2 (silu(w1 x) * w3 x) for rows in the order of experts, and numbers"
        return None

    def _rotate(self, ring: Ring, *, memo: dict[int, nn.Parameter], recompute: bool = False, **options: Any) -> None:
        self.recompute = recompute
        for parameter in self._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = shard_anew(parameter, ring)
        self._adopt(ring, dict.fromkeys(self._parameters, 0), memo=memo, **options)

    def __call__(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        experts = self.ring.experts
        if experts is None or experts.in_order:
            return super().__call__(x, counts)
        count = next(self.parameters()).shape[0]
        if counts.shape != (count,):
            raise ValueError(
                f"{self.qualified_name}: expected the numbers of rows of {count} experts, which hooks of the module "
                f"dispatch, got shape {tuple(counts.shape)}: dispatch outside of them takes a mesh whose dimension of "
                "experts comes before the ring"
            )
        places = experts.divide(count).places
        order = places[_experts_of(x, counts)].argsort(stable=True)
        y = super().__call__(x.index_select(0, order), counts[places[:count].argsort()])
        return torch.empty_like(y).index_copy(0, order, y)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        experts = self.ring.experts
        count = next(self.parameters()).shape[0] // (1 if experts is None else experts.size)
        # the ranks of other experts wait for the outputs
        with contextlib.nullcontext() if experts is None else experts.ended_by_errors(self.qualified_name):
            if counts.shape != (count,):
                raise ValueError(
                    f"{self.qualified_name}: expected the numbers of rows of the {count} experts of this rank, got "
                    f"shape {tuple(counts.shape)}"
                )
            return self._operation().run_arrived(self._cast(x), _experts_of(x, counts).unsqueeze(1)).to(x.dtype)

    def _operation(self, key: str = "") -> Experts:
        gate, up, down = (getattr(self, name) for name in grouped_experts(self) or ())
        return Experts(self._options(), [up, None, down, None, gate], "swiglu", recompute=self.recompute)


def _experts_of(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns the number of the expert of each row; that of all experts for rows behind the last."""
    places = torch.arange(x.shape[0], device=x.device)
    return torch.searchsorted(counts.to(torch.int64).cumsum(0), places, right=True)
