"""Methods of torch's FSDPModule on converted models: errors that name the alternative, and hasattr is False."""

import copy
import inspect
import pickle
from pathlib import Path

import pytest
import torch
from harness import on_ranks
from models import Block, make_batch, make_model
from reference import assert_same
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

import rtp_ext
from rtp_ext.convert.methods.fully_shard import INSTEAD, OPTIONS

ROOT = Path(__file__).resolve().parents[2]


def test_every_method_is_known():
    """A method that another torch has in addition is found here."""
    theirs = {name for name, value in vars(FSDPModule).items() if callable(value) and not name.startswith("_")}
    assert theirs >= {"unshard", "reshard", "set_gradient_divide_factor"}, "control"
    assert theirs <= INSTEAD.keys(), f"add to INSTEAD: {sorted(theirs - INSTEAD.keys())}"


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "migration.md").read_text()
    page = page.split("### Methods of FSDPModule")[1].split("\n## ")[0]
    rows = [f"| `{name}` | {text} |" for name, text in INSTEAD.items()]
    assert [row for row in rows if row not in page] == [], "docs/migration.md lacks rows"
    assert page.count("\n| `") == len(rows), "rows of nothing"


class _Own(nn.Module):
    """A module that has such names of its own, and looks up attributes in its own way."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.reshard = nn.Linear(3, 3)

    def unshard(self):
        return "mine"

    def forward(self, x):
        return self.reshard(self.inner(x))


class _Plain(nn.Module):
    """A root without parameters of its own, which its copies share something with."""

    def __init__(self):
        super().__init__()
        self.inner, self.shared = make_model(), object()

    def __getstate__(self):
        return {**self.__dict__, "shared": None}

    def __setstate__(self, state):
        super().__setstate__({**state, "shared": "anew"})

    def forward(self, ids):
        return self.inner(ids)


class _Looks(_Own):
    def __getattr__(self, name):
        return 5 if name == "five" else super().__getattr__(name)


def test_options_of_fully_shard_name_the_equivalent():
    """Each that fully_rotate does not have; other unknown options are Python's own TypeError."""
    stock = {*inspect.signature(fully_shard).parameters, *inspect.signature(FullyShardedDataParallel).parameters}
    others = stock - {*inspect.signature(rtp_ext.fully_rotate).parameters}
    assert "reshard_after_forward" in others and others <= OPTIONS.keys(), f"add to OPTIONS: {others - OPTIONS.keys()}"
    for function in (rtp_ext.fully_rotate, rtp_ext.explain):
        for name, text in OPTIONS.items():
            with pytest.raises(TypeError) as caught:
                function(nn.Linear(2, 2), **{name: None})
            assert str(caught.value) == f"{function.__name__}: {name} is an option of fully_shard or FSDP; {text}"
        with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
            function(nn.Linear(2, 2), speed=3)


@on_ranks(2)
def test_converted_models_answer(rank):
    plain = _Plain()
    model = copy.deepcopy(plain)
    with pytest.raises(AttributeError, match=r"^'_Plain' object has no attribute 'unshard'$"):
        model.unshard()  # control: not converted
    rtp_ext.fully_rotate(model.inner.blocks[0])
    rtp_ext.fully_rotate(model.inner)
    rtp_ext.fully_rotate(model)
    twin = copy.deepcopy(model)
    for each in (model, twin, model.inner, model.inner.blocks[0]):
        kind = type(each).__name__
        for name, text in INSTEAD.items():
            assert not hasattr(each, name)
            with pytest.raises(AttributeError) as caught:
                getattr(each, name)
            assert str(caught.value).startswith(
                f"'{kind}' object has no attribute '{name}': fully_rotate has converted"
            )
            assert str(caught.value).endswith(text), name
        with pytest.raises(AttributeError, match=f"^'{kind}' object has no attribute 'unknown'$"):
            _ = each.unknown
        with pytest.raises(ValueError, match="fully_shard: expected a plain module, got one that fully_rotate"):
            fully_shard(each)
        assert not isinstance(each, FSDPModule)
        with pytest.raises(TypeError, match=r"live ring. On every rank .*checkpoint.save\(model.*by torch.save"):
            pickle.dumps(each)
    shallow = copy.copy(model)
    assert type(shallow) is type(model) and shallow is not model and shallow.inner is model.inner
    assert isinstance(model, _Plain) and isinstance(model.inner.blocks[0], Block)
    assert type(twin) is type(model) and type(model).__qualname__ == "_Plain" and twin.shared == "anew"
    assert list(model.state_dict()) == list(plain.state_dict())
    ids = make_batch(rank, 0)[0]
    for each in (model, twin):
        assert_same(each(ids), plain(ids), 1e-10, "the same output")
    with pytest.raises(AttributeError):  # the missing attribute of the failing object
        _ = model.inner.blocks[0].up.set_unshard_in_backward
    for cls in (_Own, _Looks):
        own = rtp_ext.fully_rotate(cls())
        assert own.unshard() == "mine" and isinstance(own.reshard, nn.Linear)
        assert own(torch.ones(2, 3)).shape == (2, 3)
    assert own.five == 5 and type(own) is _Looks, "keeps its own way"
    # buffers, and later registrations
    model.register_buffer("late", torch.ones(2))
    model.reshard = nn.Linear(2, 2)
    assert torch.equal(model.late, torch.ones(2)) and isinstance(model.reshard, nn.Linear)
