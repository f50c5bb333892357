"""Tensor parallelism under rotation with fewer bytes: weights that travel in 8 or 16 bits, gradients that go straight
home, also in 16 and 8. Against one process that rounds in the same way, or within what rounding may be off by."""

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import Cases, run_ranks
from reference import assert_same, differs, full, local, own_part
from rounded_travel import Contributions, computing_with, cuts_of
from tensor_models import (
    Tiny,
    adamw,
    batch_loss,
    batch_number,
    parallel,
    replicated_activations,
    rotated,
    sequence_parallel,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import rtp_ext
from rtp_ext import RotationDims

NAMES = ("ring", "tp")
HALF, ROUNDING = torch.bfloat16, 2.0**-8
TOLERANCE = 1e-8  # of weights after two steps
DIRECT = {"gradient_route": "direct"}


def rotating(model):
    """Names of the parameters of modules that rotate."""
    kinds = (nn.Linear, nn.Embedding)
    return [
        f"{name}.{key}" for name, module in model.named_modules() if isinstance(module, kinds)
        for key, parameter in module.named_parameters(recurse=False)
    ]  # fmt: skip


def weight_cuts(model):
    """Returns the cuts of the rotated weights, which travel in fewer bits; biases do not."""
    return {name: cuts_of(model.get_parameter(name)) for name in rotating(model) if name.endswith("weight")}


def copies_agree(cases, what, model, mesh):
    """The copies on the ranks of tensor parallelism are bitwise the same."""
    group, ranks = mesh.get_group("tp"), mesh["tp"].size()
    with cases.case(f"{what}: copies"):
        for name, parameter in model.named_parameters():
            if parameter.placements[0] == Replicate():
                told = [torch.empty_like(local(parameter)) for _ in range(ranks)]
                dist.all_gather(told, local(parameter).detach().contiguous(), group=group)
                assert all(torch.equal(each, told[0]) for each in told), name


def trains(cases, shape, travel, plan, options):
    """Weights in fewer bits, gradients as they are: two steps of AdamW."""
    what = f"{shape} {travel} {plan.__name__} {options}"
    model, mesh = rotated(shape, NAMES, plan(RowwiseParallel), travel=travel, **options)
    ring, cuts = rtp_ext.ring_of(model), weight_cuts(model)
    assert (ring.options.travel, ring.gradient_route, len(cuts)) == (
        travel,
        options.get("gradient_route", "by-dtype"),
        9,
    )
    batch, batches = batch_number(mesh)
    optimizer = adamw(model)
    plain, exact = Tiny(), Tiny()
    for step in range(2):
        optimizer.zero_grad()
        batch_loss(model, batch, step).backward()
        optimizer.step()
    for each, kind in ((plain, travel), (exact, None)):
        reference = adamw(each)
        for step in range(2):
            reference.zero_grad()
            with computing_with(each, cuts, kind):
                (sum(batch_loss(each, number, step) for number in range(batches)) / batches).backward()
            reference.step()
    wrong = 0
    with cases.case(what):
        for name, parameter in model.named_parameters():
            assert_same(full(parameter), plain.get_parameter(name), TOLERANCE, name)
            wrong += differs(exact.get_parameter(name), plain.get_parameter(name), 100 * TOLERANCE)
        assert wrong > 5, "control: weights that are not rounded"
    copies_agree(cases, what, model, mesh)


def rounds(cases, shape, plan, travel, gradient_travel):
    """Gradients in fewer bits: every contribution but this rank's own is off by its rounding at most."""
    what = f"{shape} {plan.__name__} weights {travel}, gradients {gradient_travel or HALF}"
    policy = MixedPrecisionPolicy(reduce_dtype=HALF)
    options = {"travel": travel, "gradient_travel": gradient_travel, "mp_policy": policy, **DIRECT}
    model, mesh = rotated(shape, NAMES, plan(ColwiseParallel), **options)
    batch, batches = batch_number(mesh)
    batch_loss(model, batch, 0).backward()
    contributions = []
    for number in range(batches):
        plain = Tiny()
        with computing_with(plain, weight_cuts(model), travel):
            (batch_loss(plain, number, 0) / batches).backward()
        contributions.append({name: parameter.grad for name, parameter in plain.named_parameters()})
    straight, rounding = rotating(model), Contributions(gradient_travel or "bfloat16")
    with cases.case(f"{what}: gathered"):  # and reduced in 16 bits
        for name, parameter in model.named_parameters():
            if name not in straight:
                wholes = [each[name] for each in contributions]
                scale = sum(whole.abs().max().item() for whole in wholes)
                assert_same(full(parameter.grad), sum(wholes), 2 * ROUNDING, name, scale)
    with cases.case(what):
        for name in straight:
            parameter, wholes = model.get_parameter(name), [each[name] for each in contributions]
            parts = [own_part(parameter, whole) for whole in wholes]
            others = [[part] for number, part in enumerate(parts) if number != batch]
            rounding.check(name, local(parameter.grad), parts[batch], others)
        rounding.controls()
    optimizer = adamw(model)
    optimizer.step()
    copies_agree(cases, what, model, mesh)


def refused(cases):
    """Invalid options are refused before a model is changed, with and without tensor parallelism."""
    for options, message in (
        ({"gradient_travel": "int8", "gradient_route": "chain"}, "direct where gradients travel in int8.*got.*'chain'"),
        ({"travel": "int8", "route": "gather"}, "travel None with route gather.*got 'int8'"),
        ({"travel": "int8", "in_place": True, "transport": "c10d"}, "in_place=False on a ring of travel='int8'"),
    ):
        model, mesh = parallel((2, 2), NAMES, sequence_parallel(RowwiseParallel))
        before = dict(model.named_parameters())
        with cases.case(f"refused: {options}"), pytest.raises(ValueError, match=message):
            rtp_ext.fully_rotate(model, mesh=mesh, dims=RotationDims(), timeout=30.0, **options)
        assert all(before[name] is parameter for name, parameter in model.named_parameters())


def _fewer_bytes(rank, ranks, shape):
    cases = Cases()
    if shape == (2, 2):
        refused(cases)
    trains(cases, shape, "int8", sequence_parallel, DIRECT)
    trains(cases, shape, "bfloat16", replicated_activations, {"transport": "c10d"})
    rounds(cases, shape, sequence_parallel, None, None)
    rounds(cases, shape, replicated_activations, "int8", "int8")
    cases.finish()


@pytest.mark.parametrize("shape", few([(3, 2)], [(2, 2), (3, 2)]))
def test_like_one_process_that_rounds_so(shape):
    run_ranks(_fewer_bytes, shape[0] * shape[1], shape)
