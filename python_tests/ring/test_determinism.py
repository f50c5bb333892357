"""Two runs are bitwise equal for any order of arrivals: every operation on every transport, and a model that trains."""

import pytest
import torch
from harness import on_ranks
from models import batch_loss, make_model, train
from operation_checks import rotated_result
from pretended_hosts import pretend_hosts
from reference import random
from test_two_level import _operations

import rtp_ext
from rtp_ext.nn import RotatedConv1d

DELAYED = {"delay_us": 400}
ROUTES = {"shm": ("ring", "direct", "gather"), "tcp": ("ring",), "c10d": ("direct",), "shm+tcp": ("two-level",)}


def everything(ring) -> list[torch.Tensor]:
    """Returns the results of all operations: outputs, gradients of inputs and of parameters."""
    told = []
    for operation in _operations().values():
        shards = operation.shards(ring.rank, ring.size)
        result = rotated_result(operation, ring, "2d", 3, shards)
        told += [result.output, *result.input_gradients, *result.gradients.values()]
    torch.manual_seed(1)
    convolution = RotatedConv1d(5, 7, 3, ring=ring, dtype=torch.float64)
    convolution(random(2, 5, 9, dtype=torch.float64, seed=ring.rank)).square().sum().backward()
    told += [parameter.grad.to_local() for parameter in convolution.parameters()]
    return [tensor for tensor in told if tensor is not None]


def trained(ring, rank) -> list[torch.Tensor]:
    model = rtp_ext.fully_rotate(make_model(torch.float32), mesh=ring)
    losses = train(model, lambda step: batch_loss(model, rank, step), 3)
    return [torch.tensor(losses), *(parameter.to_local() for parameter in model.parameters())]


def equal(ours, theirs) -> bool:
    assert len(ours) == len(theirs)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@on_ranks()
@pytest.mark.parametrize(("transport", "ranks"), [("shm", 2), ("shm", 3), ("tcp", 3), ("c10d", 3), ("shm+tcp", 4)])
def test_two_runs_are_equal_bit_by_bit(rank, cases, transport):
    if transport == "shm+tcp":
        pretend_hosts(rank, 2)
    for route in ROUTES[transport]:
        options = {"transport": transport, "route": route, "timeout": 60.0}
        with rtp_ext.Ring(**options) as calm, rtp_ext.Ring(**options, transport_options=DELAYED) as rough:
            assert (calm.transport, calm.route) == (transport, route)
            with cases.case(f"operations, {route}"):
                found = everything(calm)
                assert len(found) > 40 and equal(found, everything(rough))
            with cases.case(f"a model, {route}"):
                assert equal(trained(calm, rank), trained(rough, rank))
    with cases.case("control: the least bit of one number"):
        other = [tensor.clone() for tensor in found]
        other[0].view(-1)[0] = torch.nextafter(other[0].view(-1)[0], torch.tensor(9e9, dtype=other[0].dtype))
        assert not equal(found, other)
