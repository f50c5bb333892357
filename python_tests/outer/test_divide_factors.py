"""set_gradient_divide_factor of parts: each unit that fully_rotate was called with has its own, under every policy."""

import copy

import pytest
import torch
from harness import on_ranks
from reference import assert_same, differs, whole_gradients
from replica_models import DIMS, EXACT, WIDTH, Tiny, all_losses, batch_loss, mesh_of, replicated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import rtp_ext
from rtp_ext import RotationDims
from rtp_ext.outer import AllReduce, LocalSGD, TopK, ZeroOuter
from rtp_ext.ring.autograd import GRADIENT_HANDLER


def joined(shape, outer=None, together=True, model=None):
    """Tiny of parts `mlp` and `mix`. `together`: on one ring with one policy from the start."""
    dims = DIMS if len(shape) == 2 else RotationDims(ring="ring")
    mesh = mesh_of(shape, ("replicas", "ring") if len(shape) == 2 else ("ring",))
    ring = rtp_ext.Ring(mesh, dims=dims, timeout=30.0) if together else None
    where = {"mesh": ring} if together else {"mesh": mesh, "dims": dims}
    model = Tiny() if model is None else model
    rtp_ext.fully_rotate(model.mlp, outer=outer, **where)
    rtp_ext.set_gradient_divide_factor(model.mlp, 3)  # before there is a model around it
    rtp_ext.fully_rotate(model.mix, outer=outer if together else None, **where)
    return rtp_ext.fully_rotate(model, mesh=ring)


def part_of(name):
    return name.split(".")[0] if name.startswith(("mlp", "mix")) else ""


def assert_divided(model, plain, factors, what):
    """`factors`: of each part; `plain` has the sum of the gradients of all ranks."""
    found = whole_gradients(model)
    for name, expected in whole_gradients(plain).items():
        assert_same(found[name], expected / factors[part_of(name)], EXACT, f"{what}: {name}")
        assert differs(found[name], expected / factors[part_of(name)] * (1 + 1e-6), EXACT), f"control: {name}"


def check(model, plain, rank, ranks, others, what):
    """`others`: the ranks whose gradients are averaged; factors are those of all ranks."""
    default, share, state = float(ranks), ranks / len(others), {"mlp": 3, "mix": None, "": None}
    for number, factors in enumerate(
        ({"mlp": 3}, {"mlp": 3, "mix": 1, "": None}, {"mlp": 2, "": 5}, {"mlp": None, "mix": None, "": None})
    ):
        for part, factor in factors.items() if number else ():
            rtp_ext.set_gradient_divide_factor(model.get_submodule(part), factor)
        state = {**state, **factors}
        divided = {part: (factor or default) / share for part, factor in state.items()}
        for each in (model, plain):
            each.zero_grad()
        for micro in range(2):  # of two micro-batches only the last is reduced over replicas
            rtp_ext.set_requires_all_reduce(model, micro == 1)
            batch_loss(model, rank, micro).backward()
            all_losses(plain, others, micro).backward()
        assert_divided(model, plain, divided, f"{what}, {state}")
        twin = copy.deepcopy(model)
        if number == 2:
            rtp_ext.set_gradient_divide_factor(twin.mlp, 7)
            twin.zero_grad(), plain.zero_grad()
            batch_loss(twin, rank, 9).backward()
            all_losses(plain, others, 9).backward()
            assert_divided(twin, plain, {**divided, "mlp": 7 / share}, f"{what}: a copy")
            model.zero_grad()
            batch_loss(model, rank, 9).backward()
            assert_divided(model, plain, divided, f"{what}: what was copied")


@on_ranks([2, 3])
def test_one_ring(rank, ranks, cases):
    for together in (True, False):
        with cases.case(f"together={together}"):
            check(joined((ranks,), together=together), Tiny(), rank, ranks, range(ranks), f"together={together}")
    with cases.case("as fully_shard"):
        factors = {"mlp": 3.0, "": 5.0}  # that of the root is no part's
        sharded, model, plain = (Tiny() for _ in range(3))
        for each in (sharded, model, plain):
            each.temperature = nn.Parameter(each.temperature.detach().view(1))  # fully_shard cuts no scalars
        joined((ranks,), model=model)
        mesh = init_device_mesh("cpu", (ranks,))
        for part in (sharded.mlp, sharded.mix, sharded):
            fully_shard(part, mesh=mesh)
        for part in sharded.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)  # Gloo scales nothing
        for part, factor in factors.items():
            sharded.get_submodule(part).set_gradient_divide_factor(factor)
            rtp_ext.set_gradient_divide_factor(model.get_submodule(part), factor)
        for each in (sharded, model):
            batch_loss(each, rank, 0).backward()
        all_losses(plain, ranks, 0).backward()
        for each in (sharded, model):
            assert_divided(each, plain, {"mix": float(ranks), **factors}, type(each).__name__)
    with cases.case("a parameter that was added to a part"):
        model, plain = joined((ranks,)), Tiny()
        for each in (model.mlp, plain.mlp):
            each.adapter = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
            each.register_forward_hook(lambda module, _, y: y * module.adapter)
        rtp_ext.set_gradient_divide_factor(model, 5)
        batch_loss(model, rank, 0).backward()
        all_losses(plain, ranks, 0).backward()
        assert_divided(model, plain, {"mlp": 3, "mix": float(ranks), "": 5}, "adapter")
    with cases.case("refused"):
        _refused(ranks)


def _refused(ranks):
    model = joined((ranks,))
    for act in (
        lambda: rtp_ext.set_requires_all_reduce(model.mlp, False),
        lambda: rtp_ext.set_requires_gradient_sync(model.mix, False),
        lambda: rtp_ext.no_sync(model.mix).__enter__(),
    ):
        with pytest.raises(ValueError, match=r"the whole model.*that is a part of a GatheredTiny: call it with that"):
            act()
    for wrong in ([model], "model"):
        with pytest.raises(TypeError, match="set_gradient_divide_factor: expected one module that fully_rotate was"):
            rtp_ext.set_gradient_divide_factor(wrong, 1)
    for wrong in ("a", True):
        with pytest.raises(TypeError, match="set_gradient_divide_factor: expected a positive number or None, got"):
            rtp_ext.set_gradient_divide_factor(model, wrong)
    with pytest.raises(ValueError, match="got a RotatedLinear, which is in such a model: pass the model, or call"):
        rtp_ext.set_gradient_divide_factor(model.mlp[0], 2)
    model.mix.weight = model.extra = model.mlp[0].weight  # shared by two parts, which divide it by the same factor
    rtp_ext.set_gradient_divide_factor(model.mlp, None)
    with pytest.raises(ValueError, match=r"one gradient divide factor for all parts that share.* got 2.0 and None"):
        rtp_ext.set_gradient_divide_factor(model.mix, 2)
    del model.extra
    model.mix.weight = None
    rtp_ext.set_gradient_divide_factor(model.mix, 2)
    model = Tiny()
    rtp_ext.fully_rotate(model.mlp)
    rtp_ext.set_requires_all_reduce(model.mlp, False)
    with pytest.raises(ValueError, match=r"module mlp after set_requires_all_reduce\(part, False\): call"):
        rtp_ext.fully_rotate(model)
    rtp_ext.set_requires_all_reduce(model.mlp, True)
    rtp_ext.fully_rotate(model)
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    rtp_ext.fully_rotate(sparse[1])
    rtp_ext.fully_rotate(sparse)
    rtp_ext.set_gradient_divide_factor(sparse[1], 1)
    with pytest.raises(ValueError, match=r"gradients of 0 \(WholeEmbedding\) are sparse.*sparse=False"):
        rtp_ext.set_gradient_divide_factor(sparse, 1)


@on_ranks(4)
def test_replicas(rank, ranks, cases):
    for name, outer, together in (
        ("AllReduce", AllReduce(), True),
        ("each its own", None, False),
        ("compressed", AllReduce(TopK(1.0)), True),
        ("ZeroOuter", ZeroOuter(), True),
    ):
        with cases.case(name):
            check(joined((2, 2), outer, together), Tiny(), rank, ranks, range(ranks), name)
    with cases.case("LocalSGD"):
        model, replica = joined((2, 2), LocalSGD(2)), rank // 2
        rtp_ext.outer_of(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
        check(model, Tiny(), rank, ranks, (2 * replica, 2 * replica + 1), "LocalSGD")
    with cases.case("every part's gradients travel between replicas in its own reduce_dtype"):
        model = Tiny(torch.float32)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        replicated((2, 2), model=model.mlp)
        replicated((2, 2), model=model.mix, mp_policy=policy)
        rtp_ext.fully_rotate(model)
        members = rtp_ext.outer_of(model)._members
        for name, parameter in model.named_parameters():
            expected = torch.bfloat16 if part_of(name) == "mix" else torch.float32
            assert members[parameter.__dict__[GRADIENT_HANDLER].index].wire_dtype == expected, name
