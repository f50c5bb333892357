"""Uses of a Flyweight besides a plain training loop, and its refusals."""

import copy
import pickle
from itertools import product

import pytest
import torch
from flyweight_modules import (
    FEATURES,
    HEADS,
    MLP,
    MLP_CUT,
    Attention,
    as_leaves,
    check_gradients,
    make_call,
    make_module,
    reference,
    reference_pass,
    take,
    tolerance_of,
)
from harness import on_ranks
from operation_checks import loss
from reference import assert_same, chunk, differs, double_copy, full, local
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.functional import rotated_flyweight
from rtp_ext.nn import Flyweight

TIMEOUT = 30.0


def needs(ring):
    """Only parameters that require gradients get them, and other gradients do not travel."""
    rank, ranks = ring.rank, ring.size
    calls, _, gradients, expected = reference("attention", torch.float64, ranks)
    for needs_x, needs_v, needs_rest in product((True, False), repeat=3):
        module = Flyweight(make_module("attention", torch.float64), ring, **HEADS)
        module.module.requires_grad_(needs_rest)
        module.module.v.requires_grad_(needs_v)
        args, kwargs = as_leaves(calls[rank], torch.float64)
        args[0].requires_grad_(needs_x)
        args[1]["values"].requires_grad_(False)
        args[1]["unused"].requires_grad_(False)
        y = module(*args, **kwargs)
        assert y.requires_grad == (needs_x or needs_v or needs_rest)
        if not y.requires_grad:
            continue
        before = ring.hops("weight"), ring.hops("gradient")
        loss(y, rank).backward()
        sent = ring.hops("weight") - before[0], ring.hops("gradient") - before[1]
        assert sent == (ranks - 1, (ranks - 1) * (needs_v or needs_rest))
        assert_same(args[0].grad, gradients[rank][0] if needs_x else None, 1e-10, "input gradient")
        assert args[1]["values"].grad is None
        for name, parameter in module.module.named_parameters():
            wanted = needs_v if name == "v" else needs_rest
            right = take(expected.get_parameter(name).grad, module.shard_dims[name], ranks, rank) if wanted else None
            assert_same(local(parameter.grad) if wanted else parameter.grad, right, 1e-9, name)


def repeated(ring):
    """Two forwards before one backward, checkpointing outside and inside, and a copy of the module."""
    rank, ranks = ring.rank, ring.size
    for in_place, checkpointed in product((False, True), repeat=2):
        plain = make_module("mlp", torch.float64)
        plain.checkpointed = checkpointed
        expected = double_copy(plain)
        ring.in_place = in_place
        module = Flyweight(plain, ring, **MLP_CUT)
        batches = [[make_call("mlp", other, torch.float64, seed) for other in range(ranks)] for seed in (10, 60)]
        gradients = [reference_pass(expected, batch)[1] for batch in batches]
        leaves = [as_leaves(batch[rank], torch.float64)[0][0] for batch in batches]
        sum(loss(y, rank) for y in [module(x) for x in leaves]).backward()
        check_gradients(module, expected, 1e-10)
        for x, right in zip(leaves, gradients, strict=True):
            assert_same(x.grad, right[rank][0], 1e-10, "input gradient")
        twin = copy.deepcopy(module)
        for reentrant in (False, True):
            twin.zero_grad()
            for x in leaves:
                x.grad = None
                loss(checkpoint(twin, x, use_reentrant=reentrant), rank).backward()
            check_gradients(twin, expected, 1e-10)
            assert_same(leaves[0].grad, gradients[0][rank][0], 1e-10, "input gradient")
        check_gradients(module, expected, 1e-10)


def copies_in_turn(shards, x: Tensor, rank: int) -> Tensor:
    """The sum of the copies of an MLP, made from shards in the order in which a rank meets them."""
    y = 0.0
    for step in range(len(shards)):
        up, up_bias, down, bias = shards[(rank - step) % len(shards)]
        if up.numel():
            y = y + F.linear(F.dropout(torch.tanh(F.linear(x, up, up_bias)), 0.5), down)
        y = y + bias
    return y


def random_numbers(ring):
    """Dropout: the masks of the forward again in backward, and none drawn by it; whatever was done in between."""
    rank, ranks = ring.rank, ring.size
    whole = [p.detach().clone().requires_grad_() for p in make_module("mlp", torch.float64).parameters()]
    up, up_bias, down, bias = whole
    padded = [F.pad(chunk(bias, ranks, j), (j * 2, FEATURES - j * 2 - chunk(bias, ranks, j).numel())) for j in range(3)]
    shards = [
        (chunk(up, ranks, j), chunk(up_bias, ranks, j), chunk(down, ranks, j, 1), padded[j]) for j in range(ranks)
    ]
    x = make_call("mlp", rank, torch.float64)[0][0]
    leaf, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.manual_seed(rank)
    expected = copies_in_turn(shards, leaf, rank)
    after = torch.get_rng_state()
    loss(expected, rank).backward()
    for parameter in whole:
        ring.all_reduce(parameter.grad).div_(ranks)
    plain = make_module("mlp", torch.float64)
    plain.dropout.p = 0.5
    module = Flyweight(plain, ring, **MLP_CUT)
    previous = torch.zeros_like(x)
    for how in (
        "plain",
        "evaluated in between",
        "checkpointed",
        "checkpointed, reentrant",
        "checkpointed inside",
        "checkpointed inside, evaluated in between",
    ):
        plain.checkpointed = "inside" in how
        evaluated = "evaluated" in how
        module.zero_grad()
        torch.manual_seed(rank)
        if how in ("checkpointed", "checkpointed, reentrant"):
            y = checkpoint(module, ours, use_reentrant="reentrant" in how)
        else:
            y = module(ours)
        assert_same(y, expected, 1e-10, f"{how}: output")
        assert torch.equal(torch.get_rng_state(), after), f"{how}: the forward draws as often"
        torch.manual_seed(100)
        module.train(not evaluated)
        loss(y, rank).backward()
        assert {part.training for part in module.modules()} == {not evaluated}
        module.train()
        assert torch.initial_seed() == 100 and torch.equal(torch.rand(3), torch.rand(3, generator=seeded(100))), how
        assert_same(ours.grad - previous, leaf.grad, 1e-10, f"{how}: input gradient")
        previous = ours.grad.clone()
        for parameter, right in zip(module.parameters(), whole, strict=True):
            assert_same(full(parameter.grad), right.grad, 1e-10, f"{how}: gradient")
    torch.manual_seed(rank + 1)
    assert differs(module(ours), expected, 1e-10), "control: other random numbers"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def precisions(ring):
    """Float32 parameters that compute in bfloat16: cast under autocast by the operations, else before they travel."""
    rank, ranks = ring.rank, ring.size
    dtype = torch.bfloat16
    calls, outputs, gradients, expected = reference("mlp", dtype, ranks)
    sent: dict = {}
    for kind, in_place in product(("autocast", torch.float32, torch.bfloat16), (False, True)):
        autocast = kind == "autocast"
        policy = None if autocast else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=kind)
        plain = make_module("mlp", dtype).float()
        ring.in_place = in_place
        module = Flyweight(plain, ring, **MLP_CUT, mp_policy=policy)
        (x,), _ = as_leaves(calls[rank], torch.float32 if autocast else dtype)
        seen: list[torch.dtype] = []
        plain.up.register_forward_hook(lambda part, args, y, seen=seen: seen.append(y.dtype))
        before = ring.bytes_sent("weight"), ring.bytes_sent("gradient")
        with torch.autocast("cpu", dtype, enabled=autocast):
            y = module(x)
        loss(y, rank).backward()
        assert seen == [dtype] * 2 * ranks, f"expected as many runs of {dtype} in backward as in forward, got {seen}"
        if not in_place:  # where nothing is cast, the shard itself takes one hop more, home
            sent[kind] = ring.bytes_sent("weight") - before[0], ring.bytes_sent("gradient") - before[1]
        assert y.dtype == dtype and x.grad.dtype == x.dtype and module.module.up.weight.grad.dtype == torch.float32
        tolerance = tolerance_of(dtype) * (ranks if kind == dtype else 1)
        assert_same(y, outputs[rank], tolerance, "output")
        assert_same(x.grad, gradients[rank][0], tolerance, "input gradient")
        check_gradients(module, expected, tolerance)
    (weights, sums), sixteen = sent["autocast"], sent[dtype]
    assert sent[torch.float32] == (weights // 2, sums) and sixteen == (weights // 2, sums // 2)


class Spoiled(nn.Module):
    """Does what a flyweight must not."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5 if what == "sums shapes" else 3, 3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "adds to a buffer":
            self.count.add_(1)
        if self.what == "replaces a buffer":
            self.count = self.count + 1
        if self.what == "changes its argument":
            x.add_(1)
        if self.what == "returns a pair":
            return x, x
        if self.what == "raises" or (self.what == "raises in backward" and torch.is_grad_enabled()):
            raise KeyError(self.what)
        if self.what == "sums shapes":
            return x @ self.weight.t()
        return x @ self.weight


def errors(ring):
    """Every rank raises the error, and the ring stays usable."""
    x = torch.ones(2, 3, dtype=torch.float64)
    for what, kind, text in (
        ("adds to a buffer", ValueError, r"Flyweight\(Spoiled\).*it changed buffer count"),
        ("replaces a buffer", ValueError, "it changed buffer count"),
        ("changes its argument", ValueError, "it changed argument 0"),
        ("returns a pair", TypeError, "returns one tensor, got tuple"),
        ("raises", KeyError, "raises"),
        ("raises in backward", KeyError, "raises in backward"),
        ("sums shapes", ValueError, r"one shape to sum, got \(2, [12]\)"),
    ):
        how = (0, "sum") if what == "sums shapes" else (1, "cat")
        module = Flyweight(Spoiled(what), ring, shard_dims={"weight": how[0]}, combine=how[1])
        with pytest.raises(kind, match=text):
            y = module(x.clone())
            y.sum().backward()
        if what == "sums shapes":
            continue
        module.module.what = "nothing"
        module.zero_grad()
        y = module(x)
        y.sum().backward()
        assert_same(y, torch.full((2, 3), 3.0), 0.0, f"after: {what}")
        assert_same(full(module.module.weight.grad), torch.full((3, 3), 2.0), 0.0, f"after: {what}")
    dims = MLP_CUT["shard_dims"]
    for options, text in (
        ({**MLP_CUT, "shard_dims": {"up.weight": 0}}, r"expected shard_dims to name the parameters \['down.bias'"),
        ({**MLP_CUT, "shard_dims": {**dims, "up.bias": 1}}, r"a dimension of up.bias \(7,\) to cut, got 1"),
        ({**MLP_CUT, "combine": "mean"}, "'cat' or 'sum', got 'mean'"),
        ({**MLP_CUT, "combine": "cat"}, r"added_once to name parameters of a sum.*combine 'cat'"),
        ({**MLP_CUT, "added_once": ("bias",)}, r"added_once to name.*\['bias'\]"),
        ({"shard_dims": dict.fromkeys(dims)}, "expected a parameter to cut"),
    ):
        with pytest.raises(ValueError, match=text):
            Flyweight(MLP(), ring, **options)
    module = Flyweight(MLP(), ring, **MLP_CUT)
    with pytest.raises(ValueError, match=r"plain parameter up\.weight, got a DTensor"):
        Flyweight(module.module, ring, **MLP_CUT)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(module)
    # without added_once a bias that is cut does not fit the sum
    with pytest.raises(RuntimeError):
        Flyweight(MLP(), ring, shard_dims=dims, combine="sum")(torch.ones(2, FEATURES))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(14.0, dtype=torch.float64).view(7, 2))

    def forward(self) -> Tensor:
        return self.weight.t()


def a_parameter_as_output(ring):
    """An output that shares the memory of a shard which is about to be overwritten."""
    for in_place in (False, True):
        ring.in_place = in_place
        module = Flyweight(Table(), ring, shard_dims={"weight": 0})
        y = module()
        assert_same(y, Table()().detach(), 0.0, "output")
        loss(y, ring.rank).backward()
        plain = Table()
        sum(loss(plain(), rank) / ring.size for rank in range(ring.size)).backward()
        assert_same(full(module.module.weight.grad), plain.weight.grad, 1e-12, "gradient")


def as_a_module(ring):
    """Names, initialisation, the meta device; the functional form with plain shards; nothing received is kept."""
    rank, ranks = ring.rank, ring.size
    plain = make_module("attention", torch.float64)
    module = Flyweight(copy.deepcopy(plain), ring, **HEADS)
    assert list(module.state_dict()) == [f"module.{name}" for name in plain.state_dict()]
    assert "shard_dims={'q': 0" in repr(module) and "combine=sum" in repr(module)
    args, kwargs = make_call("attention", rank, torch.float64)
    before = module(*args, **kwargs)

    empty = Flyweight(copy.deepcopy(plain).to("meta"), ring, **HEADS).to_empty(device="cpu")
    empty.module.temperature.fill_(0.5)

    def initialise(part):
        if isinstance(part, Attention):
            with torch.no_grad():
                for name, parameter in part.named_parameters():
                    parameter.copy_(plain.get_parameter(name))

    rtp_ext.init_weights(empty, initialise)
    assert_same(empty(*args, **kwargs), before, 1e-12, "from the meta device")

    shards = {
        name: take(p.detach(), HEADS["shard_dims"][name], ranks, rank).clone().requires_grad_()
        for name, p in plain.named_parameters()
    }
    code = copy.deepcopy(plain).requires_grad_(False)
    kept = []

    def pack(tensor):
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = rotated_flyweight(code, shards, args, kwargs, ring=ring, **HEADS)
    assert_same(y, before, 1e-12, "functional")
    known = [*shards.values(), *args[1].values(), args[0], *(v for v in kwargs.values() if v is not None)]
    assert kept and set(kept) <= {tensor.untyped_storage().data_ptr() for tensor in known}
    loss(y, rank).backward()
    *_, expected = reference("attention", torch.float64, ranks)
    for name, shard in shards.items():
        right = take(expected.get_parameter(name).grad, HEADS["shard_dims"][name], ranks, rank)
        assert_same(shard.grad, right, 1e-9, name)
    with pytest.raises(ValueError, match=r"expected parameters \['k'.*got \['q'\]"):
        rotated_flyweight(code, {"q": shards["q"]}, args, kwargs, ring=ring, **HEADS)
    with pytest.raises(TypeError, match="parameters of one dtype"):
        mixed = {**shards, "k": shards["k"].detach().float()}
        rotated_flyweight(code, mixed, args, kwargs, ring=ring, **HEADS)


BEHAVIOURS = [needs, repeated, random_numbers, precisions, errors, a_parameter_as_output, as_a_module]


@on_ranks(3)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_behaviour(cases, transport):
    for behaviour in BEHAVIOURS:
        with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring, cases.case(behaviour.__name__):
            behaviour(ring)
