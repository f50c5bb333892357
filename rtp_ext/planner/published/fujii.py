"""The memory estimator of Fujii, Watanabe and Yokota, "Accelerating Large Language Model Training with 4D Parallelism
and Memory Consumption Estimator", arXiv 2411.06465.

The formulas are those of the first author's tool, which states that it follows the paper
(okoge-kaz/okoge-kaz.github.io@72832da, static/js/memory-estimator.js): Llama on Megatron-LM in 16 bits, FlashAttention,
sequence parallelism, no dropout and no recomputation. As in the tool, logits and loss are not counted, and embedding
and head are counted on every stage. One branch differs, the interleaved one: ceil(L / (p v)) p layers would be L / v;
the first stage holds the number of Korthikanti et al. (arXiv 2205.05198, section 4.2.3).

The rule of the abstract: none of 454 runs with an estimate below 80 % of a GPU's memory ran out of memory.
"""

from __future__ import annotations

import math

from rtp_ext.planner.constants import check_at_least, memory_constant
from rtp_ext.planner.published.korthikanti import layers_in_memory

PARAMETER_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12  # 18 for each parameter
VERDICTS = ("fits", "tight", "out of memory")


def parameters_per_gpu(
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    tied: bool = False,
    tp: int = 1,
    pp: int = 1,
) -> float:
    """ceil(L/p) ((2 h a d + 2 h k d + 3 h f)/t + 2h) + h V (1 if tied, else 2)/t + h, with d = h/a."""
    check_at_least("fujii", 1, layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, tp=tp, pp=pp)
    head_dim = hidden / heads
    layer = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + 3 * hidden * ffn
    ends = hidden * vocab * (1 if tied else 2) / tp + hidden
    return math.ceil(layers / pp) * (layer / tp + 2 * hidden) + ends


def activation_bytes_per_layer(
    *,
    seq: int,
    micro_batch: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    tp: int = 1,
    cp: int = 1,
) -> float:
    """s b h (12 + 4k/a + 8f/h) / (t c): attention 6 + 4k/a, SwiGLU 2 + 8f/h, two norms 4."""
    return seq * micro_batch * hidden * (12 + 4 * kv_heads / heads + 8 * ffn / hidden) / (tp * cp)


def memory_bytes(
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    seq: int,
    micro_batch: int = 1,
    tied: bool = False,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    dp: int = 1,
    interleave: int = 1,
    distributed_optimizer: bool = False,
) -> dict[str, float]:
    """Returns bytes of one GPU of the first stage, under `parameters`, `gradients`, `optimizer` and `activations`.

    States take 18 bytes per parameter of a GPU; with the distributed optimizer 6 + 12/d. Activations are those of
    ceil(L/p) layers for each of the p micro-batches that 1F1B keeps in flight.
    """
    check_at_least("fujii", 1, seq=seq, micro_batch=micro_batch, cp=cp, dp=dp, interleave=interleave)
    count = parameters_per_gpu(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        tied=tied,
        tp=tp,
        pp=pp,
    )
    layer = activation_bytes_per_layer(
        seq=seq, micro_batch=micro_batch, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, tp=tp, cp=cp
    )
    kept = layers if pp == 1 else layers_in_memory(math.ceil(layers / pp) * pp, pp, interleave)
    return {
        "parameters": count * PARAMETER_BYTES,
        "gradients": count * GRADIENT_BYTES,
        "optimizer": count * OPTIMIZER_BYTES / (dp if distributed_optimizer else 1),
        "activations": layer * kept,
    }


def verdict(estimated_bytes: float, memory_bytes: float) -> str:
    """Returns `fits` up to 80 % of a GPU's memory (decimal bytes: an 80 GB GPU has 80e9), `tight` up to 100 %,
    otherwise `out of memory`."""
    share = estimated_bytes / memory_bytes
    return VERDICTS[0 if share <= memory_constant("safe_fraction") else 1 if share <= 1 else 2]
