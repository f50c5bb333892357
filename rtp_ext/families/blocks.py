"""Recognises linear layers, MLPs, experts and layers with a shared input in models of torch and transformers.

Modules are recognised by exact class; all others are converted layer by layer. The transformers package is never
imported here: a model of it has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from rtp_ext.families.activations import activation_of
from rtp_ext.families.same_forward import has_same_forward

_PACKAGE = "transformers.models."

# class name: (kind, up, down, gate, activation)
_GATED = ("forward", "up_proj", "down_proj", "gate_proj", "act_fn")
_MLP_BLOCKS: dict[str, tuple[str, str, str, str | None, str]] = {
    "LlamaMLP": _GATED,
    "MistralMLP": _GATED,
    "Qwen2MLP": _GATED,
    "Qwen3MLP": _GATED,
    "GPT2MLP": ("dropout", "c_fc", "c_proj", None, "act"),
    "ViTMLP": ("forward", "fc1", "fc2", None, "activation_fn"),
    "BertLayer": (
        "bert",
        "intermediate.dense",
        "output.dense",
        None,
        "intermediate.intermediate_act_fn",
    ),
}
_TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

_QKV = ("q_proj", "k_proj", "v_proj")
_SHARED_INPUTS = {
    "LlamaAttention": _QKV,
    "MistralAttention": _QKV,
    "MixtralAttention": _QKV,
    "Qwen2Attention": _QKV,
    "Qwen3Attention": _QKV,
    "ViTAttention": _QKV,
    "BertSelfAttention": ("query", "key", "value"),
}

# models whose forward computes `lm_head` and then `loss_function`, with nothing in between
CAUSAL_MODELS = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def _class_name(module: nn.Module) -> str | None:
    """Returns the class name of a module of the transformers package; None for any other module."""
    cls = type(module)
    return cls.__name__ if cls.__module__.startswith(_PACKAGE) else None


def is_transposed_linear(module: nn.Module) -> bool:
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
    activation: str
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
    """Returns the MLP of a block of a supported class with plain linear layers and a supported activation, or None."""
    if "forward" in module.__dict__:  # replaced on the instance
        return None
    if type(module) is nn.Sequential:
        found: Any = _sequential(module)
    elif type(module) in _TORCH_LAYERS:
        found = ("transformer", "linear1", "linear2", None, "activation")
    else:
        found = _MLP_BLOCKS.get(_class_name(module) or "")
    if found is None:
        return None
    kind, up, down, gate, activation_path = found
    try:
        layers = [module.get_submodule(path) for path in (up, down, gate) if path is not None]
    except AttributeError:
        return None
    function: Any = module
    for name in activation_path.split("."):
        function = getattr(function, name, None)
    activation = activation_of(function, gate is not None)
    if activation is None or not all(is_linear(layer) for layer in layers):
        return None
    if len(set(map(is_transposed_linear, layers))) > 1 or len({id(layer) for layer in layers}) < len(layers):
        return None
    if gate is not None and (layers[2].bias is None) != (layers[0].bias is None):
        return None
    between = (activation_path, "dropout") if kind == "transformer" else (activation_path,)
    return MLPBlock(kind, MLPSpec(up, down, activation, gate, between))


def _sequential(module: nn.Sequential) -> tuple | None:
    """Returns the description of nn.Sequential(linear, activation, linear), or None."""
    if len(module) != 3 or len(module._modules) != 3:
        return None
    first, middle, last = module._modules
    return "forward", first, last, None, middle


def shared_inputs(module: nn.Module) -> tuple[str, ...] | None:
    """Returns the names of the linear layers of an attention block that share one input, or None."""
    names = _SHARED_INPUTS.get(_class_name(module) or "")
    if names is None or not all(is_linear(getattr(module, name, None)) for name in names):
        return None
    return names


def causal_model(module: nn.Module) -> bool:
    """Returns whether a module is a causal language model whose head and loss can be one operation."""
    return _class_name(module) in CAUSAL_MODELS and has_usual_loss(module)


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
