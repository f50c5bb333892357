"""Layers whose weight another module reads without a call are gathered with it, and so are those that `gather` names.
The log says which share of the parameters rotates."""

import copy

import pytest
import torch
from harness import on_ranks
from logs import logged
from reference import TOLERANCE, assert_same, differs, full, random
from torch import nn
from torch.nn import functional as F

import rtp_ext
from rtp_ext.families.sources import modules_read_by

LIMIT = TOLERANCE[torch.float64]


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.conv, self.out = nn.Linear(6, 8), nn.Conv1d(8, 8, 3, groups=8), nn.Linear(8, 6)

    def forward(self, x):
        if not isinstance(self.out.weight, torch.Tensor) or x.dtype != self.out.weight.dtype:
            raise TypeError("only the dtype matters")
        h = self.into(x).transpose(0, 1).unsqueeze(0)
        h = F.conv1d(F.pad(h, (2, 0)), self.conv.weight.contiguous(), self.conv.bias, groups=8)
        return self.out(h[0].transpose(0, 1))


class Elsewhere(nn.Module):
    """Reads in a method, through local names, containers, conditions and properties; `kept` is only called."""

    def __init__(self, slow=False):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(2)])
        self.named = nn.ModuleDict({"a": nn.Linear(6, 6)})
        self.inner = Mixer()
        self.kept, self.slow_one, self.shared = nn.Linear(6, 6), nn.Linear(6, 6), nn.Embedding(6, 6)
        self.slow = slow

    @property
    def table(self):
        return self.shared.weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(self.apply_to(x, layer.weight))
        named = self.named["a"]
        x = self.inner(x) + F.linear(x, named.weight, named.bias) + F.linear(x, self.table)
        if self.slow and len(x) > 1:
            x = x + F.linear(x, self.slow_one.weight)
        return self.kept(self.slow_one(x)) + self.shared(torch.arange(len(x)) % 6)

    def apply_to(self, x, weight):
        return x @ weight

    def merge(self):
        self.kept.weight.data += 1.0


def _x(rank):
    return random(5, 6, dtype=torch.float64, seed=10 + rank)


READ = {
    "directly": (Mixer, {"conv"}),
    "in many ways": (Elsewhere, {"layers.0", "layers.1", "named.a", "inner.conv", "shared"}),
    "where a setting asks for it": (
        lambda: Elsewhere(slow=True),
        {"layers.0", "layers.1", "named.a", "inner.conv", "shared", "slow_one"},
    ),
}


def _gathered(model):
    return {row.module for row in rtp_ext.explain(model).parameters if row.moved == "gathered"}


@on_ranks([2, 3])
def test_modules_that_others_read_are_gathered(rank, ranks, ring, cases):
    for name, (make, gathered) in READ.items():
        with cases.case(name):
            torch.manual_seed(0)
            plain = make().double()
            model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
            assert _gathered(model) == gathered
            assert rtp_ext.explain(plain, mesh=ring).parameters == rtp_ext.explain(model).parameters
            for _ in range(2):
                output = model(_x(rank))
                assert_same(output, plain(_x(rank)), LIMIT, "output")
                model.zero_grad(), plain.zero_grad()
                output.square().sum().backward()
                sum(plain(_x(other)).square().sum() for other in range(ranks)).div(ranks).backward()
                for key, parameter in plain.named_parameters():
                    assert_same(full(model.get_parameter(key).grad), parameter.grad, LIMIT, key)
                    assert differs(parameter.grad, 2 * parameter.grad, LIMIT), "control"
            pulled = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=30.0)
            with torch.no_grad():
                assert_same(pulled(_x(rank)), plain(_x(rank)), LIMIT, "output for inference")
            rtp_ext.ring_of(pulled).close()
    with cases.case("a tied table"):
        torch.manual_seed(0)
        plain = Elsewhere().double()
        plain.kept.weight = plain.shared.weight
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
        assert model.kept.weight is model.shared._parameters["weight"]
        model(_x(rank)).square().sum().backward()
        sum(plain(_x(other)).square().sum() for other in range(ranks)).div(ranks).backward()
        assert_same(full(model.kept.weight.grad), plain.kept.weight.grad, LIMIT, "its gradient")


def test_what_is_read():
    assert [*modules_read_by(nn.MultiheadAttention(4, 2))] == [], "torch's own modules rotate as a whole"
    assert [*modules_read_by(nn.TransformerEncoderLayer(4, 2, 8))] == []
    model = Elsewhere()
    assert model.kept not in modules_read_by(model) and model.slow_one not in modules_read_by(model)


class Helped(nn.Module):
    """A function elsewhere reads the weight, which the source does not show."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
        self.proj = nn.Linear(6, 6)

    def forward(self, x):
        return _project(x, self.proj) + self.block(x)


def _project(x, layer):
    return F.linear(x, layer.weight, layer.bias)


@on_ranks(2)
def test_the_option_gather(rank, ranks, ring, cases):
    torch.manual_seed(0)
    plain = Helped().double()
    with cases.case("control: it is not found"):
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            model(_x(rank))
    for gather, expected in (
        (lambda m: ["proj"], {"proj"}),
        (lambda m: iter([m.proj, m.block]), {"proj", "block.0", "block.2"}),
        (lambda m: [m.proj, "block.2"], {"proj", "block.2"}),
    ):
        with cases.case(f"{expected}"):
            model = copy.deepcopy(plain)
            (_, log) = logged(rtp_ext.fully_rotate, model, mesh=ring, gather=gather(model))
            assert _gathered(model) == expected
            assert {row.reason for row in rtp_ext.explain(model).parameters if row.moved == "gathered"} == {
                "the option gather names it"
            }
            sizes = {name: p.numel() for name, p in plain.named_parameters()}
            share = sum(n for name, n in sizes.items() if name.rpartition(".")[0] in expected) / sum(sizes.values())
            largest = max((n * 8, name) for name, n in sizes.items() if name.rpartition(".")[0] in expected)
            line = (
                f"fully_rotate: {100 - 100 * share:.1f} % of the parameters rotate, {100 * share:.1f} % are gathered "
                f"while in use, the largest {largest[1]}, {largest[0] / 2**20:.1f} MiB"
            )
            assert ("INFO", line) in log, log
            output = model(_x(rank))
            assert_same(output, plain(_x(rank)), LIMIT, "output")
            output.square().sum().backward()
            plain.zero_grad()
            sum(plain(_x(other)).square().sum() for other in range(ranks)).div(ranks).backward()
            for key, parameter in plain.named_parameters():
                assert_same(full(model.get_parameter(key).grad), parameter.grad, LIMIT, key)
    with cases.case("inference"):
        model, log = logged(
            rtp_ext.rotate_for_inference, copy.deepcopy(plain), gather=["proj", "block.2"], timeout=30.0
        )
        assert any("are whole on every rank, the largest block.2.weight, 0.0 MiB" in text for _, text in log), log
        with torch.no_grad():
            assert_same(model(_x(rank)), plain(_x(rank)), LIMIT, "output")
        rtp_ext.ring_of(model).close()
    for gather, error, message in (
        ("proj", TypeError, "expected gather to be several modules or names of them, got 'proj'"),
        ([3], TypeError, "modules or names of them, got 3 among them"),
        (["projection"], ValueError, "or their names in named_modules.*, got 'projection'"),
        ([nn.Linear(1, 1)], ValueError, "got a Linear that is not in it"),
    ):
        with cases.case(message), pytest.raises(error, match=message):
            rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring, gather=gather)
    with cases.case("a part that was converted before"):
        model = copy.deepcopy(plain)
        rtp_ext.fully_rotate(model.block, mesh=ring)
        with pytest.raises(ValueError, match="modules that have not been converted, got 'block'"):
            rtp_ext.fully_rotate(model, mesh=ring, gather=["block"])
    with cases.case("ranks that differ"):
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring, gather=["proj", "block.2"][: 1 + rank])
        with pytest.raises(ValueError, match="the model differs between ranks: class of"):
            model(_x(rank))
        with pytest.raises(ValueError, match="the model differs between ranks: conversion of"):
            rtp_ext.rotate_for_inference(copy.deepcopy(plain), gather=["proj", "block.2"][: 1 + rank], timeout=30.0)


def test_large_parameters_that_do_not_rotate_are_warned_of():
    ring = rtp_ext.Ring.emulated(2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Bilinear(1, 1, 2), nn.Linear(64, 4), nn.Linear(1024, 65537))
    for gather, level in ((["1"], "INFO"), (["2"], "WARNING")):
        _, log = logged(rtp_ext.fully_rotate, copy.deepcopy(model), mesh=ring, gather=gather)
        assert [got for got, text in log if "of the parameters rotate" in text] == [level], log
