"""Parts that were converted before the model around them, and methods other than forward."""

import copy

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import on_ranks
from models import LanguageModel, batch_loss, make_batch, make_model, mean_loss, train
from reference import assert_same, differs, full, random, whole_parameters
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import rtp_ext

STEPS = 2


def assert_trained(model: nn.Module, plain: nn.Module, rank: int, ranks: int, what: str) -> None:
    """Trains both in float64: the same losses, and the same parameters afterwards."""
    untrained = copy.deepcopy(plain)
    ours = train(model, lambda step: batch_loss(model, rank, step), STEPS)
    theirs = train(plain, lambda step: mean_loss(plain, ranks, step), STEPS)
    total = torch.tensor(ours, dtype=torch.float64)
    dist.all_reduce(total)
    assert_same(total / ranks, torch.tensor(theirs, dtype=torch.float64), 1e-9, f"{what}: losses")
    for (name, actual), (_, expected), (_, before) in zip(
        whole_parameters(model).items(), plain.named_parameters(), untrained.named_parameters(), strict=True
    ):
        assert_same(actual, expected, 1e-9, f"{what}: {name}")
        assert differs(actual, before, 1e-6), f"control: {name} did not move"


def _convert(model: LanguageModel, order: str) -> None:
    ring = rtp_ext.Ring() if order == "one ring" else None
    if order == "nested":
        rtp_ext.fully_rotate(model.blocks[0].up)
    for block in list(model.blocks)[: 1 if order == "first" else None]:
        rtp_ext.fully_rotate(block, mesh=ring)
    rtp_ext.fully_rotate(model, mesh=ring)


@on_ranks(few([3], [2, 3]), timeout=240.0)
def test_parts_first(rank, ranks, cases):
    for order, checkpointed, inside in (
        ("first", None, True),
        ("each", None, True),
        ("each", True, False),
        ("each", False, False),
        ("nested", False, True),
        ("one ring", None, True),
    ):
        with cases.case(f"{order} checkpointed={checkpointed} inside={inside}"):
            plain = make_model(checkpointed=checkpointed, inside=inside)
            model = copy.deepcopy(plain)
            _convert(model, order)
            ring = rtp_ext.ring_of(model)
            for part in model.modules():
                assert part.__dict__.get("ring", ring) is ring, "everything on one ring"
            assert rtp_ext.ring_of(model.blocks[0]) is ring
            assert all(isinstance(p, DTensor) for p in model.parameters())
            begun, phases = [], ring.begin_forward
            ring.begin_forward = lambda begun=begun, phases=phases: (begun.append(1), phases())
            model(make_batch(rank, 0)[0])
            assert len(begun) == 1 and ring.agreement.forward_phase == 0, "one forward of the ring, for the model"
            told, ranks_of = [], ring.communicator
            exchange = ranks_of.exchange
            ranks_of.exchange = lambda value, told=told, exchange=exchange: (told.append(1), exchange(value))[1]
            model(make_batch(rank, 0)[0])
            assert not told, "the model has agreed for its parts"
            # a part is called without the model, and its copy, and the model's copy
            x = random(2, 3, 10, dtype=torch.float64, seed=rank)
            assert_same(model.blocks[0](x), plain.blocks[0](x), 1e-10, "a part alone")
            assert told, "a part alone agrees for itself"
            assert_same(copy.deepcopy(model.blocks[0])(x), plain.blocks[0](x), 1e-10, "a copy of a part")
            del ranks_of.exchange, ring.begin_forward
            twin = copy.deepcopy(model)
            assert_trained(model, copy.deepcopy(plain), rank, ranks, "model")
            assert_trained(twin, plain, rank, ranks, "copy")
            states = [m.__dict__["_rotation_state"] for m in twin.modules() if "_rotation_state" in m.__dict__]
            assert len({id(state) for state in states}) == len(states) > 1
            assert all(s.around[0]() in states for s in states if s.root() is not twin), "copies belong to the copy"


class _Adapted(nn.Module):
    """A layer with an adapter around it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = (nn.Linear(*sizes, bias=False).double() for sizes in ((10, 3), (3, base.out_features)))
        with torch.no_grad():
            for number, layer in enumerate((self.down, self.up)):
                layer.weight.copy_(0.3 * random(*layer.weight.shape, dtype=torch.float64, seed=number))

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@on_ranks(2)
def test_layers_added_to_a_part(rank, ranks, cases):
    """Layers that a part gets after its own conversion are converted with the model around it."""
    for again in (True, False):
        with cases.case(f"the model around it is {'' if again else 'not '}converted"):
            plain, model = make_model(), make_model()
            rtp_ext.fully_rotate(model.blocks[0] if again else model)
            for each in (plain, model):
                each.blocks[0].up = _Adapted(each.blocks[0].up)
            if again:
                rtp_ext.fully_rotate(model)
            added = model.blocks[0].up
            assert [isinstance(each.weight, DTensor) for each in (added.base, added.down, added.up)] == [
                True,
                again,
                again,
            ]
            assert_trained(model, plain, rank, ranks, "model")


class _Probe(nn.Module):
    """Notes the dtype that it is given."""

    def forward(self, x):
        self.seen = x.dtype
        return x


@on_ranks(2)
def test_policies_of_parts(rank):
    """The policy of a part holds inside it and at its border."""
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(4, 6), nn.Sequential(_Probe(), nn.LayerNorm(6), nn.Linear(6, 6)), _Probe(), nn.Linear(6, 3)
    )
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    exact = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64, output_dtype=torch.float32)
    rtp_ext.fully_rotate(model[1], mp_policy=exact)
    rtp_ext.fully_rotate(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x = random(5, 4, dtype=torch.float32, seed=rank)
    hidden = nn.functional.linear(x.bfloat16(), plain[0].weight.bfloat16(), plain[0].bias.bfloat16())
    seen = []
    model[2].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    output = model(x)
    assert model[1][0].seen == torch.float64 and model[2].seen == torch.float32 and output.dtype == torch.bfloat16
    assert_same(seen[0], copy.deepcopy(plain[1]).double()(hidden.double()), 1e-6, "computed in float64")
    assert differs(seen[0], copy.deepcopy(plain[1]).bfloat16()(hidden), 1e-4), "control: not in bfloat16"
    output.float().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
    # ignored parameters of a part stay so in the model
    model = copy.deepcopy(plain)
    rtp_ext.fully_rotate(model[1], ignored_params=[model[1][1].weight, model[1][1].bias])
    rtp_ext.fully_rotate(model)
    model(x + rank).sum().backward()
    assert not isinstance(model[1][1].weight, DTensor)
    alone = copy.deepcopy(plain)
    alone(x + rank).sum().backward()
    assert_same(model[1][1].weight.grad, alone[1][1].weight.grad, 1e-5, "an ignored gradient is this rank's own")


@on_ranks(3)
def test_what_does_not_fit_together_is_refused(rank, ranks):
    half = dist.new_group([0, 1])
    others = dist.new_group([2]) if ranks == 3 else None
    group = half if rank < 2 else others

    def unchanged(root: nn.Module, match: str, **options) -> None:
        def state() -> list:
            kinds, parameters = [type(m) for m in root.modules()], [id(p) for p in root.parameters()]
            return [kinds, parameters, [id(m.__dict__.get("ring")) for m in root.modules()]]

        before = state()
        with pytest.raises(ValueError, match=match):
            rtp_ext.fully_rotate(root, **options)
        assert state() == before

    model = make_model()
    rtp_ext.fully_rotate(model.blocks[0], timeout=30.0)
    unchanged(model, r"ranks \[0, 1, 2\], as module blocks.0 was converted with, got a mesh of ranks \[", mesh=group)
    unchanged(model, "expected timeout 0:00:30, that of the ring, or none, got 0:00:31", timeout=31.0)
    unchanged(model, "expected transport 'shm', that of the ring, or none, got 'c10d'", transport="c10d")
    unchanged(model, r"expected mesh=Ring\(.*the ring of module blocks.0, or None", mesh=rtp_ext.Ring())
    rtp_ext.fully_rotate(model.blocks[1], timeout=29.0)
    unchanged(model, "expected all parts of a model on one ring, got module blocks.0 .* and module blocks.1")

    model = make_model()
    rtp_ext.fully_rotate(model.blocks[0]), rtp_ext.fully_rotate(model.blocks[1])
    unchanged(model, "loss_head='fused' expected a causal language model", loss_head="fused")

    model = make_model(tied=True)
    rtp_ext.fully_rotate(model.embed)
    unchanged(model, r"weight of head \(Linear\) was shared with Embedding.weight, .* in one call")
    model = make_model()
    rtp_ext.fully_rotate(model.blocks[1])
    rtp_ext.fully_rotate(model)
    for again in (model, model.blocks[0], model.blocks[1], copy.deepcopy(model.blocks[0].norm)):
        unchanged(again, f"got a {type(again).__name__} that is a part of|got a {type(again).__name__} that already")

    model = make_model()
    rtp_ext.fully_rotate(model.blocks[0], mesh=group)
    unchanged(model, "as module blocks.0 was converted with", mesh=dist.group.WORLD)
    rtp_ext.fully_rotate(model)  # over the part's ranks
    assert rtp_ext.ring_of(model).size == (2 if rank < 2 else 1)


def _with_integers(odd: bool) -> LanguageModel:
    model = make_model()
    if odd:
        model.head.weight = nn.Parameter(model.head.weight.detach().to(torch.int64), requires_grad=False)
    return model


@on_ranks(2, timeout=60.0)
def test_a_refusal_of_one_rank_reaches_the_others(rank, ranks, cases):
    """The last rank refuses a call with an existing ring; every rank raises, and the ring stays alive."""
    odd = rank == ranks - 1
    ring = rtp_ext.Ring(timeout=20.0)
    part = make_model()
    rtp_ext.fully_rotate(part.blocks[0], mesh=ring)
    meant = {
        "its arguments": (make_model, {"mesh": ring, "bundle": "yes" if odd else True}, "expected bundle"),
        "its model": (lambda: _with_integers(odd), {"mesh": ring}, "parameters of layers that rotate"),
        "arguments, ring of a part": (lambda: part, {"loss_head": "no" if odd else None}, "expected loss_head"),
    }
    for what, (make, options, match) in meant.items():
        with cases.case(what):
            model = make()
            before = list(model.parameters())
            whose = match if odd else f"the call failed on rank {ranks - 1} of {ranks}: .*{match}"
            with pytest.raises((ValueError, TypeError), match=whose):
                rtp_ext.fully_rotate(model, **options)
            assert all(a is b for a, b in zip(model.parameters(), before, strict=True)) and ring.alive
    with cases.case("afterwards"):
        batch_loss(rtp_ext.fully_rotate(make_model(), mesh=ring), rank, 0).backward()
    ring.close()


class _Encoder(LanguageModel):
    def encode(self, ids, *, scale=1.0):
        """Words to vectors."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block.inner(x) * self.norm.weight.sum()  # a method of another module, and a parameter
        return self.norm(x) * self.temperature * scale

    def forward(self, ids):
        return self.head(self.encode(ids))

    def words(self, ids):
        yield self.encode(ids)


@on_ranks(3)
def test_forward_methods(rank, ranks):
    torch.manual_seed(0)
    plain = _Encoder().double()
    ids = make_batch(rank, 0)[0]
    for parts in (False, True):
        model = copy.deepcopy(plain)
        with pytest.raises(ValueError, match="expected a model converted by fully_rotate, got a _Encoder"):
            rtp_ext.register_forward_method(model, "encode")
        if parts:
            rtp_ext.fully_rotate(model.blocks[0])
        rtp_ext.fully_rotate(model)
        with pytest.raises(ValueError, match=r"call full_tensor\(\) of the parameter"):
            model.encode(ids)  # control: the parameters of the norm are shards
        for block in model.blocks:
            rtp_ext.register_forward_method(block, "inner")
        for name in ("encode", "encode"):  # the second time changes nothing
            rtp_ext.register_forward_method(model, name)
        for name, match in (("decode", "_Encoder, got 'decode'"), ("words", "a generator or coroutine")):
            with pytest.raises(ValueError, match=match):
                rtp_ext.register_forward_method(model, name)
        assert model.encode.__doc__ == "Words to vectors."
        twin = copy.deepcopy(model)
        for each in (model, twin):
            each.zero_grad(), plain.zero_grad()
            assert_same(each.encode(ids, scale=2.0), plain.encode(ids, scale=2.0), 1e-10, "encode")
            assert_same(each(ids), plain(ids), 1e-10, "forward, which calls encode")
            assert each.__dict__["_rotation_state"].depth == each.__dict__["_rotation_state"].root_depth == 0
            each.encode(ids).pow(3).sum().backward()
            sum(plain.encode(make_batch(r, 0)[0]).pow(3).sum() for r in range(ranks)).div(ranks).backward()
            for name, parameter in plain.named_parameters():
                gradient = each.get_parameter(name).grad
                assert_same(gradient if gradient is None else full(gradient), parameter.grad, 1e-9, name)
        # of a part, from outside
        x = random(2, 3, 10, dtype=torch.float64, seed=rank)
        assert_same(model.blocks[1].inner(x), plain.blocks[1].inner(x), 1e-10, "a method of a part")
        with pytest.raises((IndexError, RuntimeError)):
            model.encode(ids + 1000)
        assert_same(model.encode(ids), plain.encode(ids), 1e-10, "encode, after one that failed")
    model = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    rtp_ext.fully_rotate(model, mp_policy=policy)
    rtp_ext.register_forward_method(model, "encode")
    assert model.encode(ids).dtype == torch.float64, "cast as the output of forward is"
