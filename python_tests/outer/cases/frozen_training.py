"""DiLoCo of n workers in one process, parameter by parameter; some parameters are frozen for a while."""

from __future__ import annotations

import torch
from torch import nn


class Outer:
    """`parts`: names by fragment; `period`, `delay`, `keep` and `make` (an outer optimizer) as DiLoCo's."""

    def __init__(self, parts, period, make, delay=0, keep=0.0):
        self.parts, self.period, self.make, self.delay, self.keep = parts, period, make, delay, keep
        self.anchors: dict = {}  # with an outer optimizer each
        self.frozen: set[str] = set()
        self.sent: dict = {}  # by name: the step after which it applies, and the movement

    def follow(self, workers):
        """Updates the frozen parameters, and the anchors of thawed ones, before a step."""
        for name, those in _named(workers).items():
            if not those[0].requires_grad:
                self.frozen.add(name)
                self.sent.pop(name, None)
            elif name in self.frozen or name not in self.anchors:
                self.frozen.discard(name)
                _put(those, _mean(those))
                anchor = nn.Parameter(those[0].detach().clone())
                self.anchors[name] = anchor, self.make([anchor])

    def __call__(self, workers):
        named = _named(workers)
        for number, part in enumerate(self.parts):
            due = (number + 1) * self.period // len(self.parts)
            for name in part:
                those, (anchor, outer) = named[name], self.anchors[name]
                if workers.step % self.period == due % self.period:
                    if name in self.frozen:
                        _put(those, _mean(those))
                    else:
                        self.sent[name] = workers.step, anchor.detach() - _mean(those)
                when, moved = self.sent.get(name, (None, None))
                if when is not None and workers.step == when + self.delay:
                    anchor.grad = moved
                    outer.step()
                    for each in those:
                        each.copy_(self.keep * each + (1 - self.keep) * anchor.detach())


def _named(workers):
    every = [dict(model.named_parameters()) for model in workers.models]
    return {name: [named[name] for named in every] for name in every[0]}


def _mean(tensors):
    return torch.stack([tensor.detach() for tensor in tensors]).mean(0)


def _put(tensors, value):
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(value)
