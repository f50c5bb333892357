"""Closed forms of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models".

arXiv 2205.05198. 16-bit GPTs with dropout and without fused attention. Symbols: s sequence, b micro-batch, h hidden,
a heads, L layers, t tensor-parallel ranks, p stages, v chunks of a stage. The formulas reproduce the memory figures of
its Fig. 1.
"""

from __future__ import annotations

from rtp_ext.planner.constants import check_known

RECOMPUTE = ("none", "selective", "full")


def activation_bytes_per_layer(
    seq: int,
    micro_batch: int,
    hidden: int,
    heads: int,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Returns the bytes that one layer saves for backward (Table 2).

    s b h times: 34 + 5as/h on one GPU (eq. 1); 10 + 24/t + 5as/(ht) with tensor parallelism (eq. 2); (34 + 5as/h)/t
    with sequence parallelism too (eq. 4); 10 + 24/t and 34/t with selective recomputation (eq. 6); 2 with full.
    """
    check_known("recompute", recompute, RECOMPUTE)
    values = seq * micro_batch * hidden
    if recompute == "full":
        return 2 * values
    attention = 0.0 if recompute == "selective" else 5 * heads * seq / hidden
    replicated = 10 / tp if sequence_parallel else 10
    return values * (replicated + 24 / tp + attention / tp)


def layers_in_memory(layers: int, pp: int = 1, interleave: int = 1, micro_batches: int | None = None) -> float:
    """Returns the layers whose activations the first stage holds: L (1F1B), L (1 + (p-1)/(pv)) interleaved (4.2.3).

    With fewer micro-batches than stages, 1F1B holds L m / p.
    """
    if interleave > 1:
        return layers * (1 + (pp - 1) / (pp * interleave))
    if micro_batches is not None and micro_batches < pp:
        return layers * micro_batches / pp
    return layers


def activation_bytes(
    layers: int,
    seq: int,
    micro_batch: int,
    hidden: int,
    heads: int,
    *,
    tp: int = 1,
    pp: int = 1,
    interleave: int = 1,
    micro_batches: int | None = None,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Returns bytes of activations on the first stage, without embedding and head (eq. 5 and section 4.2.3)."""
    per_layer = activation_bytes_per_layer(
        seq, micro_batch, hidden, heads, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute
    )
    return per_layer * layers_in_memory(layers, pp, interleave, micro_batches)


def parameter_and_optimizer_bytes(layers: int, hidden: int, *, tp: int = 1, pp: int = 1) -> float:
    """Returns 18 bytes for each of the 12 L h^2 / (t p) parameters of a GPU.

    2 for weights, 4 for gradients, 12 for the master copy and two moments of Adam: Fig. 1's "parameters and optimizer
    state".
    """
    return 18 * 12 * layers * hidden**2 / (tp * pp)
