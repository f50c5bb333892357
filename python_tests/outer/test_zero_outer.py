"""ZeroOuter: parameters, gradients and optimizer state cut over replicas too, against one process."""

import copy
import functools

import pytest
import torch
from harness import on_ranks
from reference import assert_same, differs, full, local, whole_gradients
from replica_cases import (
    LINE,
    accumulates,
    assert_same_gradients,
    left_out_between_reductions,
    not_reached_again,
    parts_of_backwards,
    trains_as_one,
    unequal_tokens,
)
from replica_models import DIMS, EXACT, Tiny, adamw, all_losses, batch_loss, replicated, step_on
from state_cases import assert_same_weights, other_values, state_cases
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.outer import AllReduce, ZeroOuter


def layout(name, whole, shape):
    """Returns the dimensions of a parameter that the ring and the replicas shard; None: not sharded."""
    if not whole:
        return None, None
    over_ring = 1 if name == "mlp.2.weight" else 0
    if shape == (3, 2) and whole[over_ring] == 7:  # shards of 4 and 3 have 2, 2, 0 and 1, 1, 1 as pieces
        return over_ring, 1 - over_ring if len(whole) == 2 else None
    return over_ring, over_ring


def chunk(tensor, dim, count, place):
    chunks = tensor.chunk(count, dim)
    return chunks[place] if place < len(chunks) else tensor.narrow(dim, 0, 0)


def widths(shape, rank):
    """Returns the elements of the largest pieces of Tiny at a rank's place of the ring, and of the parameters that stay
    whole on every replica."""
    cut = whole = 0
    for name, parameter in Tiny().named_parameters():
        over_ring, over_replicas = layout(name, parameter.shape, shape)
        own = parameter if over_ring is None else chunk(parameter, over_ring, shape[1], rank % shape[1])
        if over_replicas is None:
            whole += own.numel()
        else:
            cut += chunk(own, over_replicas, shape[0], 0).numel()
    return cut, whole


def scattered(shape, rank):
    """Returns the bytes of one reduce-scatter of all gradients; those that stay whole go to each replica. The bytes
    count twice, since Gloo's reduce-scatter is an all-reduce."""
    return 2 * (shape[0] - 1) * sum(widths(shape, rank)) * 8


def _trains(rank, ranks, cases, shape, factor, ways, **how):
    trains_as_one(rank, ranks, cases, [(shape, LINE, DIMS)], ZeroOuter, **how)
    accumulates(rank, ranks, cases, shape, factor, ways, ZeroOuter(), scattered(shape, rank))


@on_ranks(6, timeout=240.0)
def test_six_ranks(rank, ranks, cases):
    for shape in ((2, 3), (3, 2)):
        _trains(rank, ranks, cases, shape, 1, [(True, True), (True, False, True)])
        _counts(rank, cases, shape)
    unequal_tokens(rank, ranks, cases, (3, 2), ZeroOuter())


@on_ranks(4, timeout=300.0)
def test_four_ranks(rank, ranks, cases, tmp_path):
    folder = str(tmp_path)
    _trains(rank, ranks, cases, (2, 2), None, [(False, False, True), (True, False, True)], foreach=True)
    for part in (_clears, _keeps_sums_wide, _gradients_asked_for, _hooks, _sees_writes, _others, _refusals):
        part(rank, ranks, cases)
    _counts(rank, cases, (2, 2))
    parts_of_backwards(rank, ranks, cases, ZeroOuter())
    state_cases(rank, ranks, cases, folder, ZeroOuter)


def _counts(rank, cases, shape):
    """The bytes of parameters, gradients and optimizer state, and the bytes that a step sends."""
    with cases.case(f"counts on {shape}"):
        model = replicated(shape, outer=ZeroOuter(bucket_bytes=300))
        policy = rtp_ext.outer_of(model)
        before = {name: id(p) for name, p in model.named_parameters()}
        optimizer = adamw(model, fused=True)  # torch makes its state
        for step in range(2):
            sent = policy.bytes_sent()
            step_on(model, optimizer, [functools.partial(batch_loss, model, rank, step)])
            gathered = (shape[0] - 1) * widths(shape, rank)[0] * 8
            assert policy.bytes_sent() - sent == scattered(shape, rank) + gathered, (policy.bytes_sent() - sent, step)
        assert before == {name: id(p) for name, p in model.named_parameters()}, "the same parameters throughout"
        mesh, local_shards = model.mix.weight.device_mesh, 0
        for name, parameter in model.named_parameters():
            over_ring, over_replicas = layout(name, parameter.shape, shape)
            if over_replicas is None:
                assert parameter.placements[0] == Replicate(), name
                continue
            strided = over_ring == over_replicas
            expected = _StridedShard(over_ring, split_factor=shape[1]) if strided else Shard(over_replicas)
            assert parameter.placements == (expected, Shard(over_ring)), (name, parameter.placements)
            own = chunk(torch.empty(parameter.shape), over_ring, shape[1], mesh.get_local_rank(1))
            local_shards += own.numel()
            piece = chunk(own, over_replicas, shape[0], mesh.get_local_rank(0))
            state = optimizer.state[parameter]
            for what in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
                assert local(what).shape == piece.shape, (name, local(what).shape, piece.shape)
        assert sum(own.tensor.numel() for own in policy._local_shards.values()) == local_shards
        assert all(own.tensor.untyped_storage().nbytes() == own.tensor.nbytes for own in policy._local_shards.values())


def _clears(rank, ranks, cases):
    """zero_grad, of the model or the optimizer, either way, forgets micro-batches that were not reduced."""
    model, plain = replicated((2, 2), outer=ZeroOuter()), Tiny()
    all_losses(plain, ranks, 1).backward()
    optimizer = adamw(model)
    ways = ((model, True, True), (model, False, False), (optimizer, True, False), (optimizer, False, True))
    for who, to_none, reduced_first in ways:
        with cases.case(f"{type(who).__name__} zero_grad({to_none}), reduced first: {reduced_first}"):
            model.zero_grad()
            if reduced_first:
                batch_loss(model, rank, 3).backward()
            with rtp_ext.no_sync(model):
                batch_loss(model, rank, 0).backward()
            assert local(model.mix.weight.grad).shape == ((4, 3)[rank % 2], 7)
            who.zero_grad(set_to_none=to_none)
            batch_loss(model, rank, 1).backward()
            assert_same_gradients(whole_gradients(model), plain, "after zero_grad", 1 / ranks)
    not_reached_again(model, plain, rank, ranks, cases)


def _keeps_sums_wide(rank, ranks, cases):
    with cases.case("bfloat16"):
        model, plain = replicated((2, 2), model=Tiny(torch.bfloat16), outer=ZeroOuter()), Tiny(torch.bfloat16)
        with rtp_ext.no_sync(model):
            for _ in range(2):
                batch_loss(model, rank, 0).backward()
        for name in ("embed.weight", "mlp.0.weight", "mlp.2.bias", "mix.weight", "norm.weight"):
            gradient = local(model.get_parameter(name).grad)
            assert gradient.dtype == torch.float32, name
            assert (gradient != gradient.bfloat16().float()).any(), f"{name} was rounded"
        batch_loss(model, rank, 0).backward()
        all_losses(plain, ranks, 0).backward()
        for name, expected in whole_gradients(plain).items():
            assert model.get_parameter(name).grad.dtype == torch.bfloat16
            assert_same(full(model.get_parameter(name).grad), expected * 3 / ranks, 0.05, name)
        adamw(model).step()
        batch_loss(model, rank, 1)
        assert all(own.tensor.dtype == torch.bfloat16 for own in rtp_ext.outer_of(model)._local_shards.values())


def _gradients_asked_for(rank, ranks, cases):
    model, plain = replicated((2, 2), outer=ZeroOuter()), Tiny()
    all_losses(plain, ranks, 0).backward()
    with cases.case("torch.autograd.grad"):
        found = torch.autograd.grad(batch_loss(model, rank, 0), list(model.parameters()))
        for (name, p), gradient in zip(plain.named_parameters(), found, strict=True):
            assert_same(full(gradient), p.grad / ranks, EXACT, name)
            assert model.get_parameter(name).grad is None
    with cases.case("create_graph"):
        (gradient,) = torch.autograd.grad(batch_loss(model, rank, 0), [model.mix.weight], create_graph=True)
        assert_same(full(gradient.detach()), plain.mix.weight.grad / ranks, EXACT, "mix.weight")
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            gradient.to_local().square().sum().backward()
    with cases.case("whole parameters, used by hand"):
        for each in (model, plain):
            each.zero_grad()
        ((rank + 1) * full(model.mix.weight).square().sum()).backward()
        expected = torch.autograd.grad(plain.mix.weight.square().sum(), plain.mix.weight)[0]
        assert_same(full(model.mix.weight.grad), expected * (1 + sum(range(ranks)) / ranks), EXACT, "full_tensor")


def _hooks(rank, ranks, cases):
    """Hooks of a user see gradients of all ranks; adapters, whole on every rank, are averaged in every backward."""
    with cases.case("hooks and adapters"):
        model, plain = replicated((2, 2), outer=ZeroOuter()), Tiny()
        seen = []
        model.mix.weight.register_hook(lambda g: (seen.append(full(g)), g * 2)[1])
        model.mlp[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(full(p.grad).clone()))
        for each in (model.mix, plain.mix):
            each.adapter = nn.Parameter(torch.ones(7, dtype=torch.float64))
            each.register_forward_hook(lambda module, _, y: y * module.adapter)
        for micro, reduces in enumerate((True, False, True)):
            rtp_ext.set_requires_all_reduce(model, reduces)
            seen.clear()
            batch_loss(model, rank, micro).backward()
            all_losses(plain, ranks, micro).backward()
        assert len(seen) == 2
        found = whole_gradients(model)
        assert_same(found.pop("mix.weight") / 2, plain.mix.weight.grad / ranks, EXACT, "hooked")
        for name, gradient in found.items():
            assert_same(gradient, plain.get_parameter(name).grad / ranks, EXACT, name)


def _sees_writes(rank, ranks, cases):
    """After any write to a piece, the shards of the next forward contain it."""
    ways = {
        "in place": lambda p: p.mul_(2),
        "through data": lambda p: p.data.mul_(2),
        "the local tensor": lambda p: p.to_local().mul_(2),
        "foreach": lambda p: torch._foreach_mul_([p.detach()], 2.0),
    }
    model, plain = replicated((2, 2), outer=ZeroOuter()), Tiny()

    def compare(what):
        for each in (model, plain):
            each.zero_grad()
        batch_loss(model, rank, 0).backward()
        all_losses(plain, ranks, 0).backward()
        assert_same_gradients(whole_gradients(model), plain, what, 1 / ranks)

    compare("before")
    before = whole_gradients(plain)["mix.weight"]
    for what, write in ways.items():
        with cases.case(f"written {what}"):
            with torch.no_grad():
                for name in ("mix.weight", "norm.weight", "embed.weight"):
                    write(model.get_parameter(name))
                    plain.get_parameter(name).mul_(2)
            compare(what)
            assert differs(plain.mix.weight.grad, before, EXACT), "control"
            with torch.no_grad():
                for name in ("mix.weight", "norm.weight", "embed.weight"):
                    model.get_parameter(name).mul_(0.5)
                    plain.get_parameter(name).mul_(0.5)
    with cases.case("written on one rank"):
        compare("restored")
        with torch.no_grad():
            plain.mix.weight[6].add_(1)  # the piece of replica 1 of the second shard
            if rank == 3:
                local(model.mix.weight).add_(1)
        assert_same(full(model.mix.weight), plain.mix.weight, 0.0, "the weight")
        compare("one rank")
    with cases.case("loaded between steps"):
        values = other_values()
        for each in (model, plain):
            rtp_ext_load(each, values.state_dict())
        compare("loaded")
    with cases.case("modules on their own"):
        x = torch.ones(2, 7, dtype=torch.float64)
        for step in range(2):
            with torch.no_grad():
                for each in (model, plain):
                    each.mix.weight.add_(0.1)
                    each.norm.weight.add_(0.1)
            assert_same(model.norm(model.mix(x)), plain.norm(plain.mix(x)), EXACT, f"step {step}")
    with cases.case("nothing is gathered where nothing has changed"):
        batch_loss(model, rank, 0)
        before = rtp_ext.outer_of(model)._sent_bytes
        with torch.inference_mode():
            batch_loss(model, rank, 0)
        batch_loss(model, rank, 1)
        assert rtp_ext.outer_of(model)._sent_bytes == before
    with cases.case("written before the backward"):
        loss = batch_loss(model, rank, 0)
        with torch.no_grad():
            model.mix.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def rtp_ext_load(model, state):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, copy.deepcopy(state), options=StateDictOptions(full_state_dict=True))


def _others(rank, ranks, cases):
    model, plain = replicated((2, 2), outer=ZeroOuter(bucket_bytes=300)), Tiny()
    left_out_between_reductions(model, plain, rank, ranks, cases)
    for reentrant in (True, False):
        with cases.case(f"checkpointing, reentrant {reentrant}"):
            model, plain = replicated((2, 2), outer=ZeroOuter()), Tiny()
            model.block = functools.partial(checkpoint, model.block, use_reentrant=reentrant)
            for step in range(2):
                for each in (model, plain):
                    each.zero_grad()
                batch_loss(model, rank, step).backward()
                all_losses(plain, ranks, step).backward()
                assert_same_gradients(whole_gradients(model), plain, f"step {step}", 1 / ranks)
    with cases.case("parts, a copy, and GradScaler"):
        model, plain = Tiny(), Tiny()
        replicated((2, 2), model=model.mlp, outer=ZeroOuter())
        model = rtp_ext.fully_rotate(model)
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
        assert_same_weights(model, plain, "scaled")
        optimizer.zero_grad()
        scaler.scale(batch_loss(model, rank, 9) * (float("inf") if rank == 3 else 1.0)).backward()
        scaler.step(optimizer)
        assert_same(full(model.mix.weight), plain.mix.weight, EXACT, "a step that was left out on every rank")
        copied = copy.deepcopy(model)
        for each in (copied, plain):
            each.zero_grad()
        batch_loss(copied, rank, 5).backward()
        all_losses(plain, ranks, 5).backward()
        assert_same_gradients(whole_gradients(copied), plain, "a copy", 1 / ranks)
    for shape in ((4, 1), (1, 4)):
        with cases.case(f"a mesh of {shape}"):
            model, plain = replicated(shape, outer=ZeroOuter()), Tiny()
            for _ in range(2):
                batch_loss(model, rank, 0).backward()
                all_losses(plain, ranks, 0).backward()
            assert_same_gradients(whole_gradients(model), plain, "gradients", 1 / ranks)


def _refusals(rank, ranks, cases):
    def refused(what, match, act, error=ValueError):
        with cases.case(what), pytest.raises(error, match=match):
            act()

    refused("in place", "in_place=True.*ZeroOuter", lambda: replicated((2, 2), outer=ZeroOuter(), in_place=True))
    model = replicated((2, 2), outer=ZeroOuter())
    optimizer = adamw(model)
    with rtp_ext.no_sync(model):
        batch_loss(model, rank, 0).backward()
    refused("a step too early", "AdamW: expected gradients that are reduced.*set_requires", optimizer.step)
    model.mix.weight.grad = model.mix.weight.grad * 2
    refused("replaced", "mix.weight.*put in its place", lambda: batch_loss(model, rank, 0).backward())
    model = replicated((2, 2), outer=ZeroOuter())

    def write(module, _):
        torch.nn.init.ones_(module.weight)

    model.mix.register_forward_pre_hook(write)
    refused(
        "written within", "mix.weight: expected weights that stay", lambda: batch_loss(model, rank, 0), RuntimeError
    )
    model = replicated((2, 2), outer=ZeroOuter())
    model.late = rtp_ext.nn.RotatedLinear(7, 7, ring=rtp_ext.ring_of(model), dtype=torch.float64)
    refused(
        "joined late", "late.weight: expected parameters that were in the model", lambda: batch_loss(model, rank, 0)
    )
    model = replicated((2, 2), outer=ZeroOuter())
    refused("a piece", "cut over the ring alone", lambda: list(rtp_ext.ring_of(model).rotate(model.mix.weight)))
    x = torch.ones(2, 7, dtype=torch.float64)
    one, other = model.mix, model.mlp[0]
    refused("other modules", "replicas disagree on which weights", lambda: (one if rank < 2 else other)(x))
    with cases.case("other policies"):
        part = Tiny()
        replicated((2, 2), model=part.mlp, outer=ZeroOuter())
        with pytest.raises(ValueError, match="another outer policy"):
            replicated((2, 2), model=part, outer=AllReduce())
