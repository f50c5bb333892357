"""Sizes of transformers, and the parameter counts that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_ext.command_line import read_json
from rtp_ext.planner.constants import check_at_least, check_known, constants
from rtp_ext.planner.specs.hugging_face import spec_of

FAMILIES = ("gpt", "llama")
_GPT_VOCAB, _LLAMA_VOCAB, _SEQ = 50257, 32000, 2048
# model_type of a Hugging Face configuration -> parts of its layers that its family lacks
_LLAMA_TYPES: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are numbers of elements; `seq` is the number of tokens of one sample.

    `gpt`: LayerNorm, GELU, biases, learned positions, dropout, tied embedding and head.
    `llama`: RMSNorm, SwiGLU, rotary positions, no biases, separate head; with experts, a mixture.
    Make one with `gpt`, `llama`, `preset` or `from_hf_config`.

    Raises:
        ValueError: sizes that are not positive whole numbers, or that do not divide.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq: int
    positions: int = 0  # rows of the learned position embedding; 0: rotary
    gated: bool = False
    tied: bool = False
    norm_bias: bool = False
    qkv_bias: bool = False
    projection_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dropout: bool = False
    experts: int = 0  # per layer; 0: one dense MLP
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        owner = f"model {self.name}"
        check_known("model family", self.family, FAMILIES)
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq")
        check_at_least(owner, 1, **{size: getattr(self, size) for size in sizes})
        check_at_least(owner, 0, positions=self.positions, experts=self.experts)
        if self.heads % self.kv_heads:
            raise ValueError(f"{owner}: expected heads divisible by kv_heads, got {self.heads} and {self.kv_heads}")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"{owner}: expected 1 <= experts_per_token <= {self.experts}, got {self.experts_per_token}"
            )

    # -- constructors -------------------------------------------------------------------------------------------------

    @classmethod
    def gpt(
        cls,
        *,
        layers: int,
        hidden: int,
        heads: int,
        vocab: int = _GPT_VOCAB,
        seq: int = _SEQ,
        ffn: int | None = None,
        kv_heads: int | None = None,
        name: str = "gpt",
        **options: Any,
    ) -> ModelSpec:
        """Returns a GPT: inner size 4 hidden, learned positions, biases. `options`: further fields of the class."""
        check_at_least(f"model {name}", 1, hidden=hidden, heads=heads, seq=seq)
        given = {
            "positions": seq,
            "tied": True,
            "norm_bias": True,
            "qkv_bias": True,
            "projection_bias": True,
            "mlp_bias": True,
            "dropout": True,
        }
        return cls._make(
            {**given, **options}, name, "gpt", layers, hidden, heads, kv_heads, ffn or 4 * hidden, vocab, seq
        )

    @classmethod
    def llama(
        cls,
        *,
        layers: int,
        hidden: int,
        heads: int,
        vocab: int = _LLAMA_VOCAB,
        seq: int = _SEQ,
        ffn: int | None = None,
        kv_heads: int | None = None,
        name: str = "llama",
        **options: Any,
    ) -> ModelSpec:
        """Returns a Llama: SwiGLU with inner size 8/3 hidden, rounded up to a multiple of 256 (arXiv 2302.13971).

        `options`: further fields of the class, such as `experts` and `experts_per_token`.
        """
        check_at_least(f"model {name}", 1, hidden=hidden, heads=heads)
        inner = ffn or -(-8 * hidden // 3 // 256) * 256
        return cls._make({"gated": True, **options}, name, "llama", layers, hidden, heads, kv_heads, inner, vocab, seq)

    @classmethod
    def _make(
        cls,
        options: dict[str, Any],
        name: str,
        family: str,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int | None,
        ffn: int,
        vocab: int,
        seq: int,
    ) -> ModelSpec:
        unknown = set(options) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise TypeError(f"model {name}: unknown fields {', '.join(sorted(unknown))}")
        head_dim = options.pop("head_dim", None)
        if head_dim is None:
            if hidden % heads:
                raise ValueError(f"model {name}: expected hidden divisible by heads, got {hidden} and {heads}")
            head_dim = hidden // heads
        return cls(
            name=name,
            family=family,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            ffn=ffn,
            vocab=vocab,
            seq=seq,
            **options,
        )

    @classmethod
    def preset(cls, name: str, *, seq: int | None = None, **changes: Any) -> ModelSpec:
        """Returns a published model: `gpt-3-175b`, `llama-65b`, `llama-3-8b`, `mixtral-8x7b`, ... (constants.json).

        `seq`: tokens of a sample; default: the published number. `changes`: other fields to replace.
        """
        known = constants()["models"]
        check_known("model", name, known)
        sizes = dict(known[name])
        make = {"gpt": cls.gpt, "llama": cls.llama}[sizes.pop("family")]
        if seq is not None:
            sizes["seq"] = seq
        return make(name=name, **{**sizes, **changes})

    @classmethod
    def from_hf_config(cls, config: str | Path | Mapping[str, Any], *, seq: int | None = None) -> ModelSpec:
        """Reads a Hugging Face configuration: a dictionary, a config.json, or the directory that contains it.

        The sizes of gpt2, llama, mistral, mixtral, qwen2 and qwen3 are read; other causal models are made on the meta
        device, which needs torch and the transformers package, and their layers averaged
        (`rtp_ext.planner.specs.hugging_face`). `seq`: tokens of a sample; default: the longest that the configuration
        allows.

        Raises:
            ImportError: the transformers package is missing, for a model type that needs it.
            ValueError: an unknown model type, a missing size, or a file that is not a configuration.
        """
        settings, name = _read_config(config)
        kind = settings.get("model_type", "gpt2" if "n_embd" in settings else "llama")
        owner = f"configuration {name}"

        def need(key: str) -> Any:
            if settings.get(key) is None:
                raise ValueError(f"{owner}: expected {key}, which a configuration of type {kind} has; it is missing")
            return settings[key]

        if kind == "gpt2":
            return cls.gpt(
                name=name,
                layers=need("n_layer"),
                hidden=need("n_embd"),
                heads=need("n_head"),
                vocab=need("vocab_size"),
                seq=seq or need("n_positions"),
                positions=need("n_positions"),
                ffn=settings.get("n_inner"),
                tied=settings.get("tie_word_embeddings", True),
            )
        if kind not in _LLAMA_TYPES:
            return spec_of(cls, settings, name, seq)
        options: dict[str, Any] = dict(_LLAMA_TYPES[kind])
        if settings.get("attention_bias"):
            options |= {"qkv_bias": True, "projection_bias": True}
        if settings.get("mlp_bias"):
            options["mlp_bias"] = True
        if kind == "mixtral":
            options |= {"experts": need("num_local_experts"), "experts_per_token": need("num_experts_per_tok")}
        return cls.llama(
            name=name,
            layers=need("num_hidden_layers"),
            hidden=need("hidden_size"),
            heads=need("num_attention_heads"),
            kv_heads=settings.get("num_key_value_heads"),
            head_dim=settings.get("head_dim"),
            ffn=need("intermediate_size"),
            vocab=need("vocab_size"),
            seq=seq or need("max_position_embeddings"),
            tied=settings.get("tie_word_embeddings", False),
            **options,
        )

    # -- parameters ---------------------------------------------------------------------------------------------------

    @property
    def query_features(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Features of the keys; the values have as many."""
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's query, key, value and output projections, without norms."""
        rows = self.query_features + 2 * self.kv_features
        weights = self.hidden * rows + self.query_features * self.hidden
        return weights + rows * self.qkv_bias + self.hidden * self.projection_bias

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one layer's MLP, or of all its experts."""
        inner = (3 if self.gated else 2) * self.hidden * self.ffn
        inner += (self.ffn * (2 if self.gated else 1) + self.hidden) * self.mlp_bias
        return inner * max(1, self.experts)

    @property
    def linear_shapes(self) -> list[tuple[int, int]]:
        """[out_features, in_features] of the linear layers of one layer, in the order of forward; experts are none."""
        h, q, kv = self.hidden, self.query_features, self.kv_features
        projections = [(q + 2 * kv, h)] if self.family == "gpt" else [(q, h), (kv, h), (kv, h)]
        up = [] if self.experts else [(self.ffn, h)] * (2 if self.gated else 1) + [(h, self.ffn)]
        return [*projections, (h, q), *up]

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA adapters of this rank around all linear layers of one layer."""
        return rank * sum(outputs + inputs for outputs, inputs in self.linear_shapes)

    @property
    def router_parameters(self) -> int:
        return self.hidden * self.experts

    @property
    def norm_parameters(self) -> int:
        """Parameters of one layer's two norms over the hidden size, and of query and key norms if present."""
        return 2 * self.hidden * (2 if self.norm_bias else 1) + 2 * self.head_dim * self.qk_norm

    @property
    def layer_parameters(self) -> int:
        return self.attention_parameters + self.mlp_parameters + self.router_parameters + self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of token and position embeddings."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def final_norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm_bias else 1)

    @property
    def head_parameters(self) -> int:
        """Parameters of the vocabulary head; 0 if it shares the embedding's."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, each counted once."""
        return (
            self.layers * self.layer_parameters
            + self.embedding_parameters
            + self.final_norm_parameters
            + self.head_parameters
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: of the experts, as many as it is routed to."""
        if not self.experts:
            return self.parameters
        idle = self.mlp_parameters // self.experts * (self.experts - self.experts_per_token)
        return self.parameters - self.layers * idle

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "parameters": self.parameters}


def _read_config(config: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, Mapping):
        return config, str(config.get("_name_or_path") or config.get("model_type", "given"))
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    settings = read_json(path, "configuration")
    return settings, path.parent.name or path.name
