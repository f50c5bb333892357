"""fully_rotate of a list of modules: one part with several members, which may share parameters."""

import copy

import pytest
import torch
from harness import Cases, on_ranks, run_ranks
from models import LanguageModel, batch_loss, make_batch, make_model, mean_loss
from reference import assert_same, differs, full, random, whole_gradients, whole_parameters
from test_converted_parts import assert_trained
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import rtp_ext
from rtp_ext import RotationDims
from rtp_ext.convert.scopes import state_of
from rtp_ext.outer import ZeroOuter
from rtp_ext.parameters.cut_over_replicas import is_piece


def convert(model, mesh=None, dims=None, **options):
    """Embedding, final norm and head are one unit; the rest follows."""
    members = [model.embed, model.norm, model.head]
    assert rtp_ext.fully_rotate(members, mesh=mesh, dims=dims, **options) is members
    return rtp_ext.fully_rotate(model)


def _trains(rank, ranks, shape):
    cases = Cases()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "ring")[-len(shape) :])
    dims = RotationDims(ring="ring", replicate="replicas") if len(shape) == 2 else None
    for tied in (True, False):
        with cases.case(f"tied={tied}"):
            plain = make_model(tied=tied)
            model = convert(copy.deepcopy(plain), mesh, dims)
            assert (model.head.weight is model.embed.weight) == tied
            assert all(isinstance(p, DTensor) for p in model.parameters())
            assert list(model.state_dict()) == list(plain.state_dict())
            _alone(model, plain, rank, ranks)
            twin = copy.deepcopy(model)
            assert (twin.head.weight is twin.embed.weight) == tied and twin.head.weight is not model.head.weight
            unit = state_of(twin.embed).unit
            assert unit is state_of(twin.head).unit is not state_of(model.head).unit
            assert {reference() for reference in unit.members} == {twin.embed, twin.norm, twin.head}
            assert_trained(model, copy.deepcopy(plain), rank, ranks, "model")
            assert_trained(twin, plain, rank, ranks, "copy")
    if dims is not None:
        with cases.case("ZeroOuter"):
            plain = make_model(tied=True)
            model = convert(copy.deepcopy(plain), mesh, dims, outer=ZeroOuter())
            assert model.head.weight is model.embed.weight and is_piece(model.head.weight)
            assert_trained(model, plain, rank, ranks, "ZeroOuter")
    with cases.case("a factor is that of all members"):
        plain = make_model(tied=True)
        model = copy.deepcopy(plain)
        rtp_ext.fully_rotate([model.embed, model.norm, model.head], mesh=mesh, dims=dims)
        rtp_ext.set_gradient_divide_factor(model.norm, 1)
        model.head(random(4, 10, dtype=torch.float64, seed=rank)).sum().backward()  # before there is a model around it
        plain.head(sum(random(4, 10, dtype=torch.float64, seed=other) for other in range(ranks))).sum().backward()
        assert_same(full(model.head.weight.grad), plain.head.weight.grad, 1e-9, "the head alone")
        assert differs(full(model.head.weight.grad), plain.head.weight.grad / ranks, 1e-9), "control"
        model.zero_grad(), plain.zero_grad()
        rtp_ext.fully_rotate(model)
        batch_loss(model, rank, 0).backward()
        mean_loss(plain, ranks, 0).backward()
        found = whole_gradients(model)
        for name, expected in whole_gradients(plain).items():
            factor = ranks if name.startswith(("embed", "norm", "head")) else 1
            assert_same(found[name], expected * factor, 1e-9, name)
    cases.finish()


def _alone(model, plain, rank, ranks):
    """Members called on their own, as by a loss in chunks."""
    for each in (model, plain):
        each.zero_grad()
    hidden = [random(4, 10, dtype=torch.float64, seed=other) for other in range(ranks)]
    chunks = hidden[rank].clone().requires_grad_()
    total = sum(model.head(model.norm(chunk)).square().sum() for chunk in chunks.chunk(2))
    total.backward()
    (sum(plain.head(plain.norm(each)).square().sum() for each in hidden) / ranks).backward()
    found = whole_gradients(model)
    for name in ("norm.weight", "norm.bias", "head.weight" if "head.weight" in found else "embed.weight"):
        expected = plain.get_parameter(name).grad
        assert_same(found[name], expected, 1e-9, name)
        assert differs(found[name], expected * (1 + 1e-6), 1e-9), "control"
    for each in (model, plain):
        each.zero_grad()


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_lists(shape):
    run_ranks(_trains, 4 if len(shape) == 2 else shape[0], shape, timeout=240.0)


@on_ranks(2)
@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="the control, fully_shard of a list with a policy, fails in torch 2.11"
)
def test_policies_of_lists(rank, ranks):
    """Casts at the border of every member, as fully_shard's do."""
    mesh = init_device_mesh("cpu", (ranks,))
    for casts in (True, False):
        between = torch.float64 if casts else torch.bfloat16  # what the blocks are in
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=between, cast_forward_inputs=casts)
        seen, outputs = {}, {}
        for kind in ("ours", "theirs"):
            model = make_model(torch.float32, tied=True)
            model.temperature = nn.Parameter(torch.ones(1, dtype=between))  # fully_shard cuts no scalars
            model.blocks.to(between)
            members = [model.embed, model.norm, model.head]
            if kind == "ours":
                rtp_ext.fully_rotate(members, mesh=mesh, mp_policy=policy), rtp_ext.fully_rotate(model)
            else:
                fully_shard(members, mesh=mesh, mp_policy=policy), fully_shard(model, mesh=mesh)
            dtypes = seen[kind] = []
            for member in members:
                # behind the cast of the unit: what forward gets, and what its caller does
                member.register_forward_pre_hook(lambda _, given, dtypes=dtypes: dtypes.append(given[0].dtype))
                member.register_forward_hook(lambda _, given, y, dtypes=dtypes: dtypes.append(y.dtype))
            ids, x = make_batch(rank, 0)[0], random(4, 10, dtype=torch.bfloat16, seed=rank)
            with torch.no_grad():
                model(ids)  # fully_shard needs the root first
                outputs[kind] = [model.embed(ids), model.norm(x), model.head(x)]
            dtypes += [each.dtype for each in outputs[kind]]
        assert seen["ours"] == seen["theirs"], (casts, seen)
        assert outputs["ours"][0].dtype == outputs["ours"][2].dtype == between
        for ours, theirs in zip(outputs["ours"], outputs["theirs"], strict=True):
            assert_same(ours, theirs, 2.0**-7, "the same roundings")


@on_ranks(2)
def test_states_of_lists(rank, ranks):
    """Meta device, checkpoints and ignored parameters."""
    plain = make_model(tied=True)
    with torch.device("meta"):
        model = LanguageModel(tied=True).double()
    convert(model, init_device_mesh("cpu", (ranks,)))
    with pytest.raises(RuntimeError, match="still on the meta device: call to_empty") as caught:
        model(make_batch(rank, 0)[0])
    assert isinstance(caught.value, ValueError)
    model.to_empty(device="cpu")
    assert model.head.weight is model.embed.weight
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=whole)
    assert_same(model(make_batch(rank, 0)[0]), plain(make_batch(rank, 0)[0]), 1e-10, "loaded")
    saved = get_model_state_dict(model, options=whole)
    for name, value in plain.state_dict().items():
        assert rank or torch.equal(saved[name], value), name
    assert_trained(model, copy.deepcopy(plain), rank, ranks, "from the meta device")
    other = copy.deepcopy(plain)
    convert(other, ignored_params=[other.norm.weight, other.norm.bias], offload_policy=None)
    assert not isinstance(other.norm.weight, DTensor) and isinstance(other.head.weight, DTensor)
    batch_loss(other, rank, 0).backward()
    batch_loss(plain, rank, 0).backward()
    assert_same(other.norm.weight.grad, plain.norm.weight.grad, 1e-9, "an ignored gradient is this rank's own")


@on_ranks(2)
def test_refusals_of_lists(rank, ranks):
    def refused(given, match, error=ValueError, **options):
        before = [type(part) for each in given if isinstance(each, nn.Module) for part in each.modules()]
        with pytest.raises(error, match=match):
            rtp_ext.fully_rotate(given, **options)
        assert before == [type(part) for each in given if isinstance(each, nn.Module) for part in each.modules()]

    model = make_model(tied=True)
    block = model.blocks[0]
    refused([], "a module or several, got an empty list")
    refused([model.embed, 3], "list of torch.nn.Module, got int at 1", TypeError)
    refused({"head": model.head}, "a torch.nn.Module or a list of them, got dict", TypeError)
    refused([model.head, model.norm, model.head], "every module of a list once, got the same Linear at 0 and 2")
    refused([block, block.up], "none is inside another, got Linear at 1, which is up of Block at 0: leave it out")
    rtp_ext.fully_rotate([block])
    refused([model.norm, block], "got a GatheredBlock that already was", RuntimeError)
    refused([model.norm, block.up], "got a RotatedLinear that is a part of one that already was")
    refused([model.norm, model.head], "loss_head='fused' expected a causal language model", loss_head="fused")
    rtp_ext.fully_rotate([model.norm, model.head])
    refused([model.embed], r"was shared with Linear.weight, .*fully_rotate\(\[module, other module\]\)")
    # parts of members stay parts, and names of two members of one class differ
    model = make_model()
    rtp_ext.fully_rotate(model.blocks[0].up)
    blocks = list(model.blocks)
    assert rtp_ext.fully_rotate(blocks) is blocks
    assert state_of(model.blocks[0].up).around[0]() is state_of(model.blocks[0])
    assert model.blocks[1].up.qualified_name == "Block_2.up"
    plain = make_model()
    rtp_ext.fully_rotate(model)
    assert_trained(model, plain, rank, ranks, "blocks in a list")
    for name, value in whole_parameters(model).items():
        assert_same(value, plain.get_parameter(name), 1e-9, name)
