"""The constructor of RotatedLinear matches nn.Linear, and a linear layer's saved tensors. test_operations.py tests its
results."""

import pytest
import torch
from harness import run_ranks
from operation_checks import saved_tensors
from operations.layers import make_linear
from reference import assert_same, chunk, full, local, random
from torch import nn

import rtp_ext
from rtp_ext.functional import rotated_linears
from rtp_ext.nn import RotatedLinear

TIMEOUT = 30.0


def _construct(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        module = RotatedLinear(10, 7, ring=ring, dtype=torch.float64)
        assert isinstance(module, nn.Linear)
        assert (module.in_features, module.out_features) == (10, 7)
        assert list(module.state_dict()) == ["weight", "bias"]
        assert module.weight.shape == (7, 10) and module.bias.shape == (7,)
        assert local(module.weight).shape == chunk(torch.empty(7, 10), ranks, rank).shape
        assert RotatedLinear(10, 7, bias=False, ring=ring).bias is None
        whole = full(module.weight)
        bound = 10**-0.5
        assert whole.abs().max() <= bound and whole.unique().numel() == whole.numel(), "nn.Linear's initial values"
        meta = RotatedLinear(10, 7, ring=ring, device="meta")
        assert meta.weight.is_meta
        twin = nn.Linear(10, 7)
        shards = RotatedLinear.from_module(twin, ring)
        assert_same(full(shards.weight), twin.weight, 0.0, "weight")
        assert not shards.train(False).training
        return whole.tolist()


def test_constructor_is_that_of_nn_linear():
    values = run_ranks(_construct, 3)
    assert values[0] == values[1] == values[2]


def test_only_what_a_backward_reads_is_saved():
    """The input where weights get gradients, in either layout; no copy of a weight."""
    ring = rtp_ext.Ring.emulated(2)
    for dim in (0, 1):
        operation = make_linear((6, 8), dim=dim)
        for trained in ((), ("weight",)):
            shards = operation.shards(0, 2, trained)
            (x,) = operation.inputs("2d", 0, 0)
            saved = saved_tensors(lambda: operation.rotated(shards, [x.requires_grad_()], ring=ring))  # noqa: B023
            known = {x.data_ptr(): "x", **{shard.data_ptr(): name for name, shard in shards.items()}}
            found = {known[tensor.data_ptr()] for tensor in saved if tensor.numel()}
            assert ("x" in found) == bool(trained), (dim, trained, found)


@pytest.mark.parametrize("written", [0, 1])
def test_a_write_is_noticed_where_the_gradient_of_an_input_depends_on_it(written):
    """Two layers travel together, each with an input of its own, of which only the first needs a gradient."""
    ring = rtp_ext.Ring.emulated(2)
    weights = [random(2, 6, dtype=torch.float64, seed=layer).requires_grad_() for layer in range(2)]
    inputs = [random(3, 6, dtype=torch.float64, seed=5 + which).requires_grad_(which == 0) for which in range(2)]
    outputs = rotated_linears(inputs, weights, ring=ring, projections=[(which, which, 0, 4) for which in range(2)])
    with torch.no_grad():
        weights[written].mul_(2.0)
    loss = outputs[0].sum() + outputs[1].sum()
    if written == 0:
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()
    else:
        loss.backward()
        assert inputs[0].grad is not None and weights[1].grad is not None
