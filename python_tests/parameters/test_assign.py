"""load_state_dict(assign=True): new parameters take the place of those that were converted."""

import copy
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from grids import few
from harness import on_ranks
from models import batch_loss, make_model, mean_loss, train
from reference import assert_same, differs, full
from test_convert import assert_same_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard

import rtp_ext

EXACT = 1e-9
TIED = (("embed", "head"), ("norm", "blocks.1.norm"))  # a table that rotates, a norm that is gathered


def make_tied(scale: float = 1.0) -> nn.Module:
    model = make_model(tied=True)
    model.blocks[1].norm.weight = model.norm.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.blocks[0].up.weight.requires_grad_(False)
    return model


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = nn.Parameter(torch.ones(5, 3))


def rotated(model: nn.Module, in_place: bool = False) -> nn.Module:
    return rtp_ext.fully_rotate(model, in_place=in_place, transport="c10d" if in_place else "auto", timeout=30.0)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = make_tied()
    return rotated(model)


def check_tied(model: nn.Module) -> None:
    for one, other in TIED:
        assert model.get_submodule(one).weight is model.get_submodule(other).weight, f"{one} and {other} are untied"
    assert sorted(name for name, _ in model.named_parameters()) == sorted(
        name for name, _ in make_tied().named_parameters()
    )
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert not model.blocks[0].up.weight.requires_grad and model.head.weight.requires_grad


def check_trains(model: nn.Module, plain: nn.Module, rank: int, ranks: int) -> None:
    plain = copy.deepcopy(plain)
    train(model, lambda step: batch_loss(model, rank, step), 2)
    train(plain, lambda step: mean_loss(plain, ranks, step), 2)
    assert_same_model(model, plain, EXACT)
    check_tied(model)


def loads(other: nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Returns complete state dicts of a converted model, by their kind."""

    def copies() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in other.state_dict().items()}

    yield "as saved", copy.deepcopy(other.state_dict())
    yield "a copy for each name", copies()
    for index in (0, 1):
        left_out = [f"{pair[index]}.weight" for pair in TIED]
        yield f"without {left_out}", {name: tensor for name, tensor in copies().items() if name not in left_out}
    yield "parameters", {name: nn.Parameter(tensor) for name, tensor in copies().items()}
    yield "whole", copy.deepcopy(make_tied(0.9).state_dict())


@on_ranks(few([3], [2, 3]))
def test_tied_parameters_stay_tied(rank, ranks, cases):
    plain = make_tied(0.9)
    other = rotated(copy.deepcopy(plain))
    for meta in (True, False):
        for what, state in loads(other):
            with cases.case(f"{what}, meta={meta}"):
                model = on_meta() if meta else rotated(make_tied(), in_place=True)
                if not meta:  # from now on shards have room
                    batch_loss(model, rank, 0).backward()
                    model.zero_grad()
                model.load_state_dict(state, assign=True, strict="without" not in what)
                check_tied(model)
                check_trains(model, plain, rank, ranks)
            rtp_ext.ring_of(model).close()
    with cases.case("whole tensors for a model on meta"):
        model = on_meta()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, plain.state_dict() if rank == 0 else {}, options=options)
        check_tied(model)
        check_trains(model, plain, rank, ranks)
    rtp_ext.ring_of(model).close()
    for assign, made_there in product((True, False), repeat=2):
        with cases.case(f"in inference mode, assign={assign}, tensors made there: {made_there}"):
            model = rotated(make_tied())
            with torch.inference_mode():
                state = {name: tensor.clone() for name, tensor in plain.state_dict().items()} if made_there else None
                model.load_state_dict(state or plain.state_dict(), assign=assign)
            assert not any(parameter.is_inference() for parameter in model.parameters())
            check_trains(model, plain, rank, ranks)
        rtp_ext.ring_of(model).close()
    with cases.case("swapped tensors"):
        model = rotated(make_tied())
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.load_state_dict(other.state_dict(), assign=True)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        check_tied(model)
        check_trains(model, plain, rank, ranks)


@on_ranks(few([3], [2, 3]))
def test_parts_copies_and_what_does_not_fit(rank, ranks, cases):
    plain, new = make_tied(), make_tied(0.9)
    other = rotated(copy.deepcopy(new))
    for pair in TIED:
        for name, partner in (pair, pair[::-1]):
            with cases.case(f"{name} alone"):
                model, expected = rotated(copy.deepcopy(plain)), copy.deepcopy(plain)
                part, state = model.get_submodule(name), copy.deepcopy(other.get_submodule(name).state_dict())
                part.load_state_dict(state, assign=True)
                expected.get_submodule(name).load_state_dict(new.get_submodule(name).state_dict())
                assert_same(full(model.get_submodule(partner).weight), new.get_submodule(name).weight, 0.0, partner)
                check_trains(model, expected, rank, ranks)
            rtp_ext.ring_of(model).close()
    with cases.case("names that differ"):  # as in a load that copies, the last one counts
        model, expected = rotated(copy.deepcopy(plain)), copy.deepcopy(plain)
        state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        whole = copy.deepcopy(new.state_dict())
        whole["head.weight"] = 2 * whole["head.weight"]
        state["head.weight"] = 2 * state["head.weight"]
        model.load_state_dict(state, assign=True)
        expected.load_state_dict(whole)
        assert differs(expected.embed.weight, new.embed.weight, 0.1), "control: the copying load"
        check_trains(model, expected, rank, ranks)
    with cases.case("a copy of the model"):
        twin = copy.deepcopy(model)
        before = model.head.weight
        twin.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
        assert model.head.weight is before
        check_tied(model)
        check_trains(twin, new, rank, ranks)
        part = copy.deepcopy(model.head)  # its partner was not copied
        part.load_state_dict(copy.deepcopy(other.head.state_dict()), assign=True)
        assert model.head.weight is model.embed.weight is before
    with cases.case("untied on purpose"):
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
        assert model.head.weight is not model.embed.weight and model.norm.weight is model.blocks[1].norm.weight
    with cases.case("two names in one module"):
        twice = rotated(TwoNames())
        twice.load_state_dict({"one": torch.full((5, 3), 2.0), "other": torch.full((5, 3), 3.0)}, assign=True)
        assert twice._parameters["one"] is twice._parameters["other"], "untied"
        assert_same(full(twice.one), torch.full((5, 3), 3.0), 0.0, "the last one counts")
    with cases.case("what does not fit"):
        before = dict(model.named_parameters())
        across = other.blocks[0].up.weight.detach().redistribute(placements=[Shard(1)])
        with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight: expected .*got a DTensor \(Shard\(dim=1\),\)"):
            model.load_state_dict({"blocks.0.up.weight": across}, assign=True, strict=False)
        after = dict(model.named_parameters())
        assert all(after[name] is parameter for name, parameter in before.items()), "nothing has been replaced"
