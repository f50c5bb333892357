"""Sizes of causal models of the transformers package that have no formula here: counted on the meta device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

_SEQ = 2048  # where a configuration names no length
_NAMES = {  # of a size in configurations, the first that is there
    "positions": ("max_position_embeddings", "n_positions"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size"),
    "ffn": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
}


def spec_of(spec_type: Any, settings: Mapping[str, Any], name: str, seq: int | None) -> Any:
    """Returns the sizes of a configuration of any causal model, as a `spec_type`, which is ModelSpec.

    Attention, vocabulary and experts are those of the configuration. The width of the MLPs is such that all layers
    together have the model's number of parameters: layers that differ (the first dense ones, those of another kind) and
    experts that all tokens share count as an equal part of every layer.

    Raises:
        ImportError: the transformers package or torch is missing.
        ValueError: the configuration names no causal model with one decoder.
    """
    from rtp_ext.convert.command import model_from

    owner = f"configuration {name}"
    model: Any = model_from(settings, owner)
    config: Any = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False) or not hasattr(config, "vocab_size"):
        raise ValueError(f"{owner}: expected a model with one decoder, got model_type {model.config.model_type}")
    names = [parameter for parameter, _ in model.named_parameters()]

    def size(kind: str) -> int | None:
        return next((value for each in _NAMES[kind] if (value := getattr(config, each, None))), None)

    try:
        layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    except AttributeError as error:
        raise ValueError(f"{owner}: expected numbers of layers, heads and hidden features: {error}") from error
    experts = size("experts") or 0
    learned = any("position" in parameter or ".wpe." in parameter for parameter in names)
    gated = any("gate_proj" in parameter or "gate_up" in parameter for parameter in names) or bool(experts)
    spec = (spec_type.gpt if learned else spec_type.llama)(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        vocab=config.vocab_size,
        seq=seq or size("positions") or _SEQ,
        ffn=(size("expert_ffn") if experts else size("ffn")) or 4 * hidden,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        gated=gated,
        experts=experts,
        experts_per_token=size("experts_per_token") or min(experts, 1),
        **({"positions": size("positions") or 0} if learned else {}),
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    row = layers * (3 if gated else 2) * hidden * max(1, experts)  # parameters for one inner feature of all MLPs
    ffn = spec.ffn + round((parameters - spec.parameters) / row)
    if ffn < 1:
        least = spec.parameters - row * spec.ffn
        raise ValueError(f"{owner}: expected more than {least} parameters, those without MLPs, got {parameters}")
    return dataclasses.replace(spec, ffn=ffn)


def config_of(spec: Any) -> dict[str, Any]:
    """Returns the configuration of the transformers package for a ModelSpec: GPT-2, Llama, or
    Mixtral where it has experts."""
    common = {"vocab_size": spec.vocab, "tie_word_embeddings": spec.tied}
    if spec.family == "gpt":
        sizes = {"n_layer": spec.layers, "n_embd": spec.hidden, "n_head": spec.heads, "n_inner": spec.ffn}
        return {"model_type": "gpt2", **common, **sizes, "n_positions": spec.positions or spec.seq}
    sizes = {
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "max_position_embeddings": spec.seq,
        "attention_bias": spec.qkv_bias,
    }
    if not spec.experts:
        return {"model_type": "llama", **common, **sizes}
    experts = {"num_local_experts": spec.experts, "num_experts_per_tok": spec.experts_per_token}
    return {"model_type": "mixtral", **common, **sizes, **experts}
