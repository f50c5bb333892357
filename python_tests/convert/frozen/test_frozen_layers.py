"""Layers with frozen weights in blocks: outputs bitwise those of one process with the same values, input and bias
gradients, bytes on the wire and at rest, and memory."""

import torch
import torch.distributed as dist
from grids import few
from harness import on_ranks
from reference import TOLERANCE, assert_same, differs, full, local
from torch import nn
from torch.nn.functional import linear

import rtp_ext
from rtp_ext.parameters.frozen import FORMATS
from rtp_ext.parameters.sharding import frozen_of

# outputs and inputs; no shard of one row, which torch would multiply as a vector
SIZES = [(5, 7), (200, 64), (130, 96), (42, 48), (64, 256)]
RINGS = {
    1: {},
    2: {"transport": "shm", "checksum": True},
    3: {"transport": "tcp", "route": "direct"},
    4: {"transport": "c10d"},
}


class Layer(nn.Module):
    def __init__(self, outputs: int, inputs: int, bias: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(outputs)
        self.linear = nn.Linear(inputs, outputs, bias != "none", dtype=dtype)
        self.linear.weight.requires_grad_(False)
        if bias == "frozen":
            self.linear.bias.requires_grad_(False)

    def forward(self, x):
        return self.linear(x)


def _mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def _one(cases, ring, rank, format, outputs, inputs, bias, dtype):
    plain = Layer(outputs, inputs, bias, dtype)
    model = rtp_ext.fully_rotate(Layer(outputs, inputs, bias, dtype), mesh=ring, frozen=format)
    weight = rtp_ext.frozen_weights(model)["linear.weight"]
    frozen = frozen_of(model.linear.weight)
    b = None if bias == "none" else plain.linear.bias.detach().requires_grad_(bias == "trained")
    before, results = (ring.bytes_sent("weight"), ring.bytes_sent("gradient")), []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * rank + step)
        x = torch.randn(9, inputs, generator=generator, dtype=dtype)
        dy = torch.randn(9, outputs, generator=generator, dtype=dtype)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = model(mine), linear(theirs, weight, b)
        y.backward(dy)
        expected.backward(dy)
        results.append((x, y, expected, mine.grad, theirs.grad))
    sent, reduced = ring.bytes_sent("weight") - before[0], ring.bytes_sent("gradient") - before[1]
    if bias == "trained":
        gradients = full(model.linear.bias.grad), _mean_over_ranks(b.grad)
    with cases.case(f"{format} {outputs}x{inputs} bias {bias} {dtype}"):
        assert model.linear.weight.dtype == torch.uint8 and not model.linear.weight.requires_grad
        assert weight.shape == (outputs, inputs) and weight.dtype == dtype
        whole = frozen.decode(frozen.encode(plain.linear.weight.detach(), frozen.packed_shape[0]))
        assert torch.equal(weight, whole), "the blocks of the whole weight"
        assert differs(weight, plain.linear.weight, 1e-3), "control: values that are not rounded"
        for x, y, expected, mine, theirs in results:
            rows = [n for n in frozen.shard_rows(ring.size) if n]
            biases = [None] * len(rows) if b is None else b.detach().split(rows)
            parts = [linear(x, *both) for both in zip(weight.split(rows), biases, strict=True)]
            if b is None or frozen.group_rows == 1:
                assert torch.equal(y, torch.cat(parts, 1)), "the GEMMs of shards in one process"
            assert_same(y, expected, TOLERANCE[dtype], "output")
            assert_same(mine, theirs, TOLERANCE[dtype], "input gradient")
            assert differs(y, plain(x), 10 * TOLERANCE[dtype]), "control"
        if bias == "trained":
            assert_same(*gradients, TOLERANCE[dtype], "bias gradient")
        else:
            assert reduced == 0, "no gradient travels"
        plan = rtp_ext.explain(model)
        row = next(each for each in plan.parameters if each.name == "linear.weight")
        assert sent == 2 * (plan.totals["forward_bytes"] + plan.totals["backward_bytes"])
        assert row.travel == format and row.shape == (outputs, inputs)
        assert sum(row.shard_sizes) == outputs and row.held_bytes == local(model.linear.weight).numel()


@on_ranks(few([2, 3], [1, 2, 3, 4]))
def test_layers(rank, ranks, cases):
    with rtp_ext.Ring(timeout=60.0, **RINGS[ranks]) as ring:
        for number, (outputs, inputs) in enumerate(SIZES):
            for place, format in enumerate(FORMATS):
                bias = ("none", "trained", "frozen")[(number + place + ranks) % 3]
                _one(cases, ring, rank, format, outputs, inputs, bias, torch.float32)
        _one(cases, ring, rank, "nf4", 42, 48, "trained", torch.float64)
        _one(cases, ring, rank, "nf4", 96, 64, "none", torch.float32)
        assert ranks == 1 or ring.bytes_sent("weight") > 0
        model = rtp_ext.fully_rotate(Layer(130, 96, "trained", torch.float32), mesh=ring, frozen="nf4")
        model.to(torch.bfloat16)
        x = torch.randn(3, 96, dtype=torch.bfloat16)
        y, weight, bias = model(x), rtp_ext.frozen_weights(model)["linear.weight"], full(model.linear.bias)
        with cases.case("to(bfloat16)"):
            assert weight.dtype == y.dtype == torch.bfloat16 and model.linear.weight.dtype == torch.uint8
            assert_same(y, linear(x, weight, bias), TOLERANCE[torch.bfloat16], "output")
