"""Weights in 8 bits and gradients on the direct route, combined with replicas, shards that stay on the host, backwards
in two parts, and saved models."""

import contextlib
import copy
import itertools

import torch
from grids import SPLITS_BACKWARDS
from harness import on_ranks
from offload_cases import made_up
from reference import assert_same, differs, full, random, whole_gradients, whole_parameters
from replica_models import Tiny, adamw, all_losses, batch_loss, replicated
from rounded_travel import rebuilt
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import rtp_ext
from rtp_ext.outer import AllReduce, ZeroOuter
from rtp_ext.ring.mesh import ring_dim

SHAPE = (2, 3)  # replicas, ring
FEWER = {"travel": "int8", "gradient_route": "direct"}
EIGHT = {**FEWER, "gradient_travel": "int8", "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
EXACT = 1e-8


def _cuts(model):
    """The dimension that each weight which rotates is cut along."""
    kinds = (nn.Linear, nn.Embedding)
    names = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)]
    known = dict(model.named_parameters())  # a tied weight once
    return {name: ring_dim(known[name]) for name in names if name in known}


@contextlib.contextmanager
def _rounded(plain, cuts, ranks):
    """Meanwhile the plain model computes with what travels."""
    exact = {name: plain.get_parameter(name).detach().clone() for name in cuts}
    with torch.no_grad():
        for name, dim in cuts.items():
            plain.get_parameter(name).copy_(rebuilt(exact[name], dim, ranks, "int8"))
    yield
    with torch.no_grad():
        for name, values in exact.items():
            plain.get_parameter(name).copy_(values)


def _train(cases, what, model, rank, ranks, cuts, sign=1.0):
    """Runs two steps like those of one process. `sign`: the sign of numbers on the host."""
    plain, unrounded = Tiny(), Tiny()
    optimizers = adamw(model), adamw(plain), adamw(unrounded)
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch_loss(model, rank, step).backward()
        with _rounded(plain, cuts, SHAPE[1]):
            all_losses(plain, ranks, step, 1 / ranks).backward()
        all_losses(unrounded, ranks, step, 1 / ranks).backward()
        with cases.case(f"{what}, gradients of step {step}"):
            wrong, found = 0, whole_gradients(model)
            for (name, parameter), other in zip(plain.named_parameters(), unrounded.parameters(), strict=True):
                assert_same(found[name], sign * parameter.grad, EXACT, name)
                wrong += differs(other.grad, parameter.grad, 100 * EXACT)
            assert wrong > 4, "control: weights that are not rounded"
        for optimizer in optimizers:
            optimizer.step()
    with cases.case(f"{what}, trained"):
        found = whole_parameters(model)
        for name, parameter in plain.named_parameters():
            assert_same(found[name], sign * parameter, EXACT, name)
    return plain


def _replicas(rank, ranks, cases):
    cuts = None
    for outer in (AllReduce(), ZeroOuter()):
        model = replicated(SHAPE, outer=outer, **FEWER)
        ring = rtp_ext.ring_of(model)
        assert (ring.options.travel, ring.gradient_route, ring.size) == ("int8", "direct", 3)
        cuts = cuts or _cuts(model)
        plain = _train(cases, type(outer).__name__, model, rank, ranks, cuts)
        if isinstance(outer, AllReduce):
            with cases.case("saved exact, and computed with as it is where nothing is rounded"):
                saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
                for name in saved if rank == 0 else ():
                    assert_same(saved[name], plain.state_dict()[name], EXACT, name)
                with torch.no_grad():
                    other = replicated(SHAPE)
                    for name, parameter in other.named_parameters():
                        parameter.copy_(model.get_parameter(name))
                    mine, expected = batch_loss(other, rank, 7), batch_loss(plain, rank, 7)
                    narrow = batch_loss(model, rank, 7)
                assert_same(mine, expected, EXACT, "loss")
                assert differs(narrow, expected, 1e-5), "control: as it travels"
    model, plain = replicated(SHAPE, **EIGHT), Tiny()
    batch_loss(model, rank, 0).backward()
    with _rounded(plain, cuts, SHAPE[1]):
        all_losses(plain, ranks, 0, 1 / ranks).backward()
    with cases.case("gradients in 8 bits"):
        off = 0
        for name, parameter in plain.named_parameters():
            assert_same(full(model.get_parameter(name).grad), parameter.grad, 2 / 127, name)
            off += differs(full(model.get_parameter(name).grad), parameter.grad, 1e-5)
        assert off >= len(cuts), "control: nothing was rounded"
        assert rtp_ext.ring_of(model).gradient_travel == "int8"
    return cuts


def _offload(rank, ranks, cases, cuts):
    with made_up():
        model = replicated(SHAPE, offload_policy=CPUOffloadPolicy(), **FEWER)
        assert rtp_ext.ring_of(model).host_memory is not None
        _train(cases, "on the host", model, rank, ranks, cuts, sign=-1.0)


def _parts(rank, ranks, cases):
    """As a zero-bubble pipeline runs backwards: weights travel for inputs, gradients for parameters; an MLP, whose
    wgrad reads its weights, sends these twice."""
    mlp = nn.Sequential(nn.Linear(9, 14), nn.GELU(), nn.Linear(14, 8))
    whole = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), mlp, nn.Linear(8, 5)).double()
    with torch.no_grad():
        for seed, parameter in enumerate(whole.parameters()):
            parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=seed, scale=0.4))
    with rtp_ext.Ring(timeout=30.0, **FEWER) as ring:
        model = rtp_ext.fully_rotate(copy.deepcopy(whole), mesh=ring)
        inputs = [random(4, 6, dtype=torch.float64, seed=50 + r).requires_grad_() for r in range(ranks)]
        with _rounded(whole, _cuts(model), ranks):
            (sum(whole(x).square().sum() for x in inputs) / ranks).backward()
        x = inputs[rank].detach().clone().requires_grad_()
        loss = model(x).square().sum()
        before = [(ring.hops("weight"), ring.hops("gradient"))]
        _, groups = stage_backward_input([loss], None, [x], model.parameters())
        before.append((ring.hops("weight"), ring.hops("gradient")))
        stage_backward_weight(model.parameters(), groups)
        before.append((ring.hops("weight"), ring.hops("gradient")))
        found = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(before)]
        with cases.case("two parts"):
            once = ranks - 1
            assert found == [(3 * once, 0), (once, 3 * once)], found
            assert_same(x.grad, inputs[rank].grad * ranks, EXACT, "input gradient")
            for name, parameter in whole.named_parameters():
                assert_same(full(model.get_parameter(name).grad), parameter.grad, EXACT, name)


@on_ranks(6, timeout=240.0)
def test_on_meshes(rank, ranks, cases):
    cuts = _replicas(rank, ranks, cases)
    _offload(rank, ranks, cases, cuts)
    if SPLITS_BACKWARDS:
        _parts(rank, ranks, cases)
