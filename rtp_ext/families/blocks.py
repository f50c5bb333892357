"""Recognises linear layers, MLPs, experts and layers with a shared input in models of torch and transformers.

Modules of transformers are recognised by what they compute, or by what the source of their forward says, never by name.
All others are converted layer by layer. The transformers package is never imported here: a model of it has imported it.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rtp_ext.families.float8_layers import is_in_8_bits
from rtp_ext.families.recognised import computes_mlp, is_of_package
from rtp_ext.families.same_forward import LIBRARIES as ACTIVATION_LIBRARIES
from rtp_ext.families.same_forward import activation_of, has_same_forward
from rtp_ext.families.sources import called_with_one_input, loss_follows_head
from rtp_ext.functional.mlp import ACTIVATIONS
from rtp_ext.words import Activation

_TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def is_transposed_linear(module: Any) -> bool:
    """Returns whether a module is transformers' Conv1D, a linear layer with a weight [in_features, out_features]."""
    package = sys.modules.get("transformers.pytorch_utils")
    return package is not None and type(module) is package.Conv1D and has_same_forward(module, package.Conv1D)


def is_linear(module: Any) -> bool:
    """Returns whether a module is a linear layer whose only parameters are its weight and bias."""
    known = has_same_forward(module, nn.Linear) or (isinstance(module, nn.Module) and is_transposed_linear(module))
    return known and module._parameters.keys() <= {"weight", "bias"}


@dataclass(frozen=True)
class MLPSpec:
    """Paths of the layers of an MLP block, relative to the block, and the name of its activation in `rotated_mlp`.

    between: paths of the activation and of other attributes, possibly modules, that a bundle does not call.
    """

    up: str
    down: str
    activation: Activation
    gate: str | None = None
    between: tuple[str, ...] = ()

    @property
    def paths(self) -> list[str]:
        return [path for path in (self.gate, self.up, self.down) if path is not None]


@dataclass(frozen=True)
class MLPBlock:
    """An MLP block that can become a bundle.

    kind: the computation of its forward besides the MLP: `forward` (none), `dropout` (at the end), `bert` (a residual
    and a norm at the end), `transformer` (a layer of torch, with dropout between the layers and at the end).
    """

    kind: str
    spec: MLPSpec


def mlp_block(module: nn.Module) -> MLPBlock | None:
    """Returns the MLP of a block of plain linear layers with a supported activation, or None: of torch's own layers,
    and of modules of the transformers package that compute an MLP, whatever their names."""
    if "forward" in module.__dict__:  # replaced on the instance
        return None
    if type(module) is nn.Sequential:
        found: Any = _sequential(module)
    elif type(module) in _TORCH_LAYERS:
        found = ("transformer", "linear1", "linear2", "activation")
    else:
        return _recognised(module) if is_of_package(module) else None
    if found is None:
        return None
    kind, up, down, activation_path = found
    layers = [module.get_submodule(path) for path in (up, down)]
    activation = activation_of(getattr(module, activation_path, None), False)
    if activation is None or not _are_layers(layers):
        return None
    between = (activation_path, "dropout") if kind == "transformer" else (activation_path,)
    return MLPBlock(kind, MLPSpec(up, down, activation, None, between))


def _are_layers(layers: Sequence[nn.Module]) -> bool:
    """Returns whether modules are different linear layers that store their weights alike."""
    return (
        all(map(is_linear, layers))
        and len(set(map(is_transposed_linear, layers))) == 1
        and len(set(map(id, layers))) == len(layers)
    )


def _recognised(module: Any) -> MLPBlock | None:
    """Returns the MLP that a module of the transformers package computes, or None."""
    if hasattr(type(module), "feed_forward_chunk"):
        return _recognised_bert(module)
    children = {name: child for name, child in module._modules.items() if child is not None}
    layers = [name for name, child in children.items() if is_linear(child)]
    others = {name: child for name, child in children.items() if name not in layers}
    own = any(parameter is not None for parameter in module._parameters.values())
    if own or len(layers) not in (2, 3) or not _are_layers([children[name] for name in layers]):
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2 or not all(map(_is_between, others.values())):
        return None
    between = tuple(name for name in (*others, *_functions(module)) if name != "dropout")
    dropouts = [name for name, child in others.items() if isinstance(child, nn.Dropout)]
    kinds = ("forward", "dropout") if "dropout" in dropouts else ("forward",)
    transposed = is_transposed_linear(children[layers[0]])
    for *first, down in itertools.permutations(layers):
        for kind, activation in itertools.product(kinds, ACTIVATIONS):
            if ACTIVATIONS[activation][1] != (len(first) == 2):
                continue
            gate, up = first if len(first) == 2 else (None, *first)
            if computes_mlp(module, kind, (gate, up, down), activation, dropouts, transposed):
                between = between if kind == "dropout" else (*between, *({"dropout"} & others.keys()))
                return MLPBlock(kind, MLPSpec(up, down, activation, gate, between))
    return None


def _recognised_bert(module: Any) -> MLPBlock | None:
    """Returns the MLP of a layer of BERT's family, which adds a residual and a norm to it, or None."""
    up, down, dropout, activation_path = (
        "intermediate.dense",
        "output.dense",
        "output.dropout",
        "intermediate.intermediate_act_fn",
    )
    parts = dict(module.named_modules())
    if not is_linear(parts.get(up)) or not is_linear(parts.get(down)) or type(parts.get(dropout)) is not nn.Dropout:
        return None
    if type(parts.get("output.LayerNorm")) is not nn.LayerNorm or not _are_layers([parts[up], parts[down]]):
        return None
    activation = activation_of(getattr(module.intermediate, "intermediate_act_fn", None), False)
    if activation is None or not computes_mlp(
        module, "bert", (None, up, down), activation, [dropout], is_transposed_linear(parts[up])
    ):
        return None
    return MLPBlock("bert", MLPSpec(up, down, activation, None, (activation_path,)))


def _is_between(module: nn.Module) -> bool:
    """Returns whether a module may stand between the layers of an MLP: an activation or dropout of torch or
    transformers, or nothing."""
    kind = type(module)
    return isinstance(module, (nn.Dropout, nn.Identity)) or kind.__module__ in ACTIVATION_LIBRARIES


def _functions(module: nn.Module) -> list[str]:
    return [name for name, value in module.__dict__.items() if inspect.isroutine(value)]


def _sequential(module: nn.Sequential) -> tuple | None:
    """Returns the description of nn.Sequential(linear, activation, linear), or None."""
    if len(module) != 3 or len(module._modules) != 3:
        return None
    first, middle, last = module._modules
    return "forward", first, last, middle


def shared_inputs(module: nn.Module) -> list[tuple[str, ...]]:
    """Returns groups of linear layers, by their names, that a module of the transformers package calls with the same
    input, such as the projections of attention. They are computed together as long as this is so."""
    if not is_of_package(module) or "forward" in module.__dict__:
        return []
    cls: Any = type(module)
    groups = [
        [name for name in group if _takes_rows(module._modules.get(name))] for group in called_with_one_input(cls)
    ]
    return [tuple(group) for group in groups if len(group) > 1 and _have_same_inputs(module, group)]


def _takes_rows(part: Any) -> bool:
    linear = is_linear(part) and not is_transposed_linear(part)
    return linear or (is_in_8_bits(part) and part._parameters.keys() <= {"weight", "bias"})


def _have_same_inputs(module: nn.Module, names: Sequence[str]) -> bool:
    layers: list[Any] = [module.get_submodule(name) for name in names]
    return len({layer.in_features for layer in layers}) == 1 and len(set(map(id, layers))) == len(layers)


def causal_model(module: nn.Module) -> bool:
    """Returns whether a module is a causal language model of the transformers package whose head and loss can be one
    operation: its forward computes `lm_head` and then the standard loss, with nothing in between."""
    cls: Any = type(module)
    return is_of_package(module) and loss_follows_head(cls) and has_usual_loss(module)


def vocabulary_heads(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yields the heads that models of the transformers package name as their output embeddings."""
    for module in modules:
        find = getattr(module, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if isinstance(head, nn.Module):
            yield head


def has_usual_loss(model: Any) -> bool:
    """Returns whether a model of the transformers package uses the standard loss of next tokens."""
    package = sys.modules.get("transformers.loss.loss_utils")
    return package is not None and getattr(model, "loss_function", None) is package.ForCausalLMLoss
