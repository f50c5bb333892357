"""Options that cannot be combined with replicas, and replicas that differ: errors that name the remedy."""

import copy
import os

import pytest
import torch
from reference import assert_same, whole_gradients
from replica_models import DIMS, EXACT, Tiny, adamw, all_losses, batch_loss, replicated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext import RotationDims
from rtp_ext.outer import AllReduce


def refused(cases, what, match, act, error=ValueError):
    with cases.case(what), pytest.raises(error, match=match):
        act()


def refusal_cases(rank, ranks, cases):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ring"))
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "replicas", "ring"))
    unnamed = init_device_mesh("cpu", (2, 2))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
    ring = rtp_ext.Ring(timeout=30.0)

    def rotate(**options):
        return lambda: rtp_ext.fully_rotate(Tiny(), timeout=30.0, **options)

    refused(cases, "no dims", r"one-dimensional.*'replicas', 'ring'.*pass dims=RotationDims", rotate(mesh=mesh))
    unknown = RotationDims(ring="rtp", replicate="replicas")
    refused(cases, "unknown name", "'replicas', 'ring'.*got rtp", rotate(mesh=mesh, dims=unknown))
    refused(cases, "unnamed", "unnamed.*got ring, replicas", rotate(mesh=unnamed, dims=DIMS))
    refused(cases, "left over", "replicas of 2 in neither.*mesh\\['ring'\\]", rotate(mesh=mesh, dims=RotationDims()))
    refused(cases, "twice", "ring more than once", lambda: RotationDims(ring=("ring", "b"), replicate="ring"))
    refused(cases, "no name", "name or a tuple", lambda: RotationDims(ring=0), TypeError)
    refused(cases, "not dims", "RotationDims, got tuple", rotate(mesh=mesh, dims=("replicas", "ring")), TypeError)
    backwards = RotationDims(ring=("ring", "replicas"))
    refused(cases, "out of order", "order of the mesh", rotate(mesh=mesh, dims=backwards))
    refused(cases, "no mesh", "expected mesh to be a DeviceMesh, got None", rotate(dims=DIMS))
    refused(cases, "a ring", "a Ring, and the ring of parts", rotate(mesh=ring, dims=DIMS))
    refused(cases, "nothing to act between", "AllReduce acts between replicas", rotate(mesh=line, outer=AllReduce()))
    refused(cases, "no policy", "policy of rtp_ext.outer", rotate(mesh=mesh, dims=DIMS, outer="mean"), TypeError)
    refused(cases, "bucket_bytes", "bucket_bytes >= 1, got 0", lambda: AllReduce(bucket_bytes=0))
    with cases.case("a dimension of one rank may be left over"):
        model = rtp_ext.fully_rotate(Tiny(), mesh=cube, dims=DIMS, timeout=30.0)
        assert model.mix.weight.device_mesh.shape == (2, 2)
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        table = nn.Sequential(nn.Embedding(5, 4, **option))
        refused(cases, str(option), "cannot be combined with replicas", lambda t=table: replicated((2, 2), model=t))
    policy = rtp_ext.outer_of(model)
    refused(cases, "policy of two", "outer policy of its own", lambda: replicated((2, 2), outer=policy))
    part = Tiny()
    replicated((2, 2), model=part.mlp)
    refused(
        cases,
        "another policy than the part's",
        "another outer policy.*expected outer=None",
        lambda: replicated((2, 2), model=part, outer=AllReduce()),
    )
    refused(cases, "plain", "converted by fully_rotate", lambda: rtp_ext.set_requires_all_reduce(Tiny(), True))
    for factor in (0, -1.0):
        refused(cases, f"{factor}", "positive", lambda f=factor: rtp_ext.set_gradient_divide_factor(model, f))
    refused(
        cases,
        "factors differ",
        "same factor on every rank.*1.0, 2.0",
        lambda: rtp_ext.set_gradient_divide_factor(model, 1 + (rank == 2)),
    )
    refused(cases, "state", "empty state, got one of step", lambda: policy.load_state_dict({"step": 1}))

    optimizer = adamw(model)
    with rtp_ext.no_sync(model):
        batch_loss(model, rank, 0).backward()
    refused(cases, "a step too early", "AdamW: expected gradients that are reduced.*set_requires", optimizer.step)
    refused(cases, "copied too early", "reduced over replicas, or none.*copied", lambda: copy.deepcopy(model))
    model.mix.weight.grad = model.mix.weight.grad * 2
    refused(cases, "replaced", "mix.weight.*put in its place", lambda: batch_loss(model, rank, 0).backward())

    for where in (2, 1):  # another seed in one replica, or another value on one rank
        model = Tiny()
        with torch.no_grad():
            model.mix.weight.add_(0.1 * (rank == 3 if where == 1 else rank >= 2))
        model = replicated((2, 2), model=model)
        loss = batch_loss(model, rank, 0)
        refused(cases, f"weights differ {where}", "values of mix.weight in replica 1.*Seed every", loss.backward)
    model = Tiny()
    if rank >= 2:
        model.mix.extra = nn.Parameter(torch.ones(4, dtype=torch.float64))
    model = replicated((2, 2), model=model)
    loss = batch_loss(model, rank, 0)
    refused(cases, "models differ", "differs between replicas 0 and 1.*mix.extra", loss.backward)
    model = replicated((2, 2))
    batch_loss(model, rank, 0).backward()
    model.mix.bias.requires_grad_(rank < 2)
    loss = batch_loss(model, rank, 0)
    refused(cases, "frozen in one replica", "replicas disagree on what comes next", loss.backward)
    model = replicated((2, 2))
    rtp_ext.set_requires_all_reduce(model, rank < 2)

    def two_backwards():
        for _ in range(2):
            batch_loss(model, rank, 0).backward()
            rtp_ext.set_requires_all_reduce(model, True)

    refused(cases, "not as often", "replicas disagree.*backward 1, with.*backward 2, with", two_backwards)
    fails_and_goes_on(rank, ranks, cases)
    ring.close()


def fails_and_goes_on(rank, ranks, cases):
    """A backward that fails on all ranks leaves no state for the next, with or without a forward in between."""
    model, plain = replicated((2, 2)), Tiny()
    batch_loss(model, rank, 0).backward()  # gradients that are ready early are sent early from now on
    failing = []

    def fail(gradient):
        if failing:
            raise KeyError("made up")

    model.embed.register_forward_hook(lambda module, arguments, output: output.register_hook(fail) and None)
    losses = [batch_loss(model, rank, step) for step in (1, 2)]
    for step, loss in enumerate((*losses, None), start=1):
        with cases.case(f"after a backward that failed {step}"):
            failing.append(True)
            with pytest.raises(KeyError):
                losses[0].backward(retain_graph=True)
            del failing[:]
            model.zero_grad()
            (batch_loss(model, rank, step) if loss is None else loss).backward(retain_graph=True)
            plain.zero_grad()
            all_losses(plain, ranks, step, 1 / ranks).backward()
            for name, gradient in whole_gradients(plain).items():
                assert_same(whole_gradients(model)[name], gradient, EXACT, name)


def dies(rank, ranks):
    """Rank 3 fails before a backward; all others, of its ring and of the other, get an error and do not hang."""
    model = replicated((2, 2))
    batch_loss(model, rank, 0).backward()
    loss = batch_loss(model, rank, 1)
    if rank == 3:
        os._exit(1)
    with pytest.raises(rtp_ext.RotationError):  # of the ring, or of the replicas
        loss.backward()
    with pytest.raises(rtp_ext.RotationError):
        batch_loss(model, rank, 2)
