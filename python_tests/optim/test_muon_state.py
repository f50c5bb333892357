"""State dicts, checkpoints and refusals of rtp_ext.optim.Muon, and whole models of the transformers package."""

import copy
import gc
import os
import pickle
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import on_ranks, run_ranks
from hf_models import make, make_batch
from matrix_optimizers import Muon as Stock
from muon_cases import LONG, Pair, Shape
from optimizer_cases import Mixed, batch_loss, convert
from reference import assert_same, differs, wholes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import rtp_ext
from rtp_ext._native import RingTimeout, RotationError
from rtp_ext.optim import Muon, matrices
from rtp_ext.ring import Ring

SETTINGS = {"lr": 0.05, "weight_decay": 0.1}


def optimizers_of(model, exchange=None):
    hidden, rest = matrices(model)
    options = SETTINGS if exchange is None else {**SETTINGS, "exchange": exchange}
    return [(Stock if exchange is None else Muon)(hidden, **options), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]


def train(model, optimizers, batches, steps, first=0):
    """Steps on the mean loss of `batches`, of four in all."""
    for step in range(first, first + steps):
        model.zero_grad()
        (sum(batch_loss(model, batch, step) for batch in batches) / len(batches)).backward()
        for optimizer in optimizers:
            optimizer.step()


def _share(rank, ranks):
    """The batches, of twelve, of one rank."""
    return range(rank * 12 // ranks, (rank + 1) * 12 // ranks)


def _saves(rank, ranks, folder):
    plain = Mixed()
    stock = optimizers_of(plain)
    train(plain, stock, range(12), 2)
    model = convert(Mixed(), (ranks,))
    optimizers = optimizers_of(model, "gram")
    train(model, optimizers, _share(rank, ranks), 2)
    found, expected = (each[0].state_dict() for each in (optimizers, stock))
    assert found["param_groups"][0].keys() == expected["param_groups"][0].keys()
    assert all(state.keys() == {"momentum_buffer"} for state in found["state"].values())
    for parameter, state in optimizers[0].state.items():
        assert isinstance(state["momentum_buffer"], DTensor)
        assert state["momentum_buffer"].placements == parameter.placements
    weights, state = get_state_dict(model, optimizers)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def _resumes(rank, ranks, folder):
    """Goes on from the checkpoint of another number of ranks, with the other exchange."""
    plain = Mixed()
    train(plain, optimizers_of(plain), range(12), 4)
    model = Mixed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    convert(model, (ranks,))
    optimizers = optimizers_of(model, "whole")
    weights, state = get_state_dict(model, optimizers)
    assert optimizers[0].bytes_sent() == 0, "to make state sends nothing"
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=state)
    before = wholes(model.parameters())
    train(model, optimizers, _share(rank, ranks), 2, first=2)
    for (name, expected), found in zip(plain.named_parameters(), wholes(model.parameters()), strict=True):
        assert_same(found, expected.detach(), 1e-10, name)
    assert all(differs(one, other, 1e-5) for one, other in zip(before, wholes(model.parameters()), strict=True))


def test_a_checkpoint_continues_on_another_number_of_ranks(tmp_path):
    run_ranks(_saves, 2, str(tmp_path))
    run_ranks(_resumes, 3, str(tmp_path))


@on_ranks(2)
def test_families(rank, cases):
    for family, count in (("gpt2", 8), ("mixtral", 12)):
        with cases.case(family):
            plain = make(family)
            model = rtp_ext.fully_rotate(make(family), timeout=30.0)
            hidden, rest = matrices(model)
            assert [p.shape for p in hidden] == [p.shape for p in matrices(plain)[0]] and len(hidden) == count
            assert len(hidden) + len(rest) == len(list(model.parameters()))
            loss = model(**make_batch(family, 0, rank)).loss
            loss.backward()
            with torch.no_grad():  # the gradients of the ring, which other tests compare, on the plain model
                for expected, found in zip(plain.parameters(), wholes(p.grad for p in model.parameters()), strict=True):
                    expected.grad = found
            Muon(hidden, lr=0.05).step()
            for matrix in matrices(plain)[0]:  # experts one by one
                stack = matrix.detach().unbind(0) if matrix.dim() == 3 else [matrix.detach()]
                some = [nn.Parameter(each) for each in stack]
                for each, gradient in zip(
                    some, matrix.grad.unbind(0) if matrix.dim() == 3 else [matrix.grad], strict=True
                ):
                    each.grad = gradient
                Stock(some, lr=0.05).step()
            # Gradients of a few tokens have a low rank, for which both float32 iterations are off by more.
            for (name, expected), found in zip(plain.named_parameters(), wholes(model.parameters()), strict=True):
                assert_same(found, expected.detach(), 1e-4, name)
            rtp_ext.ring_of(model).close()
    with cases.case("a closed ring"), pytest.raises(RotationError, match=r"the ring .* was closed"):
        Muon(hidden, lr=0.05).step()


@on_ranks(2)
def test_copies_and_refusals(rank, ranks, cases):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ring",))
    with Ring(mesh) as ring:
        refusals(rank, cases, ring, mesh)
        with cases.case("a copy, and one from a pickle, take the same step"):
            pair = Pair(ring, LONG, exchange="whole", lr=0.1)
            pair.take_steps(1)
            pair.gradients()
            twin = copy.deepcopy(pair)
            state = pickle.loads(pickle.dumps(pair.optimizer.__getstate__()["_exchange"]))
            assert state == "whole" and twin.optimizer.plan() == pair.optimizer.plan()
            for each in (pair, twin):
                each.optimizer.step()
            for one, other in zip(pair.parameters, twin.parameters, strict=True):
                assert torch.equal(one.to_local(), other.to_local())
        with cases.case("a state dict of torch's Muon keeps the blocks of a group"):
            pair = Pair(ring, [Shape((12, 5), 0, 3)], lr=0.1)
            state = pair.optimizer.state_dict()
            del state["param_groups"][0]["blocks"]
            pair.optimizer.load_state_dict(state)
            pair.take_steps(1)
            pair.assert_alike()
        with cases.case("torch's Muon takes the state"):
            pair = Pair(ring, LONG[:2], lr=0.1)
            pair.take_steps(1)
            state = pair.optimizer.state_dict()
            other = Stock([{"params": [p]} for p in pair.parameters])
            other.load_state_dict(state)
            for one, two in zip(pair.optimizer.state.values(), other.state.values(), strict=True):
                assert torch.equal(one["momentum_buffer"].to_local(), two["momentum_buffer"].to_local())
        with cases.case("optimizers of parts, one of which goes"):
            del pair, twin
            gc.collect()  # the optimizers of other cases
            pair, groups = Pair(ring, LONG[:4], lr=0.1), len(ring.companions)
            pair.gradients()
            for some in (pair.parameters[:2], pair.parameters[2:]):
                optimizer = Muon(some, lr=0.1)
                optimizer.step()
                assert len(ring.companions) > groups
            del optimizer
            pair.stock.step()
            pair.assert_alike()
            gc.collect()
            assert len(ring.companions) == groups, "its process groups are gone"
        with cases.case("a rate of 0 sends nothing"):
            pair = Pair(ring, LONG, lr=0.0)
            pair.take_steps(1)
            assert pair.optimizer.bytes_sent() == 0 and len(pair.optimizer.state) == len(LONG)


def refusals(rank, cases, ring, mesh):
    weight = Pair(ring, [Shape((8, 6))]).parameters[0]
    norm, other = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(4, 6))
    foreign = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("other",))
    for name, arguments, words in (
        ("a vector", {"params": [weight, norm]}, r"matrices .* got a parameter of shape \(5,\).*AdamW"),
        ("no exchange", {"params": [weight], "exchange": "ring"}, "exchange of auto, gram, whole, got 'ring'"),
        (
            "blocks",
            {"params": [{"params": [weight], "blocks": 3}]},
            r"3 blocks of equal size, got one of shape \(8, 6\)",
        ),
        ("no blocks", {"params": [{"params": [weight], "blocks": 0}]}, "expected blocks"),
        ("a rate", {"params": [weight], "lr": -1.0}, "lr >= 0"),
        ("an adjustment", {"params": [weight], "adjust_lr_fn": "other"}, "adjust_lr_fn"),
        ("steps", {"params": [weight], "ns_steps": 100}, "ns_steps < 100"),
        (
            "another mesh",
            {"params": [nn.Parameter(distribute_tensor(torch.ones(4, 6), foreign, [Shard(0)]))]},
            r"after fully_rotate, got a DTensor of shape \(4, 6\) on another mesh",
        ),
        (
            "partial sums",
            {"params": [nn.Parameter(DTensor.from_local(torch.ones(4, 6), mesh, [Partial()], run_check=False))]},
            "expected placements Shard and Replicate, got P",
        ),
    ):
        with cases.case(name), pytest.raises(ValueError, match=words):
            Muon(**arguments)
    with cases.case("complex numbers"), pytest.raises(TypeError, match="real floating-point"):
        Muon([nn.Parameter(torch.ones(4, 6, dtype=torch.complex64))])
    with cases.case("a group that is refused is not added"):
        optimizer = Muon([other])
        with pytest.raises(ValueError, match="matrices"):
            optimizer.add_param_group({"params": [norm]})
        assert len(optimizer.param_groups) == 1
    with cases.case("another rate on one rank"):
        pair = Pair(ring, LONG, lr=0.1 + 0.1 * (rank == 1))
        before = pair.parameters[0].to_local().clone()
        pair.gradients()
        with pytest.raises(ValueError, match=r"step of all ranks.*'lr': 0\.1.*\(rank 0\), got .*'lr': 0\.2.*on rank 1"):
            pair.optimizer.step()
        assert torch.equal(pair.parameters[0].to_local(), before) and not pair.optimizer.state, "nothing has changed"
    with cases.case("a rate of 0 on one rank"):
        pair = Pair(ring, LONG, lr=0.1 * (rank == 1))
        pair.gradients()
        with pytest.raises(ValueError, match=r"step of all ranks.*'lr': 0\.0.*\(rank 0\), got .*'lr': 0\.1"):
            pair.optimizer.step()
        assert not pair.optimizer.state
    for name, option, words in (
        ("blocks", 5, "rows are 5 blocks of equal size"),
        ("adjust_lr_fn", "none", "expected adjust_lr_fn of"),
        ("ns_steps", 7, "with which exchange='gram' is accurate, got a first coefficient of 3.4445 and 7 steps"),
    ):
        with cases.case(f"{name} that are edited"):
            pair = Pair(ring, LONG, lr=0.1, exchange="gram")
            pair.take_steps(1)
            pair.optimizer.param_groups[0][name] = option
            pair.gradients()
            with pytest.raises(ValueError, match=words):
                pair.optimizer.step()
    for missing in (1, 2):
        pair = Pair(ring, LONG[:2], lr=0.1)
        pair.gradients()
        for parameter in pair.parameters[2 - missing :] if rank == 1 else ():
            parameter.grad = None
        words = rf"a gradient of params\[0\] of group {2 - missing}, .* \(rank 0\), got nothing on rank 1"
        with cases.case(f"{missing} gradients on one rank only"), pytest.raises(ValueError, match=words):
            pair.optimizer.step()


@on_ranks(3, lost={1})
def test_a_rank_that_dies_is_an_error_on_the_others(rank, ring):
    pair = Pair(ring, LONG, lr=0.1)
    pair.take_steps(1)
    pair.gradients()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RingTimeout, match=r"exchange on rank \d of 3.*who failed: global rank 1"):
        pair.optimizer.step()
    assert time.monotonic() - start < 10 and not ring.alive
