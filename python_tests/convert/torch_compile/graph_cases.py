"""Compares steps of a compiled model with those of the eager one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from reference import assert_same, random
from torch import nn
from torch._dynamo import trace_rules
from torch.distributed.tensor import DTensor

import rtp_ext

in_graphs = pytest.mark.skipif(
    not hasattr(trace_rules, "BUILTIN_INLINE_WHEN_CALLED"),
    reason="torch 2.11 has no list of files that are traced only when called: every operation breaks the graph",
)


class Mixed(nn.Module):
    """Every operation that goes into graphs except the fused head, and a rotated layer with an unused output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(19, 10)
        self.unused = nn.Linear(10, 7)
        self.norm = nn.LayerNorm(10)
        self.mlp = nn.Sequential(nn.Linear(10, 23), nn.GELU(), nn.Linear(23, 10))
        self.scale = nn.Parameter(random(10, dtype=torch.float64, seed=5))
        self.head = nn.Linear(10, 19, bias=False)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = random(*parameter.shape, dtype=torch.float64, seed=200 + number)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        self.unused(x)
        return self.head(x + self.scale * self.mlp(self.norm(x)))


def step(model: nn.Module, call: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any], tuple[int, int]]:
    """The output, all gradients, and the hops of a step."""
    ring = rtp_ext.ring_of(model)
    before = ring.hops("weight"), ring.hops("gradient")
    output = call(ids)
    output.square().mean().backward()
    gradients = {name: _gradient(parameter) for name, parameter in model.named_parameters()}
    model.zero_grad()
    return output.detach(), gradients, (ring.hops("weight") - before[0], ring.hops("gradient") - before[1])


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = parameter.grad
    return gradient.to_local().clone() if isinstance(gradient, DTensor) else gradient


def compare(cases, name, make, compiled, batches, tolerance=1e-12, eagerly=lambda model, ids: model(ids)):
    """`make`: a converted model, called twice; `compiled`: what to call in the place of one.

    Returns the last output of the eager one.
    """
    torch._dynamo.reset()
    eager, model = make(), make()
    call = compiled(model)
    for ids in batches:
        expected, gradients, hops = step(eager, functools.partial(eagerly, eager), ids)
        output, theirs, their_hops = step(model, call, ids)
        with cases.case(f"{name}, {ids.shape[1]} tokens"):
            assert output.dtype == expected.dtype, f"expected {expected.dtype}, got {output.dtype}"
            assert_same(output, expected, tolerance, "output")
            for key, gradient in gradients.items():
                if gradient is None:
                    assert theirs[key] is None, f"expected no gradient of {key}"
                else:
                    assert_same(theirs[key], gradient, tolerance, key)
            assert their_hops == hops, f"expected {hops} hops, got {their_hops}"
    for each in (eager, model):
        rtp_ext.ring_of(each).close()
    return expected
