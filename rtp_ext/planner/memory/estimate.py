"""Memory of one GPU of every pipeline stage at the peak of a training step."""

from __future__ import annotations

from rtp_ext.planner.constants import TimeConstants, constants, memory_constant
from rtp_ext.planner.memory.activations import Saved, embedding_tensors, final_tensors, layer_tensors, working_tensors
from rtp_ext.planner.memory.report import MemoryReport, StageMemory, Term, term
from rtp_ext.planner.memory.states import (
    buffer_terms,
    padded_vocab,
    parameter_counts,
    recomputed_layers,
    stage_layers,
    state_terms,
)
from rtp_ext.planner.native import engine
from rtp_ext.planner.rotation.family import plans_blocks
from rtp_ext.planner.rotation.operations import RotatedOperation, Weight
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import Strategy
from rtp_ext.planner.time.stage import StageClock

_LOGIT_CHUNK_BYTES, _LOGIT_LEAST_ROWS, _LOGIT_LEAST_CHUNKS = 64 << 20, 128, 4  # csrc/ops/bundles/cross_entropy.cpp


def estimate_memory(
    model: ModelSpec,
    cluster: Cluster,
    strategy: Strategy,
    global_batch: int | None = None,
    *,
    layer_activation_bytes: float | None = None,
) -> MemoryReport:
    """Predicts the memory of one GPU of every stage of a plan.

    Args:
        global_batch: samples of a step; default: one micro-batch per pipeline stage of every replica.
        layer_activation_bytes: bytes that one layer saves for one micro-batch on one GPU; replaces the list of saved
            tensors. `trace.saved_bytes` measures it on a real module.

    >>> model, cluster = ModelSpec.preset("llama-3-8b", seq=8192), Cluster.preset("h100-80gb", gpus=8)
    >>> report = estimate_memory(model, cluster, Strategy(rtp=8, fused_loss=True), global_batch=8)
    >>> report.verdict, f"{report.peak_allocated_bytes / 1e9:.1f} GB"
    ('fits', '59.7 GB')

    Raises:
        ValueError: a plan that this model or cluster cannot run.
    """
    strategy.check(model, cluster, global_batch)
    micro_batches = strategy.micro_batches(global_batch)
    stages = tuple(
        stage_memory(
            model,
            strategy,
            stage,
            micro_batches,
            layer_activation_bytes,
            hosts=strategy.hosts(cluster),
            cpus=cluster.cpus,
            planned=planned_bytes(model, cluster, strategy),
        )
        for stage in range(strategy.pp)
    )
    return MemoryReport(
        model=model.name,
        cluster=cluster.name,
        strategy=strategy.to_dict(),
        global_batch=micro_batches * strategy.micro_batch * strategy.replicas,
        micro_batches=micro_batches,
        memory_bytes=cluster.memory_bytes,
        safe_fraction=memory_constant("safe_fraction"),
        reserved_per_allocated=memory_constant("reserved_per_allocated"),
        stages=stages,
    )


def planned_bytes(model: ModelSpec, cluster: Cluster, strategy: Strategy) -> float:
    """Returns the bytes of the buffers of a ring whose blocks are planned as a whole; 0: they are not."""
    if not plans_blocks(strategy, cluster):
        return 0.0
    return StageClock(model, cluster, strategy, TimeConstants.default()).planned_bytes


def chunks_in_flight(strategy: Strategy, stage: int, micro_batches: int) -> int:
    """Returns the forwards of a chunk of a stage's layers that wait for their backward at the stage's peak.

    GPipe (arXiv 1811.06965): all m micro-batches. 1F1B: min(m, p - i). Interleaved (arXiv 2104.04473; Megatron-LM's
    warm-up): min(m v, 2 (p - i - 1) + (v - 1) p + 1) chunks, v chunks per stage.
    """
    pp, v = strategy.pp, strategy.interleave
    if pp == 1:
        return 1
    if strategy.schedule == "gpipe":
        return micro_batches
    if strategy.schedule == "1f1b":
        return min(micro_batches, pp - stage)
    return min(micro_batches * v, 2 * (pp - stage - 1) + (v - 1) * pp + 1)


def stage_memory(
    model: ModelSpec,
    strategy: Strategy,
    stage: int,
    micro_batches: int,
    traced: float | None = None,
    *,
    hosts: int = 1,
    cpus: bool = False,
    planned: float = 0.0,
) -> StageMemory:
    """Computes one GPU of one stage; `traced` as layer_activation_bytes of `estimate_memory`, `hosts` of a two-level
    ring, `cpus` as in `Cluster`, `planned` as `planned_bytes`."""
    counts = parameter_counts(model, strategy, stage)
    chunks = chunks_in_flight(strategy, stage, micro_batches)
    tokens = strategy.micro_batch * model.seq // strategy.cp
    layers = stage_layers(model, strategy, stage)
    states = tuple(state_terms(model, strategy, stage, counts))
    terms = [
        *(() if strategy.offload else states),
        *_activation_terms(model, strategy, stage, chunks, tokens, traced),
        *_moment_terms(model, strategy, stage, micro_batches, tokens, traced),
        *buffer_terms(model, strategy, stage, counts, hosts, planned),
        term("workspaces", "of GEMM libraries", "constants.json", bytes=memory_constant("workspace_bytes")),
        *([] if cpus else _outside_terms(strategy)),
    ]
    between: list[Term] = []
    if strategy.pp > 1:
        boundary = Saved("pipeline", "hidden states", model.hidden, strategy.param_bytes)
        over = [("tp", boundary.divisor(strategy))]
        size = {"bytes_per_value": boundary.bytes_per_value, "features": model.hidden, "tokens": tokens}
        what = "one received and one sent tensor"
        terms.append(term("pipeline_buffers", what, "Megatron-LM, torch pipelining", over, tensors=2, **size))
        inputs = strategy.interleave - (stage == 0)
        if inputs and strategy.effective_stack == "megatron":
            what = "every chunk's last input and its gradient"
            source = "Megatron-LM: set_input_tensor keeps them until the next step"
            between.append(term("pipeline_buffers", what, source, over, tensors=2, chunks=inputs, **size))
    host = states if strategy.offload else ()
    return StageMemory(stage, layers, chunks / strategy.interleave, tuple(counts), tuple(terms), tuple(between), host)


def _saved_term(saved: Saved, strategy: Strategy, source: str, **times: float) -> Term:
    over = [("tp", saved.divisor(strategy))]
    factors = {"bytes_per_value": saved.bytes_per_value, "features": saved.features, **times}
    return term("activations", f"{saved.module}: {saved.tensor}", source, over, **factors)


def _activation_terms(
    model: ModelSpec, strategy: Strategy, stage: int, chunks: int, tokens: int, traced: float | None
) -> list[Term]:
    again = recomputed_layers(model, strategy, stage)
    plain = stage_layers(model, strategy, stage) - again
    chunk_layers = again / strategy.interleave
    times = {"tokens": tokens, "layers_of_a_chunk": chunk_layers, "chunks_in_flight": chunks}
    source = f"saved tensors, {strategy.effective_stack}, recomputation {strategy.recompute}"
    if traced is not None:
        times["layers_of_a_chunk"] += plain / strategy.interleave
        own = {"bytes_of_a_layer": traced, **{name: times[name] for name in ("layers_of_a_chunk", "chunks_in_flight")}}
        terms = [term("activations", "traced layers", "saved tensors of the traced module", **own)]
    else:
        terms = [_saved_term(saved, strategy, source, **times) for saved in layer_tensors(model, strategy)]
        if plain:
            whole = {**times, "layers_of_a_chunk": plain}
            source = f"saved tensors, {strategy.effective_stack}, layers that keep everything"
            terms += [_saved_term(saved, strategy, source, **whole) for saved in layer_tensors(model, strategy, "none")]
    if stage == 0:
        waiting = -(-chunks // strategy.interleave)
        for saved in embedding_tensors(model):
            terms.append(_saved_term(saved, strategy, source, tokens=tokens, in_flight=waiting))
    if stage == strategy.pp - 1:
        waiting = chunks if strategy.schedule == "gpipe" else 1
        for saved in final_tensors(model, strategy):
            terms.append(_saved_term(saved, strategy, source, tokens=tokens, in_flight=waiting))
    return terms


def _moment_terms(
    model: ModelSpec, strategy: Strategy, stage: int, micro_batches: int, tokens: int, traced: float | None
) -> list[Term]:
    """Returns the larger of two short-lived groups: logits around the loss, or a recomputed layer in its backward."""
    layer = _layer_moment(model, strategy, tokens, traced)
    if stage < strategy.pp - 1:
        return layer
    loss, kept = _loss_moment(model, strategy, micro_batches, tokens)
    bigger = loss if sum(t.value for t in loss) >= sum(t.value for t in layer) else layer
    return [*bigger, *kept]


def _layer_moment(model: ModelSpec, strategy: Strategy, tokens: int, traced: float | None) -> list[Term]:
    terms = []
    again = working_tensors(model, strategy)
    if again and traced is None:
        what, source = (
            "the layer that backward recomputes",
            "saved tensors without recomputation, minus the saved ones",
        )
        terms.append(term("activations", what, source, bytes_per_token=again, tokens=tokens))
    if strategy.planes is not None:  # in one layer's backward
        codes = 1 + (strategy.planes.weight_gradient is not None)
        features = max(codes * outputs + (8 + codes - 1) * inputs for outputs, inputs in model.linear_shapes)
        what, source = "codes of dy and x, float32 product and sum of dx", "csrc/ops/scaled_linear.cpp"
        terms.append(term("activations", what, source, bytes_of_a_token=features, tokens=tokens))
    elif strategy.rtp > 1 and strategy.param_bytes < 4:
        what, source = "float32 sum of partial products", "csrc/compute/gemm/gemm.h: ProductSum"
        terms.append(term("activations", what, source, bytes_per_value=4, features=model.hidden, tokens=tokens))
    return terms


def _loss_moment(
    model: ModelSpec, strategy: Strategy, micro_batches: int, tokens: int
) -> tuple[list[Term], list[Term]]:
    """Returns tensors around the loss of one micro-batch, and those that GPipe keeps of the others."""
    name, loss = "logits_and_loss", strategy.effective_loss
    if strategy.rtp > 1 and loss == "fused":
        return _rotated_loss_terms(model, strategy, tokens), []
    vocab = padded_vocab(model, strategy)
    known = constants()["logits"][loss]
    over = [("tp", strategy.tp)]
    size = {"tokens": tokens, "vocabulary": vocab}
    terms, kept = [], []
    if known["peak_bytes"]:
        source = f"constants.json, logits, {loss}"
        terms.append(term(name, f"{loss} loss", source, over, bytes_per_logit=known["peak_bytes"], **size))
        others = micro_batches - 1 if strategy.schedule == "gpipe" and strategy.pp > 1 else 0
        if others:
            what = "logits of the other micro-batches"
            kept.append(
                term(name, what, source, over, bytes_per_logit=known["kept_bytes"], micro_batches=others, **size)
            )
    return terms, kept


def _rotated_loss_terms(model: ModelSpec, strategy: Strategy, tokens: int) -> list[Term]:
    """Returns the logits of one shard (or chunk of one) for a part of the tokens, and the head's input gradient.

    Source: csrc/ops/bundles/cross_entropy.cpp.
    """
    source, widest = "csrc/ops/bundles/cross_entropy.cpp", max(strategy.param_bytes, strategy.reduce_bytes)
    head = RotatedOperation("head", (Weight((padded_vocab(model, strategy) // strategy.tp, model.hidden)),))
    _, rows = head.facts.chunks(strategy.rtp, widest, engine().SLOT_CAP)
    chunk = max(min(_LOGIT_CHUNK_BYTES // (4 * rows), -(-tokens // _LOGIT_LEAST_CHUNKS)), _LOGIT_LEAST_ROWS)
    size = {"bytes_per_value": 4, "tokens_at_once": min(chunk, tokens), "vocabulary_at_once": rows}
    return [
        term("logits_and_loss", "logits of one chunk", source, **size),
        term(
            "logits_and_loss",
            "input gradient, float32",
            source,
            bytes_per_value=4,
            tokens=tokens,
            features=model.hidden,
        ),
    ]


def _outside_terms(strategy: Strategy) -> list[Term]:
    name = "context_and_communicators"
    degrees = (strategy.dp, strategy.tp, strategy.pp, strategy.cp, strategy.ep)
    communicators = sum(degree > 1 for degree in degrees) + 2 * (strategy.rtp > 1) * (1 + (strategy.ep > 1))
    terms = [term(name, "CUDA context", "constants.json", bytes=memory_constant("cuda_context_bytes"))]
    if communicators:
        size = memory_constant("communicator_bytes")
        terms.append(term(name, "NCCL", "constants.json", communicators=communicators, bytes=size))
    return terms
