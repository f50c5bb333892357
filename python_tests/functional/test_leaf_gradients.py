"""Gradients reach the .grad of parameters as autograd's own nodes would bring them there."""

import copy
from collections.abc import Callable

import torch
from harness import on_ranks
from reference import assert_same, full, random
from torch import Tensor, nn

import rtp_ext


def _loss(model: nn.Module) -> Tensor:
    return model(random(3, 6, dtype=torch.float64, seed=1)).square().sum()


def _frozen_since(model: nn.Module) -> list[int]:
    loss = _loss(model)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    loss.backward()
    assert model[0].weight.grad is None and model[2].bias.grad is None, "a gradient of a frozen parameter"
    return []


def _tripled(model: nn.Module) -> list[int]:
    """Hooks of the nodes that accumulate gradients."""
    nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in model.parameters()]
    seen: list[int] = []
    hooks = [node.register_prehook(lambda gradients: (3 * gradients[0],)) for node in nodes]
    hooks += [node.register_hook(lambda _, gradients: seen.append(gradients[0] is not None)) for node in nodes]
    _loss(model).backward()
    for hook in hooks:
        hook.remove()
    assert sum(seen) == len(nodes), f"expected {len(nodes)} hooks with a gradient, got {sum(seen)}"
    return seen


@on_ranks(2)
def test_gradients_of_frozen_and_watched_parameters(ring, cases):
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5)).double()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
    backwards: list[Callable[[nn.Module], list[int]]] = [_frozen_since, _tripled]
    for backward in backwards:
        with cases.case(backward.__name__):
            for each in (model, plain):
                each.zero_grad()
                each.requires_grad_(True)
            assert backward(model) == backward(plain)
            for name, parameter in plain.named_parameters():
                mine = model.get_parameter(name).grad
                assert (mine is None) == (parameter.grad is None), name
                if parameter.grad is not None:
                    assert_same(full(mine), parameter.grad, 1e-10, name)
