"""The usual division of a model's parameters between Muon and AdamW."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rtp_ext.families.blocks import is_transposed_linear, vocabulary_heads
from rtp_ext.families.recognised import grouped_experts, is_experts
from rtp_ext.nn import RotatedExperts, RotatedLinearCrossEntropy
from rtp_ext.nn.grouped import RotatedGroupedExperts
from rtp_ext.nn.linear import RotatedTransposedLinear


def matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the hidden matrices of a model, for `Muon`, and all other parameters, for AdamW.

    Hidden matrices are the weights of linear layers (also those stored as [in, out]), the projections of
    nn.MultiheadAttention, and the stacked weights of experts. All others are the rest: embeddings, vocabulary heads,
    convolutions, norms, biases, and parameters of other modules. A vocabulary head is a layer that shares its weight
    with an embedding, the `get_output_embeddings()` of a model of the transformers package, a
    RotatedLinearCrossEntropy, or the last linear layer if its weight has the shape of an embedding's.

    Args:
        model: before or after `fully_rotate`.

    >>> hidden, others = rtp_ext.optim.matrices(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.LayerNorm(8)))
    >>> [tuple(p.shape) for p in hidden], len(others)
    ([(8, 8)], 4)

    Each parameter is in one list, once, in the order of `model.parameters()`. Frozen ones are included: optimizers pass
    over parameters without gradients. Frozen weights in blocks, which are bytes, are in the rest.
    """
    outside = {id(p) for module in _outside(model) for p in module.parameters(recurse=False)}
    hidden = {id(p) for module in model.modules() for p in _hidden(module)} - outside
    every = list(model.parameters())
    return [p for p in every if id(p) in hidden], [p for p in every if id(p) not in hidden]


def _hidden(module: nn.Module) -> Iterator[nn.Parameter]:
    linear = isinstance(module, (nn.Linear, RotatedTransposedLinear)) or is_transposed_linear(module)
    rotated = isinstance(module, (RotatedExperts, RotatedGroupedExperts))
    experts = rotated or (is_experts(module) and RotatedExperts.refusal(module) is None)
    experts = experts or (grouped_experts(module) is not None and RotatedGroupedExperts.refusal(module) is None)
    for name, parameter in module.named_parameters(recurse=False):
        attention = isinstance(module, nn.MultiheadAttention) and name.endswith("proj_weight")
        if not parameter.is_floating_point():
            continue
        if (parameter.dim() == 2 and (linear or attention)) or (parameter.dim() == 3 and experts):
            yield parameter


def _outside(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules whose parameters are no hidden matrices: embeddings and vocabulary heads."""
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    yield from tables
    for module in model.modules():
        if isinstance(module, RotatedLinearCrossEntropy):
            yield module
    yield from vocabulary_heads(model.modules())
    last = next((module for module in reversed(list(model.modules())) if isinstance(module, nn.Linear)), None)
    if last is not None and any(last.weight.shape == table.weight.shape for table in tables):
        yield last
