"""fully_rotate: the types and the memory of a converted model, and that it trains like the plain one."""

import copy
import logging
from itertools import product

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import on_ranks, run_ranks
from models import LanguageModel, batch_loss, make_batch, make_model, mean_loss, train
from reference import assert_same, chunk, differs, full, local, whole_parameters, wholes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import rtp_ext

STEPS = 4


def assert_same_model(model: nn.Module, expected: nn.Module, tolerance: float, gradients: bool = False) -> None:
    """Every parameter (or gradient) of a converted model, gathered, against the plain one."""
    ours, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    assert list(ours) == list(theirs)
    values = wholes(parameter.grad if gradients else parameter for parameter in ours.values())
    for value, (name, reference) in zip(values, theirs.items(), strict=True):
        assert_same(value, reference.grad if gradients else reference, tolerance, name)


@on_ranks()
@pytest.mark.parametrize(("ranks", "transport"), [(1, "shm"), (2, "c10d"), (3, "shm"), (4, "c10d")])
def test_trains_like_the_plain_model(rank, ranks, cases, transport):
    for in_place, route, dtype in (
        *product((False, True), ("ring", "direct"), [torch.float64]),
        (False, "auto", torch.float32),
    ):
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4  # AdamW divides by gradients that may be small
        plain = make_model(dtype)
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), in_place=in_place, route=route, transport=transport)
        ours = train(model, lambda step, model=model: batch_loss(model, rank, step), STEPS)
        theirs = train(plain, lambda step, plain=plain: mean_loss(plain, ranks, step), STEPS)
        total = torch.tensor(ours, dtype=torch.float64)
        dist.all_reduce(total)
        whole = whole_parameters(model)
        with cases.case(f"in_place={in_place} route={route} {dtype}"):
            assert_same(total / ranks, torch.tensor(theirs, dtype=torch.float64), tolerance, "losses")
            for name, parameter in plain.named_parameters():
                assert_same(whole[name], parameter, tolerance, name)
            untrained = make_model(dtype)
            for name, parameter in untrained.named_parameters():
                assert differs(whole[name], parameter, tolerance), f"control: {name} did not move"
        rtp_ext.ring_of(model).close()


@on_ranks(3)
def test_names_types_and_ties_are_unchanged(rank, ranks):
    plain = make_model(tied=True)
    model = copy.deepcopy(plain)
    same = rtp_ext.fully_rotate(model, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("rtp",)))
    assert same is model
    for (name, ours), (other, theirs) in zip(model.named_modules(), plain.named_modules(), strict=True):
        assert name == other and isinstance(ours, type(theirs)), name
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert model.head.weight is model.embed.weight, "tied weights stay tied"
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter), name
        assert parameter.shape == plain.get_parameter(name).shape and parameter.requires_grad
        assert parameter.device_mesh.size() == ranks
    assert_same_model(model, plain, 0.0)
    before = dict(model.named_parameters())
    train(model, lambda step: batch_loss(model, rank, step), 1)
    for name, parameter in model.named_parameters():
        assert parameter is before[name], f"{name} was swapped"
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements, name
    # Full state dicts are those of the plain model, and load back.
    state = {name: full(value) for name, value in get_model_state_dict(model).items()}
    twin = make_model(tied=True)
    twin.load_state_dict(state)
    assert_same_model(model, twin, 0.0)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert_same_model(model, twin, 0.0)


@on_ranks([2, 4])
def test_persistent_bytes_are_divided_by_the_ranks(rank, ranks):
    """Parameters, gradients and optimizer state: total / R up to one row per parameter."""
    plain = make_model(torch.float32)
    model = rtp_ext.fully_rotate(copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, lambda step: batch_loss(model, rank, step), 2, optimizer=optimizer)
    for name, parameter in model.named_parameters():
        whole = plain.get_parameter(name)
        (placement,) = parameter.placements
        share = chunk(whole, ranks, 0, placement.dim).numel() if whole.dim() else 1
        states = [value for value in optimizer.state[parameter].values() if value.dim() == whole.dim() > 0]
        assert len(states) == (2 if whole.dim() else 0), name
        for tensor in (parameter, parameter.grad, *states):
            piece = local(tensor)
            assert piece.numel() <= share, f"{name}: {piece.numel()} elements for a share of {share}"
            assert piece.untyped_storage().nbytes() <= 4 * share, f"{name}: a view of something larger"
    held = sum(local(p).numel() for p in model.parameters())
    counts = torch.tensor([held])
    dist.all_reduce(counts)
    total = sum(p.numel() for p in plain.parameters())
    assert total <= counts.item() <= total + ranks, "shards of all ranks are the model once; a scalar is on every rank"


def _transient_slots(rank, ranks, transport, in_place):
    """Slots that training leases, for models of 3 and of 6 blocks: the same number, each of the largest shard."""
    found = []
    for blocks in (3, 6):
        model = rtp_ext.fully_rotate(
            make_model(torch.float32, blocks=blocks), transport=transport, route="ring", in_place=in_place
        )
        ring = rtp_ext.ring_of(model)
        loss = batch_loss(model, rank, 0)
        forward = ring.slot_count("weight").peak_slots, ring.slot_count("gradient").peak_slots
        ring.reset_peak()
        loss.backward()
        backward = ring.slot_count("weight").peak_slots, ring.slot_count("gradient").peak_slots
        for step in range(2):  # the order of the layers is known from the second on
            batch_loss(model, rank, step).backward()
        bytes_ = ring.slot_count("weight").peak_bytes, ring.slot_count("gradient").peak_bytes
        found.append((forward, backward, bytes_))
        ring.close()
    assert found[0] == found[1], f"slots depend on the number of layers: {found}"
    return found[0]


def largest_shard_bytes(ranks: int) -> int:
    """Bytes of the test model in float32: the parts of a bundle are aligned to 64 bytes."""
    shards = []
    for module in make_model(torch.float32).modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            parts = [4 * chunk(parameter, ranks, 0).numel() for parameter in module.parameters()]
            shards.append(sum(-(-part // 64) * 64 for part in parts))
    return max(shards)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("ranks", few([1, 2, 3], [1, 2, 3, 4]))
def test_transient_slots(ranks, transport):
    weights = {1: 0, 2: 1}.get(ranks, 2)
    # Over c10d the gradients of two layers are deferred, and keep their two slots each until then.
    gradients = {1: 0}.get(ranks, 6 if transport == "c10d" else 2)
    for forward, backward, bytes_ in run_ranks(_transient_slots, ranks, transport, False):
        assert forward == (weights, 0)
        assert backward == (weights, gradients)
        most = largest_shard_bytes(ranks)
        # once the order is known, as many shards as a layer receives, at least three, and one in use
        ahead = max(ranks, 4) if ranks > 1 else 0
        assert bytes_[0] <= ahead * most and bytes_[1] <= gradients * most


@pytest.mark.parametrize("ranks", few([2, 3], [2, 3, 4]))
def test_transient_slots_in_place(ranks):
    for forward, backward, bytes_ in run_ranks(_transient_slots, ranks, "c10d", True):
        assert forward == (1, 0) and backward[0] == 1
        assert bytes_[0] <= largest_shard_bytes(ranks)


@on_ranks(2)
def test_options(rank):
    # ignored_params stay plain, whole and unaveraged.
    model = make_model()
    ignored = {model.temperature, model.blocks[0].norm.weight}
    rtp_ext.fully_rotate(model, ignored_params=ignored)
    for name in ("temperature", "blocks.0.norm.weight"):
        assert not isinstance(model.get_parameter(name), DTensor), name
    batch_loss(model, rank, 0).backward()
    assert not isinstance(model.temperature.grad, DTensor)
    # One bfloat16 policy for all rotated modules: parameters and gradients stay float32.
    plain = make_model(torch.float32)
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    logits = model(make_batch(rank, 0)[0])
    reference = plain(make_batch(rank, 0)[0])
    logits.float().square().mean().backward()
    # Roundings of seven layers in a row, at most 2**-7 each where every layer keeps the magnitude.
    assert_same(logits, reference, 7 * 2.0**-7, "logits in bfloat16")
    assert differs(logits, reference, 1e-5), "control: computed in float32"
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name


class _Custom(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


@on_ranks(2)
def test_what_is_not_supported_is_left_alone_and_named(rank, ranks):
    """Subclasses that compute in their own way and max_norm embeddings are not rotated, and named in the log.

    Rows stay below max_norm here: above it every rank renormalises the rows of its own ids, as the warning says."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("rtp_ext").addHandler(handler)
    logging.getLogger("rtp_ext").setLevel(logging.INFO)
    model = nn.Sequential(nn.Embedding(7, 5, max_norm=100.0), _Custom(5, 5), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    plain = copy.deepcopy(model)
    rtp_ext.fully_rotate(model)
    assert type(model[1]).__mro__[1] is not rtp_ext.nn.RotatedLinear and isinstance(model[2], rtp_ext.nn.RotatedLinear)
    assert not isinstance(model[0], rtp_ext.nn.RotatedEmbedding)
    text = "\n".join(records)
    assert "max_norm" in text and "_Custom" in text, text

    def loss(module, other, step):
        ids = torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(10 * step + other))
        return module(ids).square().sum()

    train(model, lambda step: loss(model, rank, step), 3)
    train(plain, lambda step: sum(loss(plain, other, step) for other in range(ranks)) / ranks, 3)
    assert_same_model(model, plain, 1e-9)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.5)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.uniform_(module.bias)
    if isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight)
        nn.init.zeros_(module.bias)
    if isinstance(module, LanguageModel):
        nn.init.normal_(module.temperature)
    elif hasattr(module, "scale"):
        nn.init.normal_(module.scale)


@on_ranks(3)
def test_meta_device_and_init_weights(rank):
    """A model made on the meta device, converted, given storage and initialised equals the plain one."""
    plain = LanguageModel(tied=True)
    torch.manual_seed(7)
    for module in plain.modules():
        _initialise(module)
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = LanguageModel(tied=True)
        rtp_ext.fully_rotate(model)
        if device == "meta":
            with pytest.raises(ValueError, match="to_empty"):
                rtp_ext.init_weights(model, _initialise)
            model.to_empty(device="cpu")
        assert model.head.weight is model.embed.weight
        torch.manual_seed(7)
        rtp_ext.init_weights(model, _initialise)
        assert_same_model(model, plain, 0.0)
        ids = make_batch(rank, 0)[0]
        assert_same(model(ids), plain(ids), 1e-5, "output")


@on_ranks(2)
def test_wrong_calls_are_refused():
    model = rtp_ext.fully_rotate(make_model())
    with pytest.raises(ValueError, match=r"LanguageModel(.|\n)*(twice|already)"):
        rtp_ext.fully_rotate(model)
    assert_same_model(model, make_model(), 0.0)
    with pytest.raises(ValueError, match="Block that is a part of one that already was"):
        rtp_ext.fully_rotate(model.blocks[0])
    with pytest.raises(TypeError, match=r"nn\.Module|Module"):
        rtp_ext.fully_rotate(3)
    with pytest.raises(ValueError, match="sideways"):
        rtp_ext.fully_rotate(make_model(), route="sideways")
    with pytest.raises(TypeError):
        rtp_ext.fully_rotate(make_model(), rout="ring")
    with pytest.raises(ValueError, match=r"ring_of|rotate"):
        rtp_ext.ring_of(nn.Linear(2, 2))
