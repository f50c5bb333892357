"""Tensors that one layer saves for its backward, by module and stack.

Sources. Megatron: Korthikanti et al., arXiv 2205.05198, section 4.1, tensor by tensor, with FlashAttention, grouped
queries and a fused SwiGLU added. Torch: the storages that autograd saves in a Llama block with hand-written RMSNorm
(52 bytes per token and feature at k/a = 1/4, f/h = 3.5), counted on the meta device; selective recomputation as in
torchtitan (every second matrix product and attention are kept). rtp_ext's own operations: the tensors that csrc/ops
keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import Strategy


@dataclass(frozen=True)
class Saved:
    """A tensor saved in forward for backward.

    Attributes:
        features: values per token.
        bytes_per_value: of its dtype; a fraction where tensors of several dtypes are counted together.
        split: the ranks that divide it: `tp` (always), `sp` (tensor-parallel ranks with sequence parallelism), `no`.
    """

    module: str
    tensor: str
    features: int
    bytes_per_value: float = 2
    split: str = "sp"

    def divisor(self, strategy: Strategy) -> int:
        if self.split == "tp" or (self.split == "sp" and strategy.sequence_parallel):
            return strategy.tp
        return 1

    def bytes_per_token(self, strategy: Strategy) -> float:
        return self.features * self.bytes_per_value / self.divisor(strategy)


def layer_tensors(model: ModelSpec, strategy: Strategy, recompute: str | None = None) -> list[Saved]:
    """Returns the tensors that one layer saves under `recompute` (default: the strategy's)."""
    recompute = strategy.recompute if recompute is None else recompute
    compute = strategy.param_bytes
    if recompute == "full":
        return [Saved("layer", "input", model.hidden, compute)]
    if recompute == "selective" and strategy.effective_stack == "torch":
        return _every_second_product(model, compute)
    return [
        *_norm(model, strategy, "attention norm"),
        *_attention(model, strategy, recompute),
        *_norm(model, strategy, "MLP norm"),
        *(_experts(model, strategy) if model.experts else _mlp(model, strategy)),
        *_adapters(model, strategy),
    ]


def working_tensors(model: ModelSpec, strategy: Strategy) -> float:
    """Returns the bytes per token that recomputation of one layer creates in addition to its saved tensors."""
    whole = sum(saved.bytes_per_token(strategy) for saved in layer_tensors(model, strategy, "none"))
    kept = sum(saved.bytes_per_token(strategy) for saved in layer_tensors(model, strategy))
    return max(whole - kept, 0.0)


def final_tensors(model: ModelSpec, strategy: Strategy) -> list[Saved]:
    """Returns the tensors that the final norm and the vocabulary head save, without logits."""
    norm = _norm(model, strategy, "final norm")
    return [*norm, Saved("vocabulary head", "input", model.hidden, strategy.param_bytes, _input_split(strategy))]


def embedding_tensors(model: ModelSpec) -> list[Saved]:
    tensors = [Saved("embedding", "token ids, int64", 1, 8, "no")]
    if model.dropout:
        tensors.append(Saved("embedding", "dropout mask", model.hidden, 1))
    return tensors


def _input_split(strategy: Strategy) -> str:
    """DTensor keeps the gathered input of a column-parallel layer; Megatron keeps its own part and gathers again."""
    return "no" if strategy.effective_stack == "torch" else "sp"


def _norm(model: ModelSpec, strategy: Strategy, name: str) -> list[Saved]:
    """Returns the saved tensors of a norm, without its output, which the next module saves. A plain RMSNorm casts its
    input to float32 and saves the factor of its weight; a fused one saves only its input."""
    h, compute = model.hidden, strategy.param_bytes
    if strategy.effective_stack == "torch" and model.family == "llama" and not strategy.fused_norm:
        return [Saved(name, "input, float32", h, 4), Saved(name, "normalized", h, compute)]
    return [Saved(name, "input", h, compute)]


def _attention(model: ModelSpec, strategy: Strategy, recompute: str) -> list[Saved]:
    q, kv, compute = model.query_features, model.kv_features, strategy.param_bytes
    repeats = strategy.effective_stack == "torch"  # keys and values are repeated for every head
    tensors = [
        Saved("attention", "input", model.hidden, compute, _input_split(strategy)),
        Saved("attention", "queries", q, compute, "tp"),
        Saved("attention", "keys", q if repeats else kv, compute, "tp"),
        Saved("attention", "values", q if repeats else kv, compute, "tp"),
        Saved("attention", "output", q, compute, "tp"),
    ]
    if strategy.flash_attention:
        tensors.append(Saved("attention", "log-sum-exp, float32", model.heads, 4, "tp"))
    elif recompute != "selective":
        scores = model.heads * model.seq
        tensors.append(Saved("attention", "softmax", scores, compute, "tp"))
        if model.dropout:
            tensors.append(Saved("attention", "dropout mask", scores, 1, "tp"))
            tensors.append(Saved("attention", "dropped out", scores, compute, "tp"))
    if model.dropout:
        tensors.append(Saved("attention", "residual dropout mask", model.hidden, 1))
    return tensors


def _mlp(model: ModelSpec, strategy: Strategy) -> list[Saved]:
    f, compute = model.ffn, strategy.param_bytes
    tensors = [Saved("MLP", "input", model.hidden, compute, _input_split(strategy))]
    bundled = strategy.bundles
    if not (bundled and strategy.bundle == "recompute"):
        tensors.append(Saved("MLP", "up", f, compute, "tp"))
        if model.gated:
            tensors.append(Saved("MLP", "gate", f, compute, "tp"))
            if strategy.effective_stack == "torch" and not bundled:
                tensors.append(Saved("MLP", "activated gate", f, compute, "tp"))
        if not bundled:
            tensors.append(Saved("MLP", "product" if model.gated else "activated", f, compute, "tp"))
    if model.dropout:
        tensors.append(Saved("MLP", "residual dropout mask", model.hidden, 1))
    return tensors


def _adapters(model: ModelSpec, strategy: Strategy) -> list[Saved]:
    """Returns what adapters save beside the inputs that they share with their layers: the outputs of each A."""
    if not strategy.lora_rank:
        return []
    return [Saved("adapters", "outputs of A", len(model.linear_shapes) * strategy.lora_rank, strategy.param_bytes)]


def _experts(model: ModelSpec, strategy: Strategy) -> list[Saved]:
    """Returns the saved tensors of a mixture whose tokens are spread evenly; each uses `experts_per_token` experts."""
    k, compute = model.experts_per_token, strategy.param_bytes
    tensors = [
        Saved("router", "input", model.hidden, compute),
        Saved("experts", "tokens by expert", k * model.hidden, compute, "no"),
    ]
    if not (strategy.rtp > 1 and strategy.bundle == "recompute"):
        tensors.append(Saved("experts", "up and gate", k * model.ffn * (2 if model.gated else 1), compute, "tp"))
        tensors.append(Saved("experts", "product", k * model.ffn, compute, "tp"))
    if strategy.rtp > 1 and strategy.ep > 1:  # rtp_ext/functional/dispatch.py
        tensors.append(Saved("experts", "outputs that came back, float32", k * model.hidden, 4))
    return [*tensors, Saved("experts", "outputs by expert", k * model.hidden, compute)]


def _every_second_product(model: ModelSpec, compute: int) -> list[Saved]:
    """Returns saved tensors of selective recomputation: attention's output, and the products 1, 3, ... of forward."""
    tensors = [
        Saved("layer", "input", model.hidden, compute),
        Saved("attention", "output", model.query_features, compute, "tp"),
        Saved("attention", "log-sum-exp, float32", model.heads, 4, "tp"),
    ]
    if model.gated:  # q, k, v, output, gate, up, down
        tensors += [
            Saved("attention", "queries", model.query_features, compute, "tp"),
            Saved("attention", "values", model.kv_features, compute, "tp"),
            Saved("MLP", "gate", model.ffn * max(1, model.experts_per_token), compute, "tp"),
            Saved("MLP", "output", model.hidden, compute, "no"),
        ]
    else:  # one product for queries, keys and values; output, up, down
        fused = model.query_features + 2 * model.kv_features
        tensors += [
            Saved("attention", "queries, keys, values", fused, compute, "tp"),
            Saved("MLP", "up", model.ffn, compute, "tp"),
        ]
    return tensors
