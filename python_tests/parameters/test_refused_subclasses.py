"""Tensor subclasses that can be neither sharded nor gathered, and those that behave like plain tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from harness import Cases, on_ranks
from reference import assert_same
from subclasses import Float8, HalfExtended, LosesItself, Named, OwnParameter, Pair, Ruled, SentPair, Wrapped
from test_tensor_subclasses import EXACT, Halves, PairNet, _train, batch, check_shards, placed, train_plain
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import rtp_ext
from rtp_ext.nn import RotatedLinear


def refused(cases: Cases, what: str, kind: type[Exception], words: list[str], call: Callable[[], object]) -> None:
    with cases.case(what):
        try:
            call()
        except kind as error:
            lacking = [word for word in words if word not in str(error)]
            assert not lacking, f"{lacking} not in: {error}"
        else:
            raise AssertionError(f"expected a {kind.__name__}")


def with_weight(weight: nn.Parameter) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)).double()
    model[0].weight = weight
    return model


@on_ranks(2)
def test_what_cannot_be_sent_is_refused_by_name(cases):
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ring = rtp_ext.Ring(timeout=30.0)
    convert = {"mesh": ring, "timeout": 30.0}
    for what, weight, words in (
        ("no extensions", Pair(values, values), ["0.weight of a Linear", "subclasses.Pair", "fsdp_post_all_gather"]),
        ("one extension", HalfExtended(values), ["0.weight", "HalfExtended", "has no fsdp_post_all_gather"]),
        ("functions of its own", values.as_subclass(Ruled), ["0.weight", "Ruled", "rules of its own"]),
        ("plain slices", LosesItself(values), ["0.weight", "of which a slice is a torch.Tensor"]),
        ("meta", Float8(values.to("meta")), ["0.weight", "Float8", "meta device"]),
    ):
        model = with_weight(nn.Parameter(weight))
        refused(cases, what, ValueError, words, lambda model=model: rtp_ext.fully_rotate(model, **convert))
        assert type(model[0]) is nn.Linear and not isinstance(model[1].weight, DTensor), "something has changed"
    for name, layer in {
        "norm": nn.LayerNorm(5),
        "table": nn.Embedding(5, 3),
        "convolution": nn.Conv1d(5, 5, 1),
        "attention.out_proj": nn.MultiheadAttention(4, 2),
        "scalar": nn.Module(),
    }.items():
        path, _, last = name.partition(".")
        holder = layer.get_submodule(last)
        weight = torch.ones(()) if name == "scalar" else holder.weight.detach()
        holder.weight = nn.Parameter(Float8(weight) if name == "scalar" else Wrapped(weight))
        model = nn.ModuleDict({path: layer})
        kind = "a scalar subclasses.Float8" if name == "scalar" else "subclasses.Wrapped"
        words = [f"{name}.weight", kind]
        refused(cases, name, ValueError, words, lambda model=model: rtp_ext.fully_rotate(model, **convert))
    table = nn.Embedding(5, 3, max_norm=1.0)
    table.weight = nn.Parameter(Float8(table.weight.detach()))
    model = nn.Sequential(table)
    refused(
        cases, "max_norm", ValueError, ["max_norm", "a plain weight"], lambda: rtp_ext.fully_rotate(model, **convert)
    )
    layer = nn.Linear(5, 4)
    layer.weight = nn.Parameter(Float8(layer.weight.detach()))
    refused(cases, "from_module", TypeError, ["Float8", "(4, 5)"], lambda: RotatedLinear.from_module(layer, ring))
    with cases.case("an emulated ring"):
        torch.manual_seed(0)
        model = PairNet()
        plain = copy.deepcopy(model)
        rtp_ext.fully_rotate(model, mesh=rtp_ext.Ring.emulated(2))
        assert type(model.one) is nn.Linear and type(model.one.weight) is SentPair
        assert type(model.last).__name__ == "RotatedLinear"
        x = batch(0, 0, False)
        before = plain.norm(Halves.apply(plain.two(torch.relu(plain.one(x)))))
        assert_same(model(x)[:, :2], before @ plain.last.weight[:2].T + plain.last.bias[:2], EXACT, "left whole")
    with cases.case("ignored_params"):
        model = with_weight(nn.Parameter(Pair(values, values)))
        rtp_ext.fully_rotate(model, ignored_params=[model[0].weight, model[0].bias], **convert)
        weight = model[0].weight
        assert type(weight) is Pair
    ring.close()


@on_ranks(4)
def test_what_replicas_cannot_share_is_refused(rank, ranks, cases):
    values = torch.ones(4, 5, dtype=torch.float64)
    where = placed(ranks, 2)
    for policy in (rtp_ext.outer.LocalSGD(period=2), rtp_ext.outer.ZeroOuter()):
        model = with_weight(nn.Parameter(Float8(values.clone())))
        words = ["0.weight", "Float8", type(policy).__name__, "outer.AllReduce()"]
        convert = lambda model=model, policy=policy: rtp_ext.fully_rotate(model, outer=policy, **where)  # noqa: E731
        refused(cases, type(policy).__name__, ValueError, words, convert)
        with cases.case(f"{type(policy).__name__} once the parameter is plain"):
            model[0].weight = nn.Parameter(values.clone())
            assert rtp_ext.outer_of(convert()) is policy
    torch.manual_seed(0)
    model = rtp_ext.fully_rotate(PairNet(), **where)
    words = ["weight", "plain gradients", "SentPair"]
    refused(cases, "gradients that are pairs", TypeError, words, lambda: model(batch(rank, 0, False)))
    with cases.case("frozen pairs"):
        torch.manual_seed(0)
        plain = PairNet()
        frozen = copy.deepcopy(plain)
        frozen.one.weight.requires_grad_(False)
        frozen.two.weight.requires_grad_(False)
        rtp_ext.fully_rotate(frozen, **where)
        x = batch(rank, 0, False)
        assert_same(frozen(x), plain(x), EXACT, "frozen pairs")
    rtp_ext.ring_of(model).close()


@on_ranks(2)
def test_subclasses_without_rules_rotate(rank, ranks, cases):
    for kind in (Named, OwnParameter):
        with cases.case(kind.__name__):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).double()
            plain, other = copy.deepcopy(model), copy.deepcopy(model)
            for layer in model:
                weight = layer.weight.detach()
                layer.weight = OwnParameter(weight) if kind is OwnParameter else nn.Parameter(weight.as_subclass(kind))
                layer.weight.mark = "kept"
                assert type(layer.weight) is kind
            rtp_ext.fully_rotate(model, timeout=30.0)
            assert all(type(p._local_tensor) is Tensor for p in model.parameters())
            assert type(model[0]).__name__ == "RotatedLinear" and model[0].weight.mark == "kept"
            _train(model, rank, False)
            every = list(range(ranks))
            check_shards(
                model, train_plain(plain, plain, every, False), train_plain(other, other, every[:1], False), EXACT
            )
        rtp_ext.ring_of(model).close()
    with cases.case("a buffer that is one"):
        norm = nn.BatchNorm1d(5).double()
        norm.running_mean = norm.running_mean.as_subclass(Named)
        norm.register_buffer("pair", Pair(torch.ones(2), torch.ones(2)))
        model = rtp_ext.fully_rotate(nn.Sequential(norm, nn.Linear(5, 3).double()), timeout=30.0)
        model(batch(rank, 0, False)).sum().backward()
        assert type(norm.pair) is Pair and type(norm.running_mean) is Named
        rtp_ext.ring_of(model).close()


@on_ranks(2)
def test_subclasses_that_come_later_are_refused(rank, cases):
    values = torch.ones(4, 5, dtype=torch.float64)
    ring = rtp_ext.Ring(timeout=30.0)

    def converted() -> nn.Module:
        torch.manual_seed(0)
        return rtp_ext.fully_rotate(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4)).double(), mesh=ring)

    def assigned(weight: Tensor) -> nn.Module:
        model = converted()
        model.load_state_dict({**model.state_dict(), "0.weight": weight}, assign=True)
        return model

    def adapted(weight: Tensor) -> nn.Module:
        model = converted()
        model[1].adapter = nn.Parameter(weight)
        return model

    def swapped(weight: Tensor) -> nn.Module:
        model = converted()
        model[0].weight = nn.Parameter(weight)
        return model

    for make in (assigned, adapted, swapped):
        for weight in (Pair(values, values), Float8(values.clone())):
            words = [type(weight).__name__, "1.adapter" if make is adapted else "0.weight"]
            model = make(weight)
            for _ in range(2):
                what = f"{make.__name__} {type(weight).__name__}"
                refused(cases, what, ValueError, words, lambda model=model: model(batch(rank, 0, False)))
    with cases.case("the ring still works"):
        converted()(batch(rank, 0, False)).sum().backward()
    with cases.case("on one rank"):
        model = converted()
        if rank == 1:
            model[1].adapter = nn.Parameter(Pair(values, values))
        else:
            model[1].adapter = nn.Parameter(values)
        refused(cases, "differs", ValueError, ["1.adapter", "Pair", "rank 1"], lambda: model(batch(rank, 0, False)))
    ring.close()
