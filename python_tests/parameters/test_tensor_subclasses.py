"""Parameters that are tensor subclasses, gathered through the extensions of their class."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from harness import on_ranks
from reference import assert_same, differs
from subclasses import Float8, Pair, SentPair, rounded_to_8_bits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.parameters.loading import whole_state
from rtp_ext.ring.mesh import own_part

EXACT = 1e-10
STEPS = 3


class Halves(torch.autograd.Function):
    """A plain tensor of a pair, in which both count, and differently."""

    @staticmethod
    def forward(ctx, pair: Pair) -> Tensor:
        ctx.kind = type(pair)
        return pair.a + 2 * pair.b

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return ctx.kind(gradient, 2 * gradient)


class PairNet(nn.Module):
    """Two layers of pairs, and plain ones that rotate or are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 7, bias=False), nn.Linear(7, 5, bias=False)
        self.norm, self.last = nn.LayerNorm(5), nn.Linear(5, 3)
        self.double()
        for layer in (self.one, self.two):
            weight = layer.weight.detach()
            layer.weight = nn.Parameter(SentPair(weight, 0.7 * weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(Halves.apply(self.two(torch.relu(self.one(x))))))


class Float8Net(nn.Module):
    """Layers of several kinds, some with weights that travel in float8; `plain`: the same in one process."""

    SPECIAL = ("table", "one", "convolution", "frozen", "experts")

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.table, self.one, self.mixed = nn.Embedding(6, 5), nn.Linear(5, 7), nn.Linear(7, 5)
        self.convolution, self.frozen, self.norm = nn.Conv1d(5, 5, 1), nn.Linear(5, 5, bias=False), nn.LayerNorm(5)
        self.experts = Experts()
        self.double()
        self.frozen.weight.requires_grad_(False)
        self.plain = plain
        for name in self.SPECIAL:
            layer = self.get_submodule(name)
            if not plain:
                wanted = layer.weight.requires_grad
                layer.weight = nn.Parameter(Float8(layer.weight.detach()), requires_grad=wanted)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        # checkpoint would compute again after functional_call has put the weights back
        x = x + (self._mlp(x) if self.plain else checkpoint(self._mlp, x, use_reentrant=False))
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return self.experts(self.norm(self.frozen(x)))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.mixed(torch.relu(self.one(x)))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return sum(x @ each for each in self.weight)


def rounded_forward(net: Float8Net, ids: Tensor) -> Tensor:
    """The forward of the plain net with weights as they arrive, and gradients as if they were exact."""
    weights = {f"{name}.weight": net.get_submodule(name).weight for name in net.SPECIAL}
    arrived = {name: weight + (rounded_to_8_bits(weight) - weight).detach() for name, weight in weights.items()}
    return torch.func.functional_call(net, arrived, (ids,))


def batch(rank: int, step: int, ids: bool) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if ids:
        return torch.randint(0, 6, (2, 3), generator=generator)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=0.05, eps=1e-8, foreach=False)


def train_plain(model: nn.Module, forward: Callable[[Tensor], Tensor], ranks: list[int], ids: bool) -> nn.Module:
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        total = sum(forward(batch(rank, step, ids)).pow(2).sum() for rank in ranks)
        (total / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def inside(tensor: Tensor) -> list[Tensor]:
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    return [getattr(tensor, name) for name in names] or [tensor]


def shards(model: nn.Module) -> dict[str, Tensor]:
    """This rank's plain shards; those of a wrapper one after the other."""
    found = {}
    for name, parameter in model.named_parameters():
        for number, part in enumerate(inside(parameter._local_tensor)):
            found[f"{name} {number}"] = part.detach()
    return found


def parts_of(plain: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """Returns the expected shards of `model`."""
    found = {}
    for (name, whole), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        mine = own_part(whole.detach(), parameter.device_mesh, parameter.placements)
        for number, part in enumerate(inside(mine)):
            found[f"{name} {number}"] = part
    return found


def check_shards(model: nn.Module, plain: nn.Module, other: nn.Module | None, tolerance: float) -> None:
    """`other`: the result of a wrong sum, which must differ in some trained parameter."""
    expected, wrong = parts_of(plain, model), {} if other is None else parts_of(other, model)
    for name, shard in shards(model).items():
        assert_same(shard, expected[name], tolerance, name)
    for name, parameter in model.named_parameters():
        if wrong and parameter.requires_grad and parameter._local_tensor.numel():
            assert differs(expected[f"{name} 0"], wrong[f"{name} 0"], tolerance), f"{name}: the control is the same"


def placed(ranks: int, replicas: int) -> dict:
    if replicas == 1:
        return {"timeout": 30.0}
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicas", "ring"))
    return {"mesh": mesh, "dims": rtp_ext.RotationDims(ring="ring", replicate="replicas"), "timeout": 30.0}


def _train(model: nn.Module, rank: int, ids: bool) -> None:
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        model(batch(rank, step, ids)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks([2, 3])
def test_pairs_train_as_in_one_process(rank, ranks, cases):
    every = list(range(ranks))
    with cases.case("pairs"):
        torch.manual_seed(0)
        model = PairNet()
        plain, other = copy.deepcopy(model), copy.deepcopy(model)
        rtp_ext.fully_rotate(model, timeout=30.0)
        assert type(model.two.weight._local_tensor) is SentPair
        model(batch(rank, 0, False)).pow(2).sum().backward()
        gradient = model.one.weight.grad._local_tensor
        assert type(gradient) is SentPair
        if gradient.numel():
            assert differs(gradient.a, gradient.b, EXACT), "both halves have the same gradient"
        model.zero_grad()
        _train(model, rank, False)
        check_shards(model, train_plain(plain, plain, every, False), train_plain(other, other, every[:1], False), EXACT)
    rtp_ext.ring_of(model).close()


@on_ranks()
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_weights_that_travel_in_float8_train_as_in_one_process(rank, ranks, cases, replicas):
    every = list(range(ranks))
    torch.manual_seed(0)
    plain = Float8Net(plain=True)
    trained, exact, alone = (copy.deepcopy(plain) for _ in range(3))

    def converted(policy: MixedPrecisionPolicy) -> Float8Net:
        torch.manual_seed(0)
        model = Float8Net()
        rtp_ext.fully_rotate(model, mp_policy=policy, **placed(ranks, replicas))
        special = [type(model.get_submodule(name).weight._local_tensor) is Float8 for name in model.SPECIAL]
        assert all(special) and type(model.mixed.weight._local_tensor) is Tensor
        return model

    with cases.case("trained"):
        model = converted(MixedPrecisionPolicy())
        _train(model, rank, True)
        assert model.frozen.weight.grad is None
        train_plain(trained, lambda ids: rounded_forward(trained, ids), every, True)
        train_plain(alone, lambda ids: rounded_forward(alone, ids), every[:1], True)
        check_shards(model, trained, alone, 1e-9)
        train_plain(exact, exact, every, True)
        assert differs(exact.one.weight, trained.one.weight, 1e-3), "rounding changes nothing"
        rtp_ext.ring_of(model).close()
    with cases.case("gradients of float32"):
        model = converted(MixedPrecisionPolicy(param_dtype=torch.float32))
        model(batch(rank, 0, True)).pow(2).sum().backward()
        (sum(rounded_forward(plain, batch(each, 0, True)).pow(2).sum() for each in every) / ranks).backward()
        for (name, parameter), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            if whole.grad is not None:
                mine = own_part(whole.grad, parameter.device_mesh, parameter.placements)
                scale = whole.grad.abs().max().item()
                assert_same(parameter.grad._local_tensor, mine, 1e-5, name, scale=scale)
        rtp_ext.ring_of(model).close()


@on_ranks(2)
def test_state_of_pairs(rank, cases):
    torch.manual_seed(0)
    plain = PairNet()
    x = batch(rank, 0, False)
    expected = plain(x).detach()

    def another() -> nn.Module:
        torch.manual_seed(1)
        return rtp_ext.fully_rotate(PairNet(), mesh=ring, timeout=30.0)

    ring = rtp_ext.Ring(timeout=30.0)
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring, timeout=30.0)
    whole = StateDictOptions(full_state_dict=True)
    loads: dict[str, Callable[[nn.Module], object]] = {
        "shards": lambda net: net.load_state_dict(model.state_dict()),
        "assigned shards": lambda net: net.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
        "assigned whole": lambda net: net.load_state_dict(plain.state_dict(), assign=True),
        "whole": lambda net: set_model_state_dict(net, plain.state_dict(), options=whole),
        "data": lambda net: [
            setattr(one, "data", other.detach())
            for one, other in zip(net.parameters(), plain.parameters(), strict=True)
        ],
    }
    for what, load in loads.items():
        with cases.case(what):
            net = another()
            assert differs(net(x), expected, 1e-3), "the control is the same"
            load(net)
            assert type(net.one.weight) is DTensor and type(net.one.weight._local_tensor) is SentPair
            assert_same(net(x), expected, EXACT, what)
            net(x).sum().backward()
            assert type(net.one.weight.grad._local_tensor) is SentPair
    with cases.case("deepcopy"):
        assert_same(copy.deepcopy(model)(x), expected, EXACT, "the copy")
    with cases.case("to float"):
        assert_same(copy.deepcopy(model).float()(x.float()), expected.float(), 1e-5, "in float32")
    with cases.case("torch.distributed.checkpoint"), torch.serialization.safe_globals([SentPair]):
        net = another()
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(folder)
        checkpoints.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0])
        found = {"model": get_model_state_dict(net)}
        checkpoints.load(found, checkpoint_id=folder[0])
        set_model_state_dict(net, found["model"])
        assert_same(net(x), expected, EXACT, "loaded")
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder[0])
    with cases.case("compiled"):
        net = copy.deepcopy(model)
        compiled = torch.compile(net, backend="eager")
        assert_same(compiled(x), expected, EXACT, "compiled")
    for what, state in (
        ("whole_state", whole_state(model, True)),
        ("full_state_dict", get_model_state_dict(model, options=whole)),
    ):
        with cases.case(what):
            for name, value in plain.state_dict().items():
                assert type(state[name]) is type(value.data), f"{name}: {type(state[name])}"
                for mine, theirs in zip(inside(state[name]), inside(value), strict=True):
                    assert_same(mine, theirs, EXACT, f"{what} {name}")
    with cases.case("init_weights"):
        net = another()
        rtp_ext.init_weights(net, lambda part: isinstance(part, nn.Linear) and nn.init.constant_(part.weight, 0.25))
        for name, shard in shards(net).items():
            if name.split(".")[0] in ("one", "two", "last") and "weight" in name:
                assert bool((shard == 0.25).all()), name
    ring.close()
