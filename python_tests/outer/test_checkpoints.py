"""Checkpoints of one training run, saved by any of: replicas of rings, the same with ZeroOuter, one ring, fully_shard
and the plain model, and loaded by any other: bitwise equal. Training continues as in one process."""

from functools import partial

import torch
import torch.distributed.checkpoint as dcp
from grids import few
from harness import on_ranks
from reference import assert_same, differs, full, one_bit_off, training_state, unequal
from replica_models import EXACT, Tiny, adamw, all_losses, batch_loss, replicated, step_on
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rtp_ext
from rtp_ext.outer import ZeroOuter


def make(factor: float) -> Tiny:
    """Without a scalar, since fully_shard refuses scalars."""
    model = Tiny()
    model.temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


KINDS = {
    "replicas": lambda model: replicated((2, 2), model=model),
    "ZeroOuter": lambda model: replicated((2, 2), model=model, outer=ZeroOuter()),
    "ring": lambda model: rtp_ext.fully_rotate(model, timeout=30.0),
    "fully_shard": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (4,))),
    "plain": lambda model: model,
}


def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def loss_of(kind, model, rank, ranks, step):
    """This rank's own batch; all of them for the plain model."""
    if kind == "plain":
        return partial(all_losses, model, ranks, step, 1 / ranks)
    return partial(batch_loss, model, rank, step)


def assert_near(found, expected, what):
    assert list(found) == list(expected)
    for name, value in found.items():
        assert_same(value, expected[name], EXACT, f"{what}: {name}")


def loaded(convert, checkpoint):
    """A model that had other numbers before, and its optimizer."""
    model = convert(make(-0.5))
    optimizer = adamw(model)
    state = state_of(model, optimizer)
    before = full(model.mix.weight).clone()
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert differs(full(model.mix.weight), before, EXACT), "control: nothing was loaded"
    return model, optimizer


@on_ranks(4, timeout=300.0)
def test_every_kind_loads_what_any_other_has_saved(rank, ranks, cases, tmp_path):
    folder = str(tmp_path)
    stages = []  # one process, after one step and after two
    plain = make(1.0)
    reference = adamw(plain)
    for step in range(2):
        step_on(plain, reference, [loss_of("plain", plain, rank, ranks, step)])
        stages.append(training_state(plain, reference))
    saved = {}
    for kind, convert in KINDS.items():
        with cases.case(f"saved by {kind}"):
            model = convert(make(1.0))
            optimizer = adamw(model)
            step_on(model, optimizer, [loss_of(kind, model, rank, ranks, 0)])
            dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/{kind}")
            saved[kind] = training_state(model, optimizer)
            assert_near(saved[kind], stages[0], "saved")
            changed = [unequal(each, saved[kind]) for each in one_bit_off(saved[kind])]
            assert changed == [[name] for name in saved[kind]], f"control: one bit is found, and where: {changed}"
    for place, (kind, convert) in enumerate(KINDS.items()):
        others = [*list(KINDS)[place + 1 :], *list(KINDS)[:place]]
        for source in few(others[:1], others):  # the saved files do not depend on the loading program
            with cases.case(f"{source} to {kind}"):
                model, optimizer = loaded(convert, f"{folder}/{source}")
                assert unequal(training_state(model, optimizer), saved[source]) == []
                step_on(model, optimizer, [loss_of(kind, model, rank, ranks, 1)])
                after = training_state(model, optimizer)
                assert_near(after, stages[1], "a step later")
                assert len(unequal(after, saved[source])) == len(after), "control: a step moves all"
    # Each kind loads the state of the one before and saves it again, back to the first.
    trip = [*list(KINDS)[1:], next(iter(KINDS))]
    at = f"{folder}/{trip[-1]}"
    for kind in trip:
        with cases.case(f"on to {kind}"):
            model, optimizer = loaded(KINDS[kind], at)
            assert unequal(training_state(model, optimizer), saved[trip[-1]]) == []
            at = f"{folder}/trip to {kind}"
            if kind != trip[-1]:
                dcp.save(state_of(model, optimizer), checkpoint_id=at)
