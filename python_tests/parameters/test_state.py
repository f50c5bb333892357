"""State of converted models: made on the meta device, saved, loaded at another number of ranks, gathered."""

import copy
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from grids import few
from harness import Cases, on_ranks, run_ranks
from live_bytes import LiveBytes
from models import VOCABULARY, batch_loss, make_model, mean_loss
from reference import (
    TOLERANCE,
    adamw,
    assert_same,
    chunk,
    differs,
    full,
    local,
    one_bit_off,
    training_state,
    unequal,
)
from shared.models import GPT
from test_convert import _initialise, assert_same_model
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import rtp_ext
from rtp_ext.parameters import sharding

# The local shards themselves travel over c10d only, and then have storage for the largest shard.
COPIES, IN_PLACE = (False, "shm"), (True, "c10d")
EXACT = 1e-10


def make_gpt(hidden: int = 46) -> nn.Module:
    """The GPT of the benchmarks, tied: with norms and biases, and no scalars."""
    torch.manual_seed(5)
    return GPT(seq=13, layers=1, hidden=hidden, heads=2).double()


def make_tied() -> nn.Module:
    return make_model(tied=True)


MODELS = [(make_tied, COPIES), (make_gpt, IN_PLACE), (make_model, IN_PLACE)]


def rotated(model: nn.Module, variant: tuple[bool, str]) -> nn.Module:
    in_place, transport = variant
    return rtp_ext.fully_rotate(model, in_place=in_place, transport=transport, timeout=30.0)


def empty_rotated(make, variant: tuple[bool, str]) -> nn.Module:
    """Made on the meta device, converted, and given storage filled with values that it must not keep."""
    with torch.device("meta"):
        model = make()
    model = rotated(model, variant).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local(tensor).fill_(float("nan") if tensor.is_floating_point() else 1)
    return model


SEQUENCES = 12  # of every step, whatever the number of ranks, which divides it


def share_loss(model: nn.Module, step: int, rank: int = 0, ranks: int = 1) -> torch.Tensor:
    """The loss of a rank's share of the step's sequences; the mean over the ranks is the loss of all of them."""
    generator = torch.Generator().manual_seed(step)
    ids = chunk(torch.randint(VOCABULARY, (SEQUENCES, 8), generator=generator), ranks, rank)
    if hasattr(model, "tokens"):
        return model(ids[:, :-1], ids[:, 1:])
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train_shares(model, optimizer, steps: range, rank: int = 0, ranks: int = 1) -> torch.Tensor:
    """The losses of all sequences, by step."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = share_loss(model, step, rank, ranks)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(losses)
    return losses / ranks


def own_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module._parameters.values() if p is not None)


BLOCK = 4096  # bytes that travel at once while a parameter is gathered; 1 MiB outside of these tests
MESSAGES = 512  # bytes that the ranks exchange while a ring is made
PLANS = 16 * 1024  # bytes that they exchange while torch.distributed.checkpoint plans a load


def most_bytes(model: nn.Module, plain: nn.Module) -> int:
    """This rank's share, one module's parameters in full, and two blocks."""
    share = sum(local(parameter).nbytes for parameter in model.parameters())
    return share + max(own_bytes(module) for module in plain.modules()) + 2 * BLOCK + MESSAGES


def initialise(module: nn.Module) -> None:
    """As GPT-2 does: a block sets its projection, which is a module of its own, once more."""
    _initialise(module)
    if hasattr(module, "down"):
        nn.init.normal_(module.down.weight, std=0.01)
        nn.init.trunc_normal_(module.norm.weight.data if hasattr(module, "norm") else module.mlp_norm.weight.data)


def _made_on_meta(rank, ranks):
    cases = Cases()
    for make, variant in MODELS:
        with cases.case(f"{make.__name__} {variant}"):
            with LiveBytes() as whole:
                plain = make()
            torch.manual_seed(7)
            for module in plain.modules():
                initialise(module)
            with LiveBytes() as live:
                model = empty_rotated(make, variant)
                torch.manual_seed(7)
                rtp_ext.init_weights(model, initialise)
            assert_same_model(model, plain, 0.0)
            assert differs(full(model.blocks[0].down.weight), make().blocks[0].down.weight, 0.1), "control"
            assert_same(share_loss(model, 0), share_loss(plain, 0), EXACT, "loss")
            most = most_bytes(model, plain)
            assert live.peak <= most, f"{live.peak} bytes, expected at most {most}"
            assert ranks == 1 or make is not make_gpt or whole.peak > most, f"control: the whole model, {whole.peak}"
        rtp_ext.ring_of(model).close()
    cases.finish()


def _full_state(rank, ranks):
    cases = Cases()
    for make, variant in MODELS:
        with cases.case(f"{make.__name__} {variant}"):
            plain = make()
            names = list(plain.state_dict())
            model = rotated(copy.deepcopy(plain), variant)
            share_loss(model, 0).backward()  # in place: from now on shards have room
            model.zero_grad()
            assert list(model.state_dict()) == names
            for offload in (False, True):
                options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
                whole = get_model_state_dict(model, options=options)
                assert set(whole) == (set(names) if rank == 0 or not offload else set())
                for name, value in whole.items():
                    assert_same(value, plain.state_dict()[name], 0.0, name)
            torch.manual_seed(8)
            other = copy.deepcopy(plain)
            for module in other.modules():
                initialise(module)
            for broadcast, source in product((False, True), (other, plain)):
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
                given = copy.deepcopy(source.state_dict()) if rank == 0 or not broadcast else {}
                set_model_state_dict(model, given, options=options)
                assert_same_model(model, source, 0.0)
                assert differs(full(model.norm.weight), (other if source is plain else plain).norm.weight, EXACT)
            assert_same(share_loss(model, 0), share_loss(plain, 0), EXACT, "loss")
        rtp_ext.ring_of(model).close()
    cases.finish()


@on_ranks(few([3], [1, 2, 3, 4]))
@mock.patch.object(sharding, "_BLOCK", BLOCK)
def test_made_on_meta_and_full_state(rank, ranks):
    """Runs in one start, so that DTensor has these shapes in its caches."""
    _made_on_meta(rank, ranks)
    _full_state(rank, ranks)


BEFORE, AFTER = range(0, 3), range(3, 6)


def saved_as(folder: str, make, variant: tuple[bool, str]) -> str:
    return f"{folder}/{make.__name__}-{variant[1]}"


def _save(rank, ranks, folder):
    for make, variant in MODELS:
        model = rotated(make(), variant)
        optimizer = adamw(model.parameters(), lr=0.01, stock=True)
        train_shares(model, optimizer, BEFORE, rank, ranks)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(state, checkpoint_id=saved_as(folder, make, variant))
        whole = training_state(model, optimizer)
        if rank == 0:
            torch.save(whole, f"{saved_as(folder, make, variant)}.pt")
        rtp_ext.ring_of(model).close()


def _resume(rank, ranks, folder):
    cases = Cases()
    for make, variant in MODELS:
        with cases.case(f"{make.__name__} {variant}"):
            plain = make()
            reference = adamw(plain.parameters(), lr=0.01, stock=True)
            train_shares(plain, reference, BEFORE)
            with LiveBytes() as live:
                model = empty_rotated(make, variant)
                state = {"model": get_model_state_dict(model)}
                dcp.load(state, checkpoint_id=saved_as(folder, make, variant))
                set_model_state_dict(model, state["model"])
            assert_same_model(model, plain, EXACT)
            optimizer = adamw(model.parameters(), lr=0.01, stock=True)
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=saved_as(folder, make, variant))
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            assert_same_model(model, plain, EXACT)
            saved, found = torch.load(f"{saved_as(folder, make, variant)}.pt"), training_state(model, optimizer)
            assert unequal(found, saved) == [], "bit by bit what two ranks have saved"
            assert all(len(unequal(each, saved)) == 1 for each in one_bit_off(found)), "control: one bit is found"
            forgetful = copy.deepcopy(plain)
            ours = train_shares(model, optimizer, AFTER, rank, ranks)
            theirs = train_shares(plain, reference, AFTER)
            assert_same(ours, theirs, EXACT, "losses")
            assert_same_model(model, plain, EXACT)
            without = train_shares(forgetful, adamw(forgetful.parameters(), lr=0.01, stock=True), AFTER)
            assert differs(without, theirs, EXACT), "control: the optimizer's state is lost"
            most = most_bytes(model, plain) + PLANS
            coordinates = rank == 0 and ranks > 1  # and holds the plans of all ranks until Python's garbage collection
            assert coordinates or live.peak <= most, f"{live.peak} bytes, expected at most {most}"
        rtp_ext.ring_of(model).close()
    cases.finish()


def test_saved_at_two_ranks_resumes_at_others(tmp_path):
    run_ranks(_save, 2, str(tmp_path))
    for ranks in few((1, 3), (1, 3, 4)):
        run_ranks(_resume, ranks, str(tmp_path))


@on_ranks(3)
def test_clipped_norms(rank, ranks, cases):
    for variant, foreach, kind in product((COPIES, IN_PLACE), (True, False), (2.0, float("inf"))):
        plain = make_model()
        model = rotated(copy.deepcopy(plain), variant)
        batch_loss(model, rank, 0).backward()
        mean_loss(plain, ranks, 0).backward()
        unclipped = plain.head.weight.grad.clone()
        ours, theirs = (
            nn.utils.clip_grad_norm_(each.parameters(), 0.01, norm_type=kind, foreach=foreach)
            for each in (model, plain)
        )
        with cases.case(f"{variant} foreach={foreach} norm {kind}"):
            assert_same(full(ours), theirs, EXACT, "norm")
            assert_same_model(model, plain, EXACT, gradients=True)
            assert differs(full(model.head.weight.grad), unclipped, 0.5), "control: not clipped"
        rtp_ext.ring_of(model).close()


# Losses are multiplied by BOOST and the learning rate is divided by it, so that gradients times OVERFLOWS are infinite.
BOOST = 2.0**20
OVERFLOWS = 2.0**126


def _scaled_steps(model, loss, scale: float) -> list[float]:
    """Four steps with a gradient scaler; the scale after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / BOOST, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-60, growth_interval=2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss(step) * BOOST).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@on_ranks(3)
def test_gradient_scaler(rank, ranks, cases):
    for variant, scale in product((COPIES, IN_PLACE), (2.0**16, OVERFLOWS)):
        with cases.case(f"{variant} scale {scale}"):
            plain = make_gpt().float()
            model = rotated(copy.deepcopy(plain), variant)
            ours = _scaled_steps(model, lambda step, model=model: share_loss(model, step, rank, ranks), scale)
            theirs = _scaled_steps(plain, lambda step, plain=plain: share_loss(plain, step), scale)
            assert ours == theirs and (ours[0] < scale) == (scale == OVERFLOWS), f"{ours} {theirs}"
            assert_same_model(model, plain, TOLERANCE[torch.float32])
            assert differs(full(model.norm.weight), make_gpt().norm.weight, 1e-4), "control: nothing was trained"
        rtp_ext.ring_of(model).close()
    # None: the loss itself; make_model has a scalar parameter, which comes first and is whole on every rank
    spoiled = ((make_gpt, "head.weight", 0), (make_gpt, "norm.weight", ranks - 1), (make_gpt, None, 1))
    for variant, (make, name, where) in product((COPIES, IN_PLACE), (*spoiled, (make_model, "head.weight", ranks - 1))):
        with cases.case(f"{variant} {make.__name__} infinite {name} on rank {where}"):
            model = rotated(make().float(), variant)
            optimizer = adamw(model.parameters(), lr=0.01, stock=True)
            scaler = torch.amp.GradScaler("cpu")
            for infinite in (True, False):
                here = infinite and rank == where
                before = [local(parameter).clone() for parameter in model.parameters()]
                optimizer.zero_grad()
                loss = share_loss(model, 0, rank, ranks) if make is make_gpt else batch_loss(model, rank, 0)
                scaler.scale(loss * float("inf") if here and name is None else loss).backward()
                if here and name is not None:
                    local(model.get_parameter(name).grad).view(-1)[0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
                assert scaler.get_scale() == 2.0**15, f"a scale of {scaler.get_scale()}"
                moved = [not torch.equal(b, local(p)) for b, p in zip(before, model.parameters(), strict=True)]
                assert not any(moved) if infinite else any(moved), f"infinite={infinite}: {moved}"
        rtp_ext.ring_of(model).close()


@on_ranks([2, 3])
def test_files_of_other_ranks(rank, ranks, tmp_path):
    """The saved shards of one rank do not fit another rank, even if the shapes do."""
    folder = str(tmp_path)
    model = rotated(make_model(), COPIES)
    optimizer = adamw(model.parameters(), lr=0.01, stock=True)
    batch_loss(model, rank, 0).backward()
    optimizer.step()
    torch.save((model.state_dict(), optimizer.state_dict()), Path(folder) / f"{rank}.pt")
    dist.barrier()
    for origin in range(ranks):
        weights, state = torch.load(Path(folder) / f"{origin}.pt", weights_only=False)
        before = [local(parameter).clone() for parameter in model.parameters()]
        optimizer.load_state_dict(state)
        if origin == rank:
            model.load_state_dict(weights)
            optimizer.step()
            continue
        with pytest.raises(ValueError, match=r"load_state_dict of .*every rank has loaded what one rank saved"):
            model.load_state_dict(weights)
        with pytest.raises(ValueError, match=r"AdamW: state .*every rank has loaded what one rank saved"):
            optimizer.step()
        same = [torch.equal(b, local(p)) for b, p in zip(before, model.parameters(), strict=True)]
        assert all(same), "what is refused changes nothing"
    rtp_ext.ring_of(model).close()
