"""Hooks that parameters have before a conversion: those after accumulation stay, those of tensors are refused."""

import copy

import pytest
import torch
from harness import on_ranks
from models import batch_loss, make_model, mean_loss
from test_convert import assert_same_model
from torch import nn
from torch.distributed.tensor import DTensor

import rtp_ext

EXACT = 1e-9


def halve(parameter: torch.Tensor) -> None:
    parameter.grad = parameter.grad * 0.5


@on_ranks(2)
def test_hooks_of_parameters(rank, ranks, cases):
    with cases.case("after accumulation"):
        plain = make_model()
        model = copy.deepcopy(plain)
        seen = []
        for each in (plain, model):
            for parameter in each.parameters():
                parameter.register_post_accumulate_grad_hook(halve)
        handle = model.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(isinstance(p, DTensor)))
        model.blocks[0].norm.bias.requires_grad_(False)
        rtp_ext.fully_rotate(model, timeout=30.0)
        model.blocks[0].norm.bias.requires_grad_(True)
        for each, loss in ((model, lambda: batch_loss(model, rank, 0)), (plain, lambda: mean_loss(plain, ranks, 0))):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            loss().backward()
            optimizer.step()
        assert_same_model(model, plain, EXACT)
        assert seen == [True], "it gets the shard"
        handle.remove()
        batch_loss(model, rank, 1).backward()
        assert seen == [True], "a handle from before the conversion removes it"
        rtp_ext.ring_of(model).close()
    for name in ("norm.weight", "blocks.0.norm.bias", "scale"):
        for where in range(ranks):
            with cases.case(f"a tensor hook of {name} on rank {where}"):
                model = make_model()
                owner, _, key = next(n for n, _ in model.named_parameters() if n.endswith(name)).rpartition(".")
                if rank == where:
                    model.get_submodule(owner)._parameters[key].register_hook(lambda g: 2 * g)
                with pytest.raises(ValueError, match=r"without hooks of register_hook|refused") as caught:
                    rtp_ext.fully_rotate(model, timeout=30.0)
                if rank == where:
                    assert f"{owner + '.' if owner else ''}{key} of a " in str(caught.value)
    with cases.case("hooks of rotated layers too, but of ignored parameters none is refused"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        model[0].weight.register_hook(lambda g: 2 * g)
        with pytest.raises(ValueError, match=r"0.weight of a Linear: .* got 1 \(.*lambda"):
            rtp_ext.fully_rotate(model, timeout=30.0)
        ring = rtp_ext.ring_of(rtp_ext.fully_rotate(model, timeout=30.0, ignored_params=model[0].parameters()))
        ring.close()
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        handle = model[0].weight.register_hook(lambda g: 2 * g)
        handle.remove()
        rtp_ext.ring_of(rtp_ext.fully_rotate(model, timeout=30.0)).close()
    with cases.case("the hook that averages what joined later"):
        model = rtp_ext.fully_rotate(nn.Sequential(nn.Linear(4, 4)), timeout=30.0)
        model.append(nn.LayerNorm(4))
        model(torch.ones(2, 4)).sum().backward()
        part = nn.Sequential(nn.LayerNorm(4))
        part[0]._parameters.update(model[1]._parameters)
        rtp_ext.fully_rotate(part, mesh=rtp_ext.ring_of(model))
        rtp_ext.ring_of(model).close()
