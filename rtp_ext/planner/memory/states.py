"""Parameters of one pipeline stage and their states: weights, gradients, optimizer state, buffers."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

from rtp_ext.planner.memory.report import Term, term
from rtp_ext.planner.rotation.operations import RotationBytes, rotations_of, rtp_bytes
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import OPTIMIZER_MOMENTS, Strategy
from rtp_ext.recipe_planes import Recipe

_MEGATRON = "Megatron-LM@d98e8a64: 18 bytes per parameter, or 6 + 12/d with the distributed optimizer"
_FSDP = "fully_shard: float32 shards of weights, gradients and optimizer state"
_VOCAB_MULTIPLE = 128
_FEW_LAYERS = 3


def padded_vocab(model: ModelSpec, strategy: Strategy) -> int:
    """Returns the rows of embedding and head over all tensor-parallel ranks. Megatron-LM pads it to n * 128 tp."""
    multiple = strategy.tp * (_VOCAB_MULTIPLE if strategy.effective_stack == "megatron" else 1)
    return -(-model.vocab // multiple) * multiple


def stage_layers(model: ModelSpec, strategy: Strategy, stage: int) -> int:
    """Returns the layers of a stage: stage_layers, or equal numbers, with the remainder on the first stages."""
    if strategy.stage_layers:
        return strategy.stage_layers[stage]
    return model.layers // strategy.pp + (stage < model.layers % strategy.pp)


def recomputed_layers(model: ModelSpec, strategy: Strategy, stage: int) -> int:
    """Returns the number of a stage's layers to which `recompute` applies."""
    layers = stage_layers(model, strategy, stage)
    return min(strategy.stage_recompute[stage], layers) if strategy.stage_recompute else layers


def parameter_counts(model: ModelSpec, strategy: Strategy, stage: int) -> list[Term]:
    """Returns the parameters of one GPU of a stage. Experts are last, under the name `experts`."""
    layers, h, tp = stage_layers(model, strategy, stage), model.hidden, ("tp", strategy.tp)
    by_rows = h * (model.projection_bias + (model.mlp_bias and not model.experts))  # biases added after the sum over tp
    dense = model.attention_parameters + (0 if model.experts else model.mlp_parameters) - by_rows
    replicated = model.norm_parameters + model.router_parameters + by_rows
    vocab = padded_vocab(model, strategy)
    counts = [
        term("count", "projections and MLPs", "", [tp], layers=layers, parameters_of_a_layer=dense),
        term(
            "count", "norms, routers, biases that are added once", "", layers=layers, parameters_of_a_layer=replicated
        ),
    ]
    if stage == 0:
        counts.append(term("count", "token embedding", "", [tp], vocabulary=vocab, hidden=h))
        if model.positions:
            counts.append(term("count", "position embedding", "", positions=model.positions, hidden=h))
    if stage == strategy.pp - 1:
        counts.append(term("count", "final norm", "", parameters=model.final_norm_parameters))
        if not model.tied or strategy.pp > 1:
            counts.append(term("count", "vocabulary head", "", [tp], vocabulary=vocab, hidden=h))
    if model.experts:
        over = [tp, *([("ep", strategy.ep)] if strategy.rtp == 1 else [])]  # shards of a ring are of all experts
        counts.append(term("count", "experts", "", over, layers=layers, parameters_of_a_layer=model.mlp_parameters))
    if strategy.lora_rank:
        adapters = model.adapter_parameters(strategy.lora_rank)
        counts.append(term("count", "adapters", "", layers=layers, parameters_of_a_layer=adapters))
    return counts


def trained_count(model: ModelSpec, strategy: Strategy, stage: int) -> float:
    """Returns the parameters of one GPU of a stage that have gradients, not sharded by data parallelism."""
    if strategy.freezes:
        return float(stage_layers(model, strategy, stage) * model.adapter_parameters(strategy.lora_rank))
    return sum(count.value for count in parameter_counts(model, strategy, stage))


def layer_count(model: ModelSpec, strategy: Strategy) -> float:
    """Returns the parameters of one layer on one GPU, not sharded by data parallelism."""
    mlp = model.mlp_parameters / (strategy.ep if model.experts else 1)
    sharded = (model.attention_parameters + mlp) / strategy.tp
    return sharded + model.norm_parameters + model.router_parameters


def rotation_bytes(model: ModelSpec, strategy: Strategy, stage: int, hosts: int = 1) -> RotationBytes:
    """Returns slots and states of rank 0 of a stage's ring, which has the largest shards. hosts: of a two-level
    ring."""
    moments = OPTIMIZER_MOMENTS[strategy.optimizer]
    sizes = (strategy.rtp, strategy.tp, strategy.param_bytes, strategy.reduce_bytes, moments)
    layers, ends = stage_layers(model, strategy, stage), (stage == 0, stage == strategy.pp - 1, strategy.pp > 1)
    ways = (strategy.travel, strategy.gradient_route, strategy.gradient_travel)
    ahead = (strategy.late_passes, strategy.buffers != "lean")
    frozen = (strategy.frozen, strategy.lora_rank, strategy.planes)
    every = (strategy.bundle, strategy.fused_loss, strategy.in_place, layers, ends, hosts, ways, ahead, frozen)
    return _rotation_bytes(model, sizes, *every, strategy.ep)


@functools.lru_cache(maxsize=4096)
def _rotation_bytes(
    model: ModelSpec,
    sizes: tuple[int, int, int, int, int],
    bundle: bool | str,
    fused_loss: bool,
    in_place: bool,
    layers: int,
    ends: tuple[bool, bool, bool],
    hosts: int,
    ways: tuple[str | None, str, str | None],
    ahead: tuple[int, bool],
    frozen: tuple[str | None, int, Recipe | None],
    parts: int,
) -> RotationBytes:
    """Returns `rtp_bytes`, computed from a few layers: further layers add their shards and need no further slots."""
    ranks, tp, param_bytes, reduce_bytes, moments = sizes

    def held(count: int) -> RotationBytes:
        rotations, others = rotations_of(
            model,
            bundle=bundle,
            fused_loss=fused_loss,
            tp=tp,
            layers=count,
            embedding=ends[0],
            head=ends[1],
            own_head=ends[2],
            frozen=frozen[0],
            lora_rank=frozen[1],
            recipe=frozen[2],
            ranks=ranks,
            parts=parts,
        )
        whole = [each for each in rotations if each.parts == 1]
        bytes_of = functools.partial(
            rtp_bytes,
            param_bytes=4,
            frozen_bytes=param_bytes,
            compute_bytes=param_bytes,
            reduce_bytes=reduce_bytes,
            optimizer_moments=moments,
            in_place=in_place,
            hosts=hosts,
            travel=ways[0],
            gradient_route=ways[1],
            gradient_travel=ways[2],
            late_gradients=ahead[0],
            look_ahead=0,  # plans of whole blocks count their own
            gradients_apart=ahead[1],
        )
        found = bytes_of(whole, ranks, others=others)
        if parts == 1:
            return found
        hosts_of_part = hosts if ranks // hosts >= 2 * parts else 1  # with one rank on each host a ring is flat
        divided = bytes_of([each for each in rotations if each.parts > 1], ranks // parts, hosts=hosts_of_part)
        names = [field.name for field in dataclasses.fields(RotationBytes)]
        return RotationBytes(**{name: getattr(found, name) + getattr(divided, name) for name in names})

    if layers <= _FEW_LAYERS:
        return held(layers)
    few, fewer = held(_FEW_LAYERS), held(_FEW_LAYERS - 1)
    names = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "optimizer_steps_bytes", "codes_bytes")
    more = layers - _FEW_LAYERS
    grown = {name: getattr(few, name) + more * (getattr(few, name) - getattr(fewer, name)) for name in names}
    return dataclasses.replace(few, **grown)


def state_terms(model: ModelSpec, strategy: Strategy, stage: int, counts: list[Term]) -> list[Term]:
    """Returns parameters, gradients and optimizer state of one GPU; with offloading they are in the host's memory.

    Megatron: 2 + 4 + 12 bytes per parameter (Megatron-LM@d98e8a64), sharded by ZeRO stage (arXiv 1910.02054). Torch:
    4 + 4 + 8 (`fully_shard`). Rotation: `rtp_bytes`.
    """
    moments = OPTIMIZER_MOMENTS[strategy.optimizer]
    if strategy.rtp > 1:
        source = "csrc/engine/executor.cpp, DTensor's Shard: shards of rank 0"
        held = rotation_bytes(model, strategy, stage)
        own = held.gradients_bytes // 4
        if strategy.outer == "zero":
            return _pieces_terms(strategy, held.parameters_bytes // 4, own)
        shards = [
            term("parameters", "local shards, float32", source, bytes_per_value=4, values=held.parameters_bytes // 4),
            term("gradients", "gradient shards, float32", source, bytes_per_value=4, values=own),
        ]
        if strategy.freezes:
            blocks = f"in blocks of {strategy.frozen}, others " if strategy.frozen else ""
            what, rest = f"frozen shards, {blocks}in {strategy.param_dtype}", held.parameters_bytes - 4 * own
            shards[:1] = [
                term("parameters", what, source, bytes=rest),
                term("parameters", "shards of adapters, float32", source, bytes_per_value=4, values=own),
            ]
        if moments:
            shards.append(term("optimizer", strategy.optimizer, source, moments=moments, bytes_per_value=4, values=own))
        if held.codes_bytes:
            what = f"codes and scales of the own shards, {strategy.recipe}"
            shards.append(term("parameters", what, "csrc/engine/hops/shard_codes.h", bytes=held.codes_bytes))
        if strategy.outer == "diloco":
            what, source = "anchors and momentum of DiLoCo, float32", "rtp_ext.outer.DiLoCo"
            shards.append(term("optimizer", what, source, tensors=2, bytes_per_value=4, values=own))
        return shards
    torch = strategy.effective_stack == "torch"
    source = _FSDP if torch and strategy.zero >= 2 else "torch: float32" if torch else _MEGATRON
    weight = 4 if torch else strategy.param_bytes
    gradient = 4 if torch else strategy.reduce_bytes
    master = 1 if weight < 4 else 0
    degrees = strategy.shards
    by_kind: dict[str, tuple[float, int]] = {
        "": (sum(count.value for count in counts if count.what != "experts"), degrees),
        "experts: ": (sum(count.value for count in counts if count.what == "experts"), degrees // strategy.ep),
    }
    # fully_shard without resharding (zero=2) still keeps sharded weights; the gathered ones are a buffer
    first = {"parameters": 2 if torch else 3, "gradients": 2, "optimizer": 1}
    terms = []
    for prefix, (values, degree) in by_kind.items():
        if not values:
            continue
        over = {name: [("shards", degree if strategy.zero >= stage_ else 1)] for name, stage_ in first.items()}
        terms += [
            term("parameters", f"{prefix}weights", source, over["parameters"], bytes_per_value=weight, values=values),
            term("gradients", f"{prefix}gradients", source, over["gradients"], bytes_per_value=gradient, values=values),
        ]
        if master + moments:
            terms.append(
                term(
                    "optimizer",
                    f"{prefix}{strategy.optimizer}{', with master weights' if master else ''}",
                    source,
                    over["optimizer"],
                    tensors=master + moments,
                    bytes_per_value=4,
                    values=values,
                )
            )
    return terms


def _pieces_terms(strategy: Strategy, values: int, own: int) -> list[Term]:
    """Returns the states of ZeroOuter: rotated shards and their gradients, and 1/K of each with its optimizer state."""
    source, moments, over = (
        "rtp_ext.outer.ZeroOuter",
        OPTIMIZER_MOMENTS[strategy.optimizer],
        [("replicas", strategy.dp)],
    )
    terms = [
        term("parameters", "shards that rotate, float32", source, bytes_per_value=4, values=values),
        term("parameters", "registered pieces, float32", source, over, bytes_per_value=4, values=own),
        term("gradients", "of shards, float32", source, bytes_per_value=4, values=own),
        term("gradients", "of pieces, float32", source, over, bytes_per_value=4, values=own),
    ]
    if moments:
        terms.append(
            term("optimizer", strategy.optimizer, source, over, moments=moments, bytes_per_value=4, values=own)
        )
    return terms


def _offload_terms(strategy: Strategy, values: float) -> list[Term]:
    """Returns buffers of offloading: the shards and gradients of two layers are on the device at a time."""
    name, source = "unsharded_buffers", "torch's CPUOffloadPolicy, rtp_ext.ring.cpu_offload"
    return [
        term(name, "shards copied from the host, float32", source, layers=2, bytes_per_value=4, values=values),
        term(name, "gradients copied to the host, float32", source, layers=2, bytes_per_value=4, values=values),
    ]


def buffer_terms(
    model: ModelSpec,
    strategy: Strategy,
    stage: int,
    counts: list[Term],
    hosts: int = 1,
    planned: float = 0.0,
) -> list[Term]:
    """Returns the slots of rotation, or temporary unsharded weights and gradients.

    Sources: csrc/engine; torch's `fully_shard`, DistributedDataParallel and autocast; torchtitan's settings under
    pipelines.
    """
    if strategy.rtp > 1:
        shard = layer_count(model, strategy) / strategy.rtp
        return [
            *_slot_terms(model, strategy, stage, hosts, planned),
            *(_offload_terms(strategy, shard) if strategy.offload else []),
        ]
    name, values = "unsharded_buffers", sum(count.value for count in counts)
    compute, reduce = strategy.param_bytes, strategy.reduce_bytes
    layer = layer_count(model, strategy)
    torch = strategy.effective_stack == "torch"
    if strategy.zero < 2 or (strategy.zero == 2 and not torch):
        terms = []
        if torch and compute < 4:
            what = "weights cast by autocast"
            terms.append(term(name, what, "torch.autocast's cache", bytes_per_value=compute, values=values))
        if torch and strategy.shards > 1:
            what = "gradient buckets, float32"
            terms.append(term(name, what, "DistributedDataParallel", bytes_per_value=4, values=values))
        return terms
    if strategy.pp > 1 or strategy.zero == 2:
        source = "torchtitan under pipelines: reshard_after_forward=False, gradients accumulate unsharded"
        grown = values if strategy.pp > 1 else layer
        return [
            term(name, "weights gathered for the step", source, bytes_per_value=compute, values=values),
            term(name, "unsharded gradients", source, bytes_per_value=reduce, values=grown),
        ]
    source = "fully_shard: the layer in use and the prefetched one"
    root, kept, widest = values - layer * model.layers, [], layer
    if model.tied:
        kept = [term(name, "gathered root", "fully_shard", bytes_per_value=compute, values=root)]
    else:  # torchtitan's units: the embedding is gathered only while it runs, and the head is reduced before the layers
        widest = max(layer, root - model.embedding_parameters / strategy.tp)
    offload = _offload_terms(strategy, layer / strategy.shards) if strategy.offload else []
    return [
        *offload,
        term(name, "gathered layers", source, layers=min(2, model.layers), bytes_per_value=compute, values=layer),
        *kept,
        term(name, "unsharded gradients of the widest unit", source, bytes_per_value=compute, values=widest),
        term(name, "input of its reduce-scatter", source, bytes_per_value=reduce, values=widest),
    ]


def buffer_bytes(model: ModelSpec, strategy: Strategy) -> float:
    """Returns the bytes of the buffers that `fully_shard` takes on the ranks of a ring, with the same dtypes."""
    layer = layer_count(model, strategy)
    widest = max(layer, 0.0 if model.tied else (model.head_parameters + model.final_norm_parameters) / strategy.tp)
    root = model.embedding_parameters if model.tied else 0
    compute = strategy.param_bytes
    return compute * (min(2, model.layers) * layer + root) + (compute + strategy.reduce_bytes) * widest


def _slot_terms(model: ModelSpec, strategy: Strategy, stage: int, hosts: int, planned: float) -> list[Term]:
    """planned: bytes of the buffers of a plan of whole blocks; embedding and head have slots of one shard."""
    name, source = "rotation_slots", "csrc/schedule/footprint.cpp, csrc/schedule/schedule.cpp: slots of a pass"
    held = rotation_bytes(model, strategy, stage, hosts)
    if planned > held.weight_slots_bytes + held.gradient_slots_bytes:
        return [term(name, "slots of groups and look-ahead", "rtp_ext/planner/rotation/family.py", bytes=planned)]
    kinds = (
        ("weight", held.weight_slot_sizes, held.weight_slots_bytes, strategy.travel_bytes),
        ("gradient", held.gradient_slot_sizes, held.gradient_slots_bytes, strategy.gradient_travel_bytes),
    )
    what = "buffer of dequantized weights"
    terms = [term(name, what, source, bytes=held.scratch_bytes)] if held.scratch_bytes else []
    for kind, sizes, peak, element in kinds:
        if sum(sizes) != peak or strategy.recipe:  # the pool replaced slots, or shards have codes and scales
            terms.append(term(name, f"{kind} slots at the peak of the pool", source, bytes=peak))
            continue
        for size, count in sorted(Counter(sizes).items()):
            what = f"{kind} slots, each for the largest shard, parts aligned to 64 bytes"
            terms.append(
                term(name, what, source, slots=count, bytes_per_value=element, values_of_a_shard=size / element)
            )
    return terms
