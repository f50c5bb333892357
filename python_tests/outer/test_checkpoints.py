"""Checkpoints of one training run, saved by any of: replicas of rings, the same with ZeroOuter, one ring, fully_shard
and the plain model, and loaded by any other. Training goes on as in one process."""

import copy
from functools import partial
from itertools import product

import torch
import torch.distributed.checkpoint as dcp
from grids import few
from harness import Cases, run_ranks
from reference import assert_same, differs, full, wholes
from replica_models import EXACT, Tiny, adamw, all_losses, batch_loss, replicated, step_on
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rtp_ext
from rtp_ext.outer import ZeroOuter


def make(factor: float) -> Tiny:
    """Without a scalar, of which fully_shard wants none."""
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


def assert_same_state(model, optimizer, expected, reference, what):
    named, keys = list(expected.named_parameters()), ("exp_avg", "exp_avg_sq")
    for value, (name, other) in zip(wholes(model.parameters()), named, strict=True):
        assert_same(value, other, EXACT, f"{what}: {name}")
    moments = wholes(optimizer.state[parameter][key] for parameter in model.parameters() for key in keys)
    for value, ((name, other), key) in zip(moments, product(named, keys), strict=True):
        assert_same(value, reference.state[other][key], EXACT, f"{name} {key}")


def _matrix(rank, ranks, folder):
    cases = Cases()
    stages = []  # one process, after one step and after two
    plain = make(1.0)
    reference = adamw(plain)
    for step in range(2):
        step_on(plain, reference, [loss_of("plain", plain, rank, ranks, step)])
        twin = copy.deepcopy(plain)
        its = adamw(twin)
        its.load_state_dict(copy.deepcopy(reference.state_dict()))
        stages.append((twin, its))
    for kind, convert in KINDS.items():
        with cases.case(f"saved by {kind}"):
            model = convert(make(1.0))
            optimizer = adamw(model)
            step_on(model, optimizer, [loss_of(kind, model, rank, ranks, 0)])
            dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/{kind}")
    for place, (kind, convert) in enumerate(KINDS.items()):
        others = [*list(KINDS)[place + 1 :], *list(KINDS)[:place]]
        for source in few(others[:2], others):  # what is saved does not know who will load it
            with cases.case(f"{source} to {kind}"):
                model = convert(make(-0.5))
                optimizer = adamw(model)
                state = state_of(model, optimizer)
                assert differs(full(model.mix.weight), stages[0][0].mix.weight, EXACT), "control"
                dcp.load(state, checkpoint_id=f"{folder}/{source}")
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
                assert_same_state(model, optimizer, *stages[0], "loaded")
                step_on(model, optimizer, [loss_of(kind, model, rank, ranks, 1)])
                assert_same_state(model, optimizer, *stages[1], "a step later")
                assert differs(full(model.mix.weight), stages[0][0].mix.weight, EXACT), "control: a step moves it"
    cases.finish()


def test_every_kind_loads_what_any_other_has_saved(tmp_path):
    run_ranks(_matrix, 4, str(tmp_path), timeout=300.0)
