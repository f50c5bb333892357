"""Small gradients over shared memory that are added after many later hops leave their mailbox entries in time."""

import copy

import torch
from harness import on_ranks
from reference import assert_same, full, random
from torch import nn

import rtp_ext


@on_ranks([2, 3], transport="shm", late_gradients=9, ring_timeout=10.0)
def test_late_gradients_do_not_block_later_hops(ring):
    torch.manual_seed(3)
    plain = nn.Sequential(*[nn.Linear(6, 6) for _ in range(12)]).double()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
    for step in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(random(3, 6, dtype=torch.float64, seed=step)).square().sum().backward()
        for name, parameter in plain.named_parameters():
            assert_same(full(model.get_parameter(name).grad), parameter.grad, 1e-10, name)
