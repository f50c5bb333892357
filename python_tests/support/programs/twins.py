"""Moving averages of the trained weights, in the usual implementations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

DECAY = 0.75


class Twin:
    """The moving averages of several models. `how`: torch's AveragedModel, with a function of lists or of single
    tensors; or by hand, with values that are copied into the model for an evaluation."""

    def __init__(self, how: str, models: Sequence[nn.Module]) -> None:
        self.how, self.followed = how, list(models)
        self.averaged: list[AveragedModel] = []
        self.values: list[list[Tensor]] = []
        if how == "averaged":
            self.averaged = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(DECAY)) for m in models]
        elif how == "averaged one by one":
            self.averaged = [AveragedModel(m, avg_fn=get_ema_avg_fn(DECAY)) for m in models]
        else:
            self.values = [[p.detach().clone() for p in model.parameters()] for model in models]

    @torch.no_grad()
    def follow(self) -> None:
        """Updates the averages with the weights of the models."""
        for average, model in zip(self.averaged, self.followed, strict=False):
            average.update_parameters(model)
        for values, model in zip(self.values, self.followed, strict=False):
            weights = [p.detach() for p in model.parameters()]
            if self.how == "by hand":
                for value, weight in zip(values, weights, strict=True):
                    value.lerp_(weight, 1 - DECAY)
            else:
                for kind in _alike(values):
                    torch._foreach_lerp_([values[n] for n in kind], [weights[n] for n in kind], 1 - DECAY)

    @contextlib.contextmanager
    def models(self) -> Iterator[list[nn.Module]]:
        """Gives the models the averages as their weights within the context."""
        if self.averaged:
            yield list(self.averaged)
            return
        before = [[p.detach().clone() for p in model.parameters()] for model in self.followed]
        self._put(self.values)
        yield self.followed
        self._put(before)

    @torch.no_grad()
    def _put(self, values: Sequence[Sequence[Tensor]]) -> None:
        for model, each in zip(self.followed, values, strict=True):
            parameters = list(model.parameters())
            if self.how == "by hand":
                for parameter, value in zip(parameters, each, strict=True):
                    parameter.copy_(value)
            else:
                for kind in _alike(each):
                    torch._foreach_mul_([parameters[n] for n in kind], 0.0)  # DTensor has no _foreach_copy_
                    torch._foreach_add_([parameters[n] for n in kind], [each[n] for n in kind])


def _alike(values: Sequence[Tensor]) -> list[list[int]]:
    """Groups the indices of tensors by type: foreach functions need one type."""
    kinds: dict[type, list[int]] = {}
    for number, value in enumerate(values):
        kinds.setdefault(type(value.detach()), []).append(number)
    return list(kinds.values())
