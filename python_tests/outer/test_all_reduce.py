"""Replicas of rings, whose gradients are all-reduced: against one process on the batches of all ranks."""

import copy
import functools

import pytest
import torch
from byte_cases import byte_cases
from grids import SWEEP
from harness import on_ranks, run_ranks
from reference import assert_same, full, local, whole_gradients, wholes
from refusal_cases import dies, refusal_cases
from replica_cases import (
    LINE,
    accumulates,
    assert_same_gradients,
    left_out_between_reductions,
    not_reached_again,
    parts_of_backwards,
    trains_as_one,
    unequal_tokens,
    wrong,
)
from replica_models import (
    DIMS,
    EXACT,
    Tiny,
    adamw,
    all_losses,
    batch_loss,
    replicated,
)
from state_cases import example_cases, ring_cases, state_cases
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext import RotationDims
from rtp_ext.outer import AllReduce, ZeroOuter
from rtp_ext.outer.replicas import Replicas

# -- steps -------------------------------------------------------------------------------------------------------------


@on_ranks(6, timeout=240.0)
def test_six_ranks_train_as_one_process(rank, ranks, cases):
    trains_as_one(rank, ranks, cases, [((2, 3), LINE, DIMS), ((3, 2), LINE[::-1], DIMS)])
    for shape, factor in (((2, 3), 1), ((3, 2), None)):
        accumulates(rank, ranks, cases, shape, factor, [(False, True)])
        byte_cases(rank, ranks, cases, shape)


@on_ranks(8)
def test_three_dimensions(rank, ranks, cases):
    flattened = RotationDims(ring=("a", "b"), replicate="replicas")
    for policy in (AllReduce, ZeroOuter):
        trains_as_one(rank, ranks, cases, [((2, 2, 2), ("replicas", "a", "b"), flattened)], policy)
    with cases.case("flattened replicas"):
        model = replicated((2, 2, 2), ("a", "ring", "b"), dims=RotationDims(replicate=("a", "b")))
        batch_loss(model, rank, 0).backward()
        plain = Tiny()
        all_losses(plain, ranks, 0).backward()
        assert_same_gradients(whole_gradients(model), plain, "a", 1 / ranks)
        assert tuple(model.mix.weight.placements) == (Replicate(), Shard(0))
        assert model.mix.weight.device_mesh.shape == (4, 2), model.mix.weight.device_mesh


# -- micro-batches -----------------------------------------------------------------------------------------------------


@on_ranks(4, timeout=300.0)
def test_four_ranks(rank, ranks, cases, tmp_path):
    folder = str(tmp_path)
    trains_as_one(rank, ranks, cases, [((2, 2), LINE, DIMS)], foreach=True)
    ways = [(True, True), (False, False, True), (True, False, True), (False, True, False, True)]
    for factor in (None, 1):
        accumulates(rank, ranks, cases, (2, 2), factor, ways)
    for part in (_clears, _keeps_sums_wide, _unequal_tokens, _gradients_asked_for, _hooks, _travels_early, _others):
        part(rank, ranks, cases)
    state_cases(rank, ranks, cases, folder)
    ring_cases(rank, ranks, cases)
    if SWEEP:  # the closed forms are those of 2 x 3 and 3 x 2 ranks
        byte_cases(rank, ranks, cases, (2, 2))
    parts_of_backwards(rank, ranks, cases)
    example_cases(rank, ranks, cases)
    refusal_cases(rank, ranks, cases)


def test_a_replica_that_dies_ends_the_others():
    run_ranks(dies, 4, lost={3})


def _clears(rank, ranks, cases):
    """zero_grad, either way, forgets micro-batches that were not reduced."""
    model, plain = replicated((2, 2)), Tiny()
    all_losses(plain, ranks, 1).backward()
    for to_none in (True, False):
        with cases.case(f"zero_grad({to_none})"):
            model.zero_grad()
            with rtp_ext.no_sync(model):
                batch_loss(model, rank, 0).backward()
            assert wrong(whole_gradients(model), plain, 1 / ranks), "control: something to forget"
            model.zero_grad(set_to_none=to_none)
            batch_loss(model, rank, 1).backward()
            assert_same_gradients(whole_gradients(model), plain, "after zero_grad", 1 / ranks)
    not_reached_again(model, plain, rank, ranks, cases)


def _keeps_sums_wide(rank, ranks, cases):
    """Micro-batches of bfloat16 parameters add up in float32, unrounded."""
    with cases.case("bfloat16"):
        model, plain = replicated((2, 2), model=Tiny(torch.bfloat16)), Tiny(torch.bfloat16)
        rtp_ext.set_requires_all_reduce(model, False)
        batch_loss(model, rank, 0).backward()
        for name in ("embed.weight", "mlp.0.weight", "mlp.2.bias", "mix.weight", "norm.weight"):
            gradient = local(model.get_parameter(name).grad)
            assert gradient.dtype == torch.float32, name
            assert (gradient != gradient.bfloat16().float()).any(), f"{name} was rounded"
        unreduced = {name: local(p.grad).clone() for name, p in model.named_parameters()}
        batch_loss(model, rank, 0).backward()
        for name, parameter in model.named_parameters():
            assert_same(local(parameter.grad), unreduced[name] * 2, 1e-5, f"{name}, twice")
        rtp_ext.set_requires_all_reduce(model, True)
        batch_loss(model, rank, 0).backward()
        all_losses(plain, ranks, 0).backward()
        for name, expected in whole_gradients(plain).items():
            assert model.get_parameter(name).grad.dtype == torch.bfloat16
            assert_same(full(model.get_parameter(name).grad), expected * 3 / ranks, 0.05, name)
        adamw(model).step()


def _unequal_tokens(rank, ranks, cases):
    unequal_tokens(rank, ranks, cases, (2, 2))
    with cases.case("one ring divides too"):
        tokens, plain = [2 + 3 * other for other in range(ranks)], Tiny()
        sum(batch_loss(plain, other, 0, tokens[other], "sum") / sum(tokens) for other in range(ranks)).backward()
        model = rtp_ext.fully_rotate(Tiny(), timeout=30.0)
        rtp_ext.set_gradient_divide_factor(model, 1)
        rtp_ext.set_requires_all_reduce(model, False)  # changes nothing there
        (batch_loss(model, rank, 0, tokens[rank], "sum") / sum(tokens)).backward()
        assert_same_gradients(whole_gradients(model), plain, "a ring")
        model.zero_grad()
        rtp_ext.set_gradient_divide_factor(model, None)
        (batch_loss(model, rank, 0, tokens[rank], "sum") / sum(tokens)).backward()
        assert_same_gradients(whole_gradients(model), plain, "a ring, averaged", 1 / ranks)


def _gradients_asked_for(rank, ranks, cases):
    model, plain = replicated((2, 2)), Tiny()
    all_losses(plain, ranks, 0).backward()
    with cases.case("torch.autograd.grad"):
        for _ in range(2):
            found = torch.autograd.grad(batch_loss(model, rank, 0), list(model.parameters()))
            for (name, p), gradient in zip(plain.named_parameters(), found, strict=True):
                assert_same(full(gradient), p.grad / ranks, EXACT, name)
                assert model.get_parameter(name).grad is None
    with cases.case("backward(inputs=)"):
        batch_loss(model, rank, 0).backward(inputs=[model.mix.weight])
        assert_same(full(model.mix.weight.grad), plain.mix.weight.grad / ranks, EXACT, "mix.weight")
        assert model.mix.bias.grad is None and model.norm.weight.grad is None
    with cases.case("create_graph"):
        model.zero_grad()
        (gradient,) = torch.autograd.grad(batch_loss(model, rank, 0), [model.mix.weight], create_graph=True)
        assert_same(full(gradient.detach()), plain.mix.weight.grad / ranks, EXACT, "mix.weight")
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            gradient.to_local().square().sum().backward()
    with cases.case("whole parameters, used by hand"):
        for each in (model, plain):
            each.zero_grad()
        ((rank + 1) * full(model.mix.weight).square().sum()).backward()
        placed = model.mlp[0].weight.redistribute(placements=[Replicate(), Replicate()])
        ((rank + 1) * full(model.mix.weight).square().sum() + rank * placed.to_local().exp().sum()).backward()
        mean = sum(range(ranks)) / ranks
        expected = torch.autograd.grad(plain.mix.weight.square().sum(), plain.mix.weight)[0]
        assert_same(full(model.mix.weight.grad), expected * (mean + 1) * 2, EXACT, "full_tensor")
        assert_same(full(model.mlp[0].weight.grad), plain.mlp[0].weight.exp() * mean, EXACT, "redistribute")


def _hooks(rank, ranks, cases):
    """Hooks of a user see gradients of all ranks, once for each backward."""
    model, plain = replicated((2, 2)), Tiny()
    seen = []
    model.mix.weight.register_hook(lambda g: (seen.append(full(g)), g * 2)[1])
    model.mlp[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(full(p.grad).clone()))
    for each in (model.mix, plain.mix):
        each.adapter = nn.Parameter(torch.ones(7, dtype=torch.float64))  # whole on every rank
        each.register_forward_hook(lambda module, _, y: y * module.adapter)
    for factor, share in ((None, 1 / ranks), (1, 1.0)):
        rtp_ext.set_gradient_divide_factor(model, factor)
        with cases.case(f"hooks and adapters, divided by {factor}"):
            for each in (model, plain):
                each.zero_grad()
            for micro, reduces in enumerate((True, False, True)):
                rtp_ext.set_requires_all_reduce(model, reduces)
                seen.clear()
                batch_loss(model, rank, micro).backward()
                all_losses(plain, ranks, micro).backward()
            assert len(seen) == 2
            found = whole_gradients(model)
            assert_same(found.pop("mix.weight") / 2, plain.mix.weight.grad * share, EXACT, "hooked")
            for name, gradient in found.items():
                assert_same(gradient, plain.get_parameter(name).grad * share, EXACT, name)


def _travels_early(rank, ranks, cases):
    """From the second backward on gradients are sent during the backward, each once."""
    sent, ends = [], []
    begin, rest = Replicas.begin_sum, AllReduce._reduce_rest
    model = replicated((2, 2), outer=AllReduce(bucket_bytes=300))
    local_shards = sum(local(p).numel() for p in model.parameters())

    def begin_sum(self, values):
        sent.append((values.numel(), bool(ends)))
        return begin(self, values)

    def reduce_rest(self, current):
        ends.append(None)
        rest(self, current)

    with cases.case("early"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replicas, "begin_sum", begin_sum)
        patch.setattr(AllReduce, "_reduce_rest", reduce_rest)
        for step in range(3):
            sent.clear()
            ends.clear()
            model.zero_grad()
            batch_loss(model, rank, step).backward()
            assert sum(size for size, _ in sent) == local_shards, (sent, local_shards)
            assert len(sent) > 3 and len(sent) < len(list(model.parameters())), "small ones share a bucket"
            assert all(late == (step == 0) for _, late in sent), (step, sent)


def _others(rank, ranks, cases):
    replica = rank // 2
    with cases.case("what one replica leaves out"):
        model, plain = replicated((2, 2), outer=AllReduce(bucket_bytes=300)), Tiny()
        for step, users in enumerate([(), (0, 1), (1,), (0,), (0, 1), (0,), (1,)]):
            for each in (model, plain):
                each.zero_grad()
            model.mixes = replica in users
            batch_loss(model, rank, step).backward()
            total = 0
            for other in (0, 1):
                plain.mixes = other in users
                total = total + all_losses(plain, (2 * other, 2 * other + 1), step)
            total.backward()
            assert (model.mix.weight.grad is None) == (step == 0), "nobody used it"
            assert_same_gradients(whole_gradients(model), plain, f"step {step}", 1 / ranks)
    left_out_between_reductions(model, plain, rank, ranks, cases)
    with cases.case("frozen and thawed everywhere"):
        for step, wanted in enumerate((False, True, True)):
            for each in (model, plain):
                each.mixes = True
                each.zero_grad()
                each.mix.weight.requires_grad_(wanted)
            batch_loss(model, rank, step).backward()
            all_losses(plain, ranks, step).backward()
            assert_same_gradients(whole_gradients(model), plain, f"wanted {wanted}", 1 / ranks)
    for reentrant in (True, False):
        with cases.case(f"checkpointing, reentrant {reentrant}"):
            model, plain = replicated((2, 2)), Tiny()
            inner = model.block
            model.block = functools.partial(checkpoint, inner, use_reentrant=reentrant)
            policy = rtp_ext.outer_of(model)
            own = sum(local(p).nbytes for p in model.parameters())
            for step in range(2):
                for each in (model, plain):
                    each.zero_grad()
                before = policy.bytes_sent()
                batch_loss(model, rank, step).backward()
                all_losses(plain, ranks, step).backward()
                assert_same_gradients(whole_gradients(model), plain, f"step {step}", 1 / ranks)
                # once, though a backward within the backward ends between the two uses of the tied table
                assert policy.bytes_sent() - before == own
    with cases.case("a penalty on the weights counts once"):
        model, plain = replicated((2, 2)), Tiny()
        rtp_ext.set_gradient_divide_factor(model, 1)
        for reduces in (False, True):
            rtp_ext.set_requires_all_reduce(model, reduces)
            (batch_loss(model, rank, 0) + full(model.mix.weight.square().sum())).backward()
            (all_losses(plain, ranks, 0) + plain.mix.weight.square().sum()).backward()
        assert_same_gradients(whole_gradients(model), plain, "penalty")
    with cases.case("parts, a copy, and GradScaler"):
        model, plain = Tiny(), Tiny()
        replicated((2, 2), model=model.mlp)
        policy = rtp_ext.outer_of(model.mlp)
        model = rtp_ext.fully_rotate(model)
        assert rtp_ext.outer_of(model) is policy and rtp_ext.outer_of(model.mlp) is policy
        optimizer, reference = adamw(model, fused=True), adamw(plain)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(2):
            optimizer.zero_grad()
            reference.zero_grad()
            scaler.scale(batch_loss(model, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            (all_losses(plain, ranks, step) / ranks).backward()
            reference.step()
        for value, (name, other) in zip(wholes(model.parameters()), plain.named_parameters(), strict=True):
            assert_same(value, other, EXACT, name)
        optimizer.zero_grad()
        loss = batch_loss(model, rank, 9) * (float("inf") if rank == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        assert_same(full(model.mix.weight), plain.mix.weight, EXACT, "a step that was left out on every rank")
        copied = copy.deepcopy(model)
        for each in (copied, plain):
            each.zero_grad()
        batch_loss(copied, rank, 5).backward()
        all_losses(plain, ranks, 5).backward()
        assert_same_gradients(whole_gradients(copied), plain, "a copy", 1 / ranks)
    for shape, outer in (((4, 1), None), ((1, 4), AllReduce())):
        with cases.case(f"a mesh of {shape}"):
            model, plain = replicated(shape, outer=outer), Tiny()
            batch_loss(model, rank, 0).backward()
            all_losses(plain, ranks, 0).backward()
            assert_same_gradients(whole_gradients(model), plain, "gradients", 1 / ranks)
            assert model.mix.weight.device_mesh.shape == shape
    with cases.case("one ring of a mesh"):
        mesh = replicated((2, 2)).mix.weight.device_mesh["ring"]
        alone, plain = rtp_ext.fully_rotate(Tiny(), mesh=mesh, timeout=30.0), Tiny()
        batch_loss(alone, rank, 0).backward()
        (batch_loss(plain, 2 * replica, 0) + batch_loss(plain, 2 * replica + 1, 0)).backward()
        assert_same_gradients(whole_gradients(alone), plain, "a ring of two", 1 / 2)
        assert tuple(alone.mix.weight.placements) == (Shard(0),)
