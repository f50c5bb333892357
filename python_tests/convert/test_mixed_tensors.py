"""Plain tensors together with shards: state dicts of the plain model, DistributedDataParallel, the stock trainers."""

import copy
import logging
import os

import pytest
import torch
from harness import Cases, on_ranks, run_ranks
from models import LanguageModel, batch_loss, make_model
from reference import assert_same, whole_parameters
from replica_models import Tiny, replicated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import rtp_ext
from rtp_ext.outer import AllReduce, ZeroOuter


def _other(plain):
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-2.0).add_(0.25)
    return other


def _expect(model, plain, what):
    for name, found in whole_parameters(model).items():
        assert_same(found, plain.get_parameter(name).detach(), 0.0, f"{what}: {name}", scale=1.0)


def _loads(rank, ranks, shape, outer):
    cases = Cases()
    plain = Tiny() if outer else make_model()
    model = replicated(shape, outer=outer()) if outer else rtp_ext.fully_rotate(make_model())
    other = _other(plain)
    before = dict(model.named_parameters())
    with cases.case("whole"):
        model.load_state_dict(other.state_dict())
        _expect(model, other, "whole")
        assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    with cases.case("a part, other dtype"):
        part, its = ("mlp", "0") if outer else ("blocks.0", "up")
        third = _other(other)
        state = {name: value.float() for name, value in third.get_submodule(part).state_dict().items()}
        model.get_submodule(part).load_state_dict(state)
        own = whole_parameters(model.get_submodule(part).get_submodule(its))["weight"]
        expected = third.get_submodule(part).get_submodule(its).weight.detach()
        assert_same(own, expected.float().to(own.dtype), 0.0, "part", scale=1.0)
    with cases.case("trains on"):
        model.load_state_dict(other.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        _expect(model, other, "no gradient")
    with cases.case("other sizes"):
        name, value = "embed.weight", other.embed.weight.detach()
        with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
            model.load_state_dict({**other.state_dict(), name: value.new_zeros(*value.shape, 1)})
    with cases.case("names"):
        state = other.state_dict()
        del state[name]
        with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
            model.load_state_dict(state)
        assert name in model.load_state_dict(state, strict=False).missing_keys
    cases.finish()


@pytest.mark.parametrize(
    ("shape", "outer"), [((2,), None), ((3,), None), ((2, 2), AllReduce), ((2, 2), ZeroOuter)], ids=str
)
def test_plain_state_dicts_are_cut(shape, outer):
    run_ranks(_loads, torch.Size(shape).numel(), shape, outer)


@on_ranks(2)
def test_managers_of_plain_parameters_are_refused_with_what_to_take_instead(rank, ranks):
    ring = init_device_mesh("cpu", (ranks,))
    for model in (LanguageModel(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), nn.Linear(4, 2)):
        rtp_ext.fully_rotate(model, mesh=ring)
        for converted in (model, copy.deepcopy(model)):
            with pytest.raises(ValueError, match=r"fully_rotate has converted.* RotationTrainer instead of Trainer"):
                DistributedDataParallel(converted)
    model = rtp_ext.fully_rotate(LanguageModel(), mesh=ring)
    batch_loss(model, rank, 0).backward()  # a refusal leaves the model as it was
    DistributedDataParallel(nn.Linear(4, 2))

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == ranks
    with pytest.raises(ValueError, match="RotationAccelerator instead of Accelerator"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


class _Rounded(nn.Linear):
    """A linear layer with its own forward, like float8 training layers."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.round(decimals=2), self.bias)


@on_ranks(2)
def test_layers_that_look_like_others_but_do_not_rotate_are_named(ranks):
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("rtp_ext").addHandler(handler)
    model = nn.Sequential(_Rounded(3, 4), nn.LayerNorm(4), _Rounded(4, 4), nn.Linear(4, 2))
    rtp_ext.fully_rotate(model, mesh=init_device_mesh("cpu", (ranks,)))
    assert len(found) == 1, found
    assert "2 x _Rounded: gathered whole while in use, and not rotated" in found[0] and "nn.Linear" in found[0], found
