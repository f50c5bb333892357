"""Memory of rotation: the slots and sharded states of the engine, exact to the byte.

The engine computes slots, chunks and pool (csrc/schedule/footprint.cpp); this module lists the tensors that travel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rtp_ext.planner.constants import check_at_least, check_known
from rtp_ext.planner.native import engine
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.recipe_planes import Recipe

# by kind: the operation, in the table of csrc/schedule/operations.h
KINDS = {"linear": "linear", "embedding": "embedding", "bundle": "mlp", "head": "linear cross-entropy"}


@dataclass(frozen=True)
class Weight:
    """A full parameter of shape `shape`, cut along `dim`. Scalars are not cut.

    frozen: the format, `nf4`, `mxfp4` or `int8`, of a frozen weight that is stored in blocks: [out, in], or [experts,
    out, in], whose experts fill whole blocks.
    trained: whether a weight that is not in blocks has a gradient; those in blocks have none.
    recipe: of a matrix [outputs, inputs], or of those of experts, that travels in 8 bits. gpu: its scales have the
        layout of a GPU.
    """

    shape: tuple[int, ...]
    dim: int = 0
    frozen: str | None = None
    trained: bool = True
    recipe: Recipe | None = None
    gpu: bool = True

    def __post_init__(self) -> None:
        if self.frozen is None:
            return
        if len(self.shape) not in (2, 3) or self.dim != 0:
            raise ValueError(
                f"rotation: expected a frozen weight of 2 or 3 dimensions that is cut along the first, got "
                f"{self.shape} cut along {self.dim}"
            )
        if len(self.shape) == 3 and self.facts.rows_of_group > 1:
            raise ValueError(
                f"rotation: expected experts that fill whole blocks of {self.frozen}, got {math.prod(self.shape[1:])} "
                f"numbers in each of {self.shape}"
            )

    @functools.cached_property
    def facts(self) -> Any:
        """It in the engine's form (csrc/schedule/operations.h)."""
        codes = self.recipe and self.recipe.shard_planes(gpu=self.gpu)
        return engine().ParameterFacts(self.shape, self.dim, self.frozen, codes=codes)

    def shard_shape(self, ranks: int, rank: int = 0) -> tuple[int, ...]:
        """Returns the shape of one rank's shard. Rank 0 has the largest."""
        return tuple(self.facts.shard(ranks, rank))

    def shard_elements(self, ranks: int, rank: int = 0) -> int:
        return math.prod(self.facts.shard(ranks, rank))

    def held_bytes(self, ranks: int, rank: int, element_bytes: int) -> int:
        """Returns the bytes of one rank's shard at rest."""
        return self.facts.held_bytes(ranks, rank, element_bytes)

    def travelling_bytes(self, ranks: int, value_bytes: float, *, backward: bool = False) -> float:
        """Returns the bytes of the largest shard in a hop. value_bytes: of a value that is neither in blocks nor in 8
        bits."""
        if self.frozen is not None:
            return float(self.held_bytes(ranks, 0, 0))
        if self.recipe is not None:
            return float(self.recipe.travels(*self.facts.shard(ranks, 0), backward=backward, gpu=self.gpu))
        return self.shard_elements(ranks) * value_bytes

    def codes_bytes(self, ranks: int, rank: int = 0) -> int:
        """Returns the bytes of the codes that one rank keeps beside its shard."""
        return 0 if self.recipe is None else self.recipe.memory(*self.facts.shard(ranks, rank), gpu=self.gpu)

    @property
    def has_gradient(self) -> bool:
        return self.trained and self.frozen is None

    @property
    def is_bias(self) -> bool:
        return len(self.shape) < 2


@dataclass(frozen=True)
class RotatedOperation:
    """One rotated operation: the weights that travel together, in order.

    kind: `linear` (one layer, or several such as q, k, v), `embedding`, `bundle` (an MLP or experts, whose weight
    gradients need intermediate results of their input gradients) or `head` (vocabulary head and loss in one).
    input_gradient: whether backward computes one; the first layer of a model does not.
    shared: an earlier operation has the same weights (a tied head); they count once among the states.
    parts: number of parts that experts are divided into. `weights` belong to one part, whose ring has ranks / parts
        ranks.
    """

    kind: str
    weights: tuple[Weight, ...]
    input_gradient: bool = True
    shared: bool = False
    parts: int = 1

    def __post_init__(self) -> None:
        check_known("kind of rotation", self.kind, KINDS)
        if not self.weights:
            raise ValueError("rotation: expected at least one weight, got none")
        for weight in self.weights:
            if weight.frozen is not None and not self._has_blocks(weight):
                raise ValueError(
                    "rotation: expected frozen weights in blocks of linear layers, experts and heads, got "
                    f"{weight.shape} in an operation of kind {self.kind}"
                )

    def _has_blocks(self, weight: Weight) -> bool:
        if self.kind == "bundle":  # MLPs whose layers have adapters rotate layer by layer
            return len(weight.shape) == 3
        return self.kind != "embedding" and len(weight.shape) == 2 and not (self.kind == "head" and self.shared)

    @functools.cached_property
    def facts(self) -> Any:
        """It in the engine's form (csrc/schedule/operations.h)."""
        key, matrices = KINDS[self.kind], [weight for weight in self.weights if not weight.is_bias]
        if self.kind == "bundle" and any(len(weight.shape) == 3 for weight in self.weights):
            key = "experts"
        elif self.kind == "linear" and any(weight.dim > 0 for weight in matrices):
            key = "partial linear"
        return engine().OperationFacts(key, [weight.facts for weight in self.weights], self.input_gradient)

    @property
    def bundle(self) -> bool:
        return self.facts.kind.bundle

    @property
    def recipe(self) -> Recipe | None:
        """Of its products; None: they are wide. Weights that travel together have one."""
        return self.weights[0].recipe

    @property
    def trains(self) -> bool:
        """Whether gradients of weights travel."""
        return any(weight.has_gradient for weight in self.weights)

    @property
    def backward_weights(self) -> tuple[Weight, ...]:
        """Weights that travel in backward: all of a bundle, otherwise those that the input gradient needs."""
        return tuple(weight for place, weight in enumerate(self.weights) if self.facts.travels(place, "backward"))

    def chunks(self, ranks: int, element_bytes: int) -> list[float]:
        """Returns the parts of the largest shard that are its chunks under the default slot cap of a ring."""
        count, rows = self.facts.chunks(ranks, element_bytes, engine().SLOT_CAP)
        if count == 1:
            return [1.0]
        shard = self.weights[0].shard_shape(ranks)[0]
        return [min(rows, shard - first) / shard for first in range(0, shard, rows)]


@dataclass(frozen=True)
class RotationBytes:
    """Bytes of one rank. Slots are those of the pool at its peak; `*_slot_sizes` lists them after a step."""

    weight_slots_bytes: int
    gradient_slots_bytes: int
    weight_slot_sizes: tuple[int, ...]
    gradient_slot_sizes: tuple[int, ...]
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    optimizer_steps_bytes: int  # AdamW's step counters, float32 scalars on the host; not in optimizer_bytes
    scratch_bytes: int = 0  # buffer for dequantized weights
    mailbox_bytes: int = 0  # over shm: mailboxes, in which hops of at most 64 KiB wait for their receiver, at most
    codes_bytes: int = 0  # 8 bits: of the own shards, beside them


def rtp_bytes(
    rotations: Iterable[RotatedOperation],
    ranks: int,
    *,
    rank: int = 0,
    others: Iterable[Weight] = (),
    param_bytes: int = 4,
    frozen_bytes: int | None = None,
    compute_bytes: int | None = None,
    reduce_bytes: int = 4,
    optimizer_moments: int = 2,
    slot_cap: int | None = None,
    in_place: bool = False,
    sends_anywhere: bool = True,
    receives_anywhere: bool = True,
    travel: str | None = None,
    gradient_route: str = "chain",
    gradient_travel: str | None = None,
    gradients_apart: bool = True,
    hosts: int = 1,
    late_gradients: int = 0,
    look_ahead: int | None = None,
) -> RotationBytes:
    """Computes slots and states of one rank that trains with rotation.

    Args:
        rotations: all rotated operations of the model in the order of its forward; backward runs them in reverse.
            Frozen weights have neither gradients nor optimizer state.
        others: parameters that do not rotate, such as those of norms; they are sharded along dimension 0.
        param_bytes: of a value of the local shards; gradients and optimizer state have the same.
        frozen_bytes: of a value of frozen weights that are not in blocks; None: param_bytes.
        compute_bytes: of a value that travels, if shards are cast first (a staging slot holds the cast local shard).
        reduce_bytes: of a value of a travelling gradient.
        optimizer_moments: tensors of optimizer state per parameter; 2 for AdamW.
        slot_cap: of the ring; 0: none; None: the ring's default.
        sends_anywhere, receives_anywhere: whether hops start from and arrive in any memory (nccl, c10d, emulated) or
            only in slots, after small hops have waited in mailboxes (shm receives so).
        travel: format in which weights travel, as in `rtp_ext.Ring`; excludes in_place.
        gradient_route, gradient_travel: route of gradients, `chain` or `direct`, and their format; None:
            `reduce_bytes` per number. `direct` sums in float32 (float64 for 8 bytes).
        gradients_apart: whether contributions that go directly arrive in slots of their own: `buffers` of the ring.
        hosts: number of hosts of a two-level ring; 1: a flat ring.
        late_gradients: of the ring: passes whose gradients may still be arriving while the next one runs, each with
            its own slots. 1 on GPUs, and on CPUs over a network.
        look_ahead: bytes that are sent ahead, beyond slots that are left: `buffers` of the ring, 0 for `lean`; None:
            what the largest pass receives, at least three slots, as for `auto`.

    Slots: up to two for weights (one in place) and two for gradients, each of the largest shard of the operation, its
    parts aligned to 64 bytes; one more weight slot where shards are cast, or can be sent from slots only; and those of
    shards that are ahead. Gradient route direct takes three for gradients, R + 1 with gradients_apart (a ring's
    buffers), and one in the dtype of their sum where they travel quantized. The pool keeps slots and replaces those
    that are too small. Source: csrc/schedule/footprint.cpp, which the engine itself runs.
    """
    check_at_least("rtp_bytes", 1, ranks=ranks, param_bytes=param_bytes, reduce_bytes=reduce_bytes)
    if in_place and travel is not None:
        raise ValueError(f"rtp_bytes: expected in_place=False with travel, got True and {travel!r}")
    if gradient_travel not in (None, "int8") or (gradient_travel and gradient_route != "direct"):
        raise ValueError(
            "rtp_bytes: expected gradient_travel None, or 'int8' with gradient_route direct, got "
            f"{gradient_travel!r} with {gradient_route}"
        )
    if not 0 <= rank < ranks:
        raise ValueError(f"rtp_bytes: expected 0 <= rank < {ranks}, got {rank}")
    compute = compute_bytes or param_bytes
    steps = list(rotations)
    reach = {
        "cast": compute != param_bytes,
        "sends_anywhere": sends_anywhere,
        "receives_anywhere": receives_anywhere,
    }
    pools = functools.partial(
        engine().footprint,
        ranks=ranks,
        in_place=in_place,
        compute_bytes=compute,
        reduce_bytes=reduce_bytes,
        slot_cap=engine().SLOT_CAP if slot_cap is None else slot_cap,
        travel=travel,
        gradient_route=gradient_route,
        sum_bytes=max(4, reduce_bytes),
        gradients_quantized=gradient_travel is not None,
        gradients_apart=gradients_apart,
        route="two-level" if hosts > 1 else "ring",
        hosts=hosts,
        late=late_gradients,
        look_ahead=look_ahead,
        **reach,
    )
    held = pools([rotation.facts for rotation in steps])
    training = [rotation.facts for rotation in steps if rotation.trains]
    gradients = held if len(training) == len(steps) else pools(training)

    resident = [weight for rotation in steps if not rotation.shared for weight in rotation.weights]
    states = [*resident, *others]
    trained = [weight for weight in states if weight.has_gradient]
    own = sum(weight.shard_elements(ranks, rank) for weight in trained) * param_bytes
    frozen = [weight for weight in states if not weight.has_gradient]
    stored = own + sum(weight.held_bytes(ranks, rank, frozen_bytes or param_bytes) for weight in frozen)
    if in_place and ranks > 1 and engine().travels_in_place(**reach):
        stored += sum(weight.shard_elements(ranks) - weight.shard_elements(ranks, rank) for weight in resident) * (
            param_bytes
        )  # the largest shard fits into every local shard
    return RotationBytes(
        held.weight.peak_bytes,
        gradients.gradient.peak_bytes,
        tuple(sorted(held.free_weight)),
        tuple(sorted(gradients.free_gradient)),
        stored,
        own,
        own * optimizer_moments,
        4 * len(trained) if optimizer_moments == 2 else 0,
        held.scratch.peak_bytes,
        held.mailboxes,
        sum(weight.codes_bytes(ranks, rank) for weight in resident),
    )


def rotations_of(
    model: ModelSpec,
    *,
    bundle: bool | str = True,
    fused_loss: bool = False,
    tp: int = 1,
    layers: int | None = None,
    embedding: bool = True,
    head: bool = True,
    own_head: bool = False,
    frozen: str | None = None,
    lora_rank: int = 0,
    recipe: Recipe | None = None,
    ranks: int = 1,
    gpu: bool = True,
    parts: int = 1,
) -> tuple[list[RotatedOperation], list[Weight]]:
    """Returns the rotations that `fully_rotate` makes of a model, in the order of forward, and the other parameters.

    tp: tensor-parallel ranks that share every weight. layers, embedding, head: those of one pipeline stage. own_head:
    a tied head has its own copy, on another stage than the embedding. frozen, lora_rank: of `Strategy`; adapters, which
    all linear layers of a dense model have, end the bundles of MLPs. Experts have none, and are one operation. With
    `frozen` alone rotations are those of `bundle=False`. Experts that do not fill whole blocks, tied heads, and heads
    without `fused_loss` are not stored in blocks.
    recipe: of linear layers whose sizes and cuts fit it on a ring of `ranks`; MLPs rotate layer by layer, gate and up
    together; of experts whose sizes fit it, unless bundles recompute. gpu: as of `Weight`.
    parts: ranks that experts are divided over.

    Raises:
        ValueError: a recipe that no layer fits.
    """
    h, q, kv, f = model.hidden, model.query_features // tp, model.kv_features // tp, model.ffn // tp
    vocab, trained = -(-model.vocab // tp), frozen is None and not lora_rank

    def weight(*shape: int, dim: int = 0) -> Weight:
        return Weight(shape, dim, trained=trained)

    def experts(*shapes: tuple[int, int, int]) -> tuple[Weight, ...]:
        found = []
        fits = (
            recipe
            and bundle != "recompute"
            and not any(recipe.refusal(rows, columns, gpu=gpu) for _, rows, columns in shapes)
        )
        for shape in shapes:
            whole = frozen is not None and engine().rows_of_blocks(frozen, math.prod(shape[1:])) == 1
            stored = frozen if whole else None
            found.append(Weight(shape, frozen=stored, trained=trained, recipe=recipe if fits else None, gpu=gpu))
        return tuple(found)

    def linear(rows: int, columns: int, bias: bool) -> tuple[Weight, ...]:
        fits = recipe and not recipe.refusal(rows, columns, tuple(engine().shard_sizes(rows, ranks)), gpu=gpu)
        matrix = Weight((rows, columns), frozen=frozen, trained=trained, recipe=recipe if fits else None, gpu=gpu)
        return (matrix, weight(rows)) if bias else (matrix,)

    def alone(rows: int, columns: int, bias: bool) -> list[RotatedOperation]:
        adapter = [(Weight((lora_rank, columns)),), (Weight((rows, lora_rank)),)] if lora_rank else []
        return [RotatedOperation("linear", weights) for weights in (linear(rows, columns, bias), *adapter)]

    def together(layers: list[tuple[int, int, bool]]) -> list[RotatedOperation]:
        """Of layers with one input."""
        found = [linear(*each) for each in layers]
        if not bundled or any(each[0].recipe != found[0][0].recipe for each in found):
            return [rotation for each in layers for rotation in alone(*each)]
        return [RotatedOperation("linear", tuple(part for each in found for part in each))]

    bundled = bool(bundle) and trained
    projections = [(rows, h, model.qkv_bias) for rows in (q, kv, kv)]
    if model.family == "gpt":  # one fused layer
        projections = [(q + 2 * kv, h, model.qkv_bias)]
    layer = together(projections) + alone(h, q, model.projection_bias)
    into, out = [(f, h, model.mlp_bias)] * (1 + model.gated), (h, f, model.mlp_bias)
    scaled = recipe is not None and any(linear(*each)[0].recipe for each in (*into, out))
    if model.experts:
        gates = 2 if model.gated else 1
        own = model.experts // parts
        layer.append(RotatedOperation("bundle", experts((own, gates * f, h), (own, h, f)), parts=parts))
    elif bundled and not scaled:
        up = linear(f, h, model.mlp_bias)
        down = (weight(h, f, dim=1), *((weight(h),) if model.mlp_bias else ()))
        layer.append(RotatedOperation("bundle", (*(up if model.gated else ()), *up, *down)))
    else:
        layer += together(into) + alone(*out)
    if recipe is not None and layers != 0 and not any(each.recipe for each in layer):
        raise ValueError(f"recipe {recipe.name}: expected linear layers whose sizes fit it, got none in {model.name}")

    count = model.layers if layers is None else layers
    rotations: list[RotatedOperation] = []
    if embedding:
        # a tied table is also the weight of the head, cut along its outputs
        rotations.append(RotatedOperation("embedding", (weight(vocab, h, dim=0 if model.tied else 1),)))
        if model.positions:
            rotations.append(RotatedOperation("embedding", (weight(model.positions, h, dim=1),)))
    rotations += layer * count
    norm = [weight(h)] * (2 if model.norm_bias else 1)
    others = norm * (2 * count) + [weight(model.head_dim)] * (2 * count * model.qk_norm)
    others += [weight(model.experts, h)] * (count if model.experts else 0)
    if head:
        kind = "head" if fused_loss else "linear"
        table = Weight((vocab, h), frozen=frozen if fused_loss and not model.tied else None, trained=trained)
        rotations.append(RotatedOperation(kind, (table,), shared=model.tied and not own_head))
        others += norm
    return rotations, others
