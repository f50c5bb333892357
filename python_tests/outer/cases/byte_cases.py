"""The bytes that a step sends, against closed forms.

K rings of G ranks, M parameters in 16 bits whose gradients are summed in float32, q = (K - 1) / K, m micro-batches.
Each rank sends in a step:

    between replicas    AllReduce, reduced once    8 M q / G     a reduce-scatter and an all-gather of 4 bytes
                        ZeroOuter, reduced once   10 M q / G     a reduce-scatter of 4 bytes, an all-gather of 2; over
                                                                 Gloo the reduce-scatter is an all-reduce: 8 and 2
    in the ring         2 + 2 + 4 bytes of M (G - 1) / G for each micro-batch: weights twice, gradients once
"""

import pytest
import torch
from reference import random
from replica_models import replicated
from torch import nn

import rtp_ext
from rtp_ext.outer import AllReduce, ZeroOuter
from rtp_ext.outer.replicas import Replicas

WIDTH = 12  # divisible by 4 and by 6
LAYERS = 3
MICRO = 3


class Handed:
    """Counts the bytes that policies pass to the process groups of the replicas, by collective."""

    def __init__(self, patch):
        self.bytes = {"begin_sum": 0, "begin_reduce_scatter": 0, "all_gather": 0}
        for name in self.bytes:
            patch.setattr(Replicas, name, self.counting(name, getattr(Replicas, name)))

    def counting(self, name, stock):
        def call(replicas, values):
            self.bytes[name] += values.nbytes
            return stock(replicas, values)

        return call

    def take(self):
        found = dict(self.bytes)
        self.bytes.update(dict.fromkeys(found, 0))
        return found


def byte_cases(rank, ranks, cases, shape):
    replicas, size = shape
    parameters = LAYERS * WIDTH * WIDTH
    once = parameters * (replicas - 1) // (replicas * size)  # M q / G
    local, piece = 4 * parameters // size, 2 * parameters // (size * replicas)
    forms = {
        AllReduce: (8 * once, {"begin_sum": local, "begin_reduce_scatter": 0, "all_gather": 0}),
        ZeroOuter: (10 * once, {"begin_sum": 0, "begin_reduce_scatter": local, "all_gather": piece}),
    }
    for kind, (form, handed_form) in forms.items():
        with cases.case(f"bytes of {kind.__name__} on {shape}"), pytest.MonkeyPatch.context() as patch:
            handed = Handed(patch)
            layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)]
            model = replicated(shape, model=nn.Sequential(*layers), outer=kind(), route="ring", bundle=False)
            policy, ring = rtp_ext.outer_of(model), rtp_ext.ring_of(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def counted(policy=policy, ring=ring):
                return policy.bytes_sent(), ring.bytes_sent("weight"), ring.bytes_sent("gradient")

            def step(ways, model=model, optimizer=optimizer, **_):
                """From one optimizer's step to the next one, and the gathers that follow this."""
                for micro, reduces in enumerate(ways):
                    rtp_ext.set_requires_all_reduce(model, reduces)
                    x = random(5, WIDTH, dtype=torch.bfloat16, seed=10 * rank + micro).requires_grad_()
                    model(x).float().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    policy_refresh(model)

            step((True,) * MICRO)
            for ways in ((False,) * (MICRO - 1) + (True,), (True,) * MICRO, (True,)):
                before = counted()
                handed.take()
                step(ways)
                outer, weights, gradients = (now - then for now, then in zip(counted(), before, strict=True))
                gathered = form - 8 * once if kind is ZeroOuter else 0  # after the step, and not with each reduction
                assert outer == (form - gathered) * sum(ways) + gathered, (outer, form, ways)
                expected = {what: n * (1 if what == "all_gather" else sum(ways)) for what, n in handed_form.items()}
                assert handed.take() == expected, (handed.bytes, expected)
                hop = parameters * (size - 1) // size
                assert (weights, gradients) == (len(ways) * 4 * hop, len(ways) * 4 * hop), (weights, gradients, hop)
            assert outer == form, "control: with one reduction the form itself"


def policy_refresh(model):
    """Makes the gathers that would otherwise happen at the start of the next forward."""
    policy = rtp_ext.outer_of(model)
    policy.begin_forward()
    policy.end_forward()
