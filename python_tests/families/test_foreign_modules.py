"""Modules that other code has changed: replaced forwards, graphs of torch.jit, inputs and outputs in dataclasses."""

import copy
import dataclasses
import types

import pytest
import torch
from harness import on_ranks
from reference import TOLERANCE, assert_same, differs, full, random
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import rtp_ext
from rtp_ext.convert.agreement import want_gradients
from rtp_ext.convert.containers import map_tensors
from rtp_ext.nn._base import RotatedModule

LIMIT = TOLERANCE[torch.float64]


def _x(rank):
    return random(3, 6, dtype=torch.float64, seed=10 + rank)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)), nn.Linear(6, 2)
    ).double()


def _flipped(old):
    return lambda x: old(x.flip(-1))


# Each replaces a forward of a plain model. Whether the layer still computes as torch's cannot be known.
REPLACED = {
    "a wrapper of the old forward": (lambda m: setattr(m[0], "forward", _flipped(m[0].forward)), "0"),
    "a method": (
        lambda m: setattr(m[0], "forward", types.MethodType(lambda s, x: F.linear(x, s.weight * 3, s.bias), m[0])),
        "0",
    ),
    "of a layer of an MLP": (lambda m: setattr(m[2][2], "forward", _flipped(m[2][2].forward)), "2.2"),
    "of an MLP": (lambda m: setattr(m[2], "forward", _flipped(m[2].forward)), None),
    "of a norm": (lambda m: setattr(m[1], "forward", _flipped(m[1].forward)), "1"),
}


@on_ranks(2)
def test_replaced_forwards_and_graphs(rank, ranks, ring, cases):
    for name, (change, gathered) in REPLACED.items():
        with cases.case(name):
            plain, model = _model(), _model()
            untouched = plain(_x(rank))
            change(plain), change(model)
            rtp_ext.fully_rotate(model, mesh=ring)
            rows = {row.name: row.moved for row in rtp_ext.explain(model).parameters}
            assert {key for key in rows if rows[key] == "gathered"} == {
                f"{layer}.{key}" for layer in ("1", gathered) if layer for key in ("weight", "bias")
            }
            output = model(_x(rank))
            assert_same(output, plain(_x(rank)), LIMIT, "output")
            assert differs(output, untouched, 0.1), "control: the forward was replaced"
            output.square().sum().backward()
            sum(plain(_x(other)).square().sum() for other in range(ranks)).div(ranks).backward()
            for key, parameter in plain.named_parameters():
                assert_same(full(model.get_parameter(key).grad), parameter.grad, LIMIT, key)
    with cases.case("torch.jit"):
        for make in (torch.jit.script, lambda part: torch.jit.trace(part, torch.ones(2, 6))):
            model = nn.Sequential(nn.Linear(6, 6), make(nn.Sequential(nn.Linear(6, 4))))
            with pytest.raises(ValueError, match=r"modules of Python code, got 1\.0 \(Linear\) of torch\.jit"):
                rtp_ext.fully_rotate(model, mesh=ring)
            expected = model(torch.ones(2, 6))
            rtp_ext.fully_rotate(model, mesh=ring, ignored_params=model[1].parameters())
            assert isinstance(model[0], RotatedModule)
            assert_same(model(torch.ones(2, 6)), expected, 1e-5, "output")
            whole = nn.Sequential(nn.Linear(6, 6), make(nn.Sequential(nn.Linear(6, 4))))
            expected = whole(torch.ones(2, 6))
            rtp_ext.rotate_for_inference(whole, timeout=30.0)
            with torch.no_grad():
                assert_same(whole(torch.ones(2, 6)), expected, 1e-5, "output for inference")
            rtp_ext.ring_of(whole).close()


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    ids: torch.Tensor
    inner: object = None
    made: int = dataclasses.field(init=False, default=3)


class Unpacks(nn.Module):
    """Its norm, like all gathered modules, does not cast its own inputs."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, batch):
        y = self.linear(self.norm(batch.x) + self.norm(batch.inner["x"][0].x))
        return Batch(y, batch.ids, [Batch(y * 2, batch.ids)])


def _batch(rank):
    x, ids = _x(rank).float(), torch.arange(3)
    return Batch(x, ids, {"x": [Batch(x + 1, ids)]})


@on_ranks(2)
def test_tensors_in_dataclasses_are_cast(rank):
    torch.manual_seed(0)
    plain = Unpacks()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mp_policy=policy, timeout=30.0)
    batch = _batch(rank)
    output, expected = model(batch), plain(_batch(rank))
    assert batch.x.dtype == batch.inner["x"][0].x.dtype == torch.float32, "the caller's batch stays"
    assert output.made == 3 and output.ids.dtype == torch.int64
    for ours, theirs in ((output, expected), (output.inner[0], expected.inner[0])):
        assert ours.x.dtype == torch.float32
        assert_same(ours.x, theirs.x, 0.05, "output")
    assert differs(output.x, output.inner[0].x, 0.1), "control"
    rtp_ext.ring_of(model).close()


def test_containers():
    batch = _batch(0)
    assert map_tensors(lambda x: x, batch) is batch, "copied only where a tensor changes"
    assert map_tensors(lambda x: x + 1, Batch) is Batch
    other = map_tensors(lambda x: x + 1, batch)
    assert_same(other.inner["x"][0].x, batch.inner["x"][0].x + 1, 0.0, "a nested tensor")
    wanting = dataclasses.replace(batch, x=batch.x.clone().requires_grad_())
    assert want_gradients(((wanting,), {})) and not want_gradients(((batch,), {"a": None}))
