"""What rotation holds: the slots and sharded states of the engine, byte for byte.

The rules are those of csrc/schedule (slots of a pass), csrc/engine (layout of a slot, the pool, staging) and
csrc/ops/rotation.cpp (pieces).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rtp_ext.planner.constants import check_at_least, check_known
from rtp_ext.planner.model import ModelSpec

_STEPS = 2  # the first learns the order, the second prefetches
SLOT_CAP = 64 << 20  # bytes; the default of rtp_ext.Ring
_ALIGNMENT = 64  # bytes, of a part inside a slot
KINDS = ("linear", "embedding", "bundle", "head")


def shard_sizes(extent: int, ranks: int) -> list[int]:
    """Rows of every rank's shard: ceil(extent / ranks) each, the last smaller or empty (DTensor's Shard)."""
    return [shard_size(extent, ranks, rank) for rank in range(ranks)]


def shard_size(extent: int, ranks: int, rank: int) -> int:
    """Of one rank, as `shard_sizes`."""
    chunk = -(-extent // ranks)
    return min(max(extent - rank * chunk, 0), chunk)


@dataclass(frozen=True)
class Weight:
    """A whole parameter of shape `shape`, cut along `dim`. A scalar is not cut."""

    shape: tuple[int, ...]
    dim: int = 0

    def shard_elements(self, ranks: int, rank: int = 0) -> int:
        """Of one rank. Rank 0 has most."""
        if not self.shape:
            return 1
        rest = math.prod(self.shape[: self.dim]) * math.prod(self.shape[self.dim + 1 :])
        return rest * shard_size(self.shape[self.dim], ranks, rank)

    @property
    def is_bias(self) -> bool:
        return len(self.shape) < 2


@dataclass(frozen=True)
class Rotation:
    """One rotated operation: the weights that travel together, in order.

    kind: `linear` (one layer, or several such as q, k, v), `embedding`, `bundle` (an MLP or experts, whose weight
    gradients need what their input gradients compute) or `head` (vocabulary head and loss as one).
    input_gradient: whether backward makes one; the first layer of a model makes none.
    shared: the weights are those of an earlier operation too (a tied head), and count once among the states.
    """

    kind: str
    weights: tuple[Weight, ...]
    input_gradient: bool = True
    shared: bool = False

    def __post_init__(self) -> None:
        check_known("kind of rotation", self.kind, KINDS)
        if not self.weights:
            raise ValueError("rotation: expected at least one weight, got none")

    @property
    def bundle(self) -> bool:
        return self.kind in ("bundle", "head")

    @property
    def backward_weights(self) -> tuple[Weight, ...]:
        """Those that travel in backward: a bundle's all, else the ones that input gradients are made with."""
        if self.bundle:
            return self.weights
        if self.kind == "embedding" or not self.input_gradient:
            return ()
        return tuple(weight for weight in self.weights if not weight.is_bias)


@dataclass(frozen=True)
class RotationBytes:
    """Bytes of one rank. Slots are those of the pool at its peak; `*_slot_sizes` lists them at the end of a step."""

    weight_slots_bytes: int
    gradient_slots_bytes: int
    weight_slot_sizes: tuple[int, ...]
    gradient_slot_sizes: tuple[int, ...]
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    optimizer_steps_bytes: int  # AdamW's step counters, float32 scalars on the host; not part of optimizer_bytes

    @property
    def slots_bytes(self) -> int:
        return self.weight_slots_bytes + self.gradient_slots_bytes


class _Pool:
    """SlotPool of csrc/engine/executor.cpp, one channel: bytes of what is free and leased, and the peak."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.bytes = 0
        self.peak = 0

    def lease(self, size: int) -> int:
        self.free.sort()
        found = next((slot for slot in self.free if slot >= size), None)
        if found is not None:
            self.free.remove(found)
            return found
        if self.free:  # all free slots are too small: the largest makes way
            self.bytes -= self.free.pop()
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        return size


@dataclass(frozen=True)
class _Pass:
    """One schedule run: sizes of its slots, and how many of each."""

    weight_size: int | None
    gradient_size: int | None
    weight_slots: int
    gradient_slots: int
    moves: bool


def _lease(phase: Sequence[_Pass], weights: _Pool, gradients: _Pool, stages: bool, *, prefetch: bool) -> None:
    """All forwards or all backwards of a step. With prefetching a pass that is down to its last slot returns the others
    and leases what the next one's first hop lands in (csrc/engine/prefetch.cpp)."""
    ahead: list[int] = []
    for index, now in enumerate(phase):
        leased, ahead = ahead, []
        if now.weight_size is not None:
            wanted = now.weight_slots + stages - len(leased)
            leased += [weights.lease(now.weight_size) for _ in range(wanted)]
        if now.gradient_size is not None:
            gradients.free += [gradients.lease(now.gradient_size) for _ in range(now.gradient_slots)]
        following = phase[index + 1] if index + 1 < len(phase) else None
        if prefetch and following and following.weight_size is not None and not following.moves:
            weights.free += leased[1:]
            ahead = [weights.lease(following.weight_size) for _ in range(1 + stages)]
            leased = leased[:1]
        weights.free += leased


def _slot_bytes(parts: Sequence[int], element: int) -> int:
    """Of a slot that any owner's shard fits into: the largest's, rank 0's. `parts`: elements of every part."""
    return sum(_align(part * element) for part in parts)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def pieces_of(rotation: Rotation, ranks: int, cap: int, element: int) -> list[tuple[int, int]]:
    """First row and number of rows of every piece that travels on its own; one if nothing is capped."""
    main = rotation.weights[0]
    matrices = sum(not weight.is_bias for weight in rotation.weights)
    whole = main.shape[0] if rotation.kind == "embedding" and main.dim == 1 else -(-main.shape[0] // ranks)
    capped = cap > 0 and rotation.kind != "bundle" and matrices == 1 and len(main.shape) == 2
    if rotation.kind == "linear" and main.dim == 1:
        capped = False
    if not capped:
        return [(0, max(whole, 1))]
    if rotation.kind == "embedding":
        row_elements = main.shape[1] if main.dim == 0 else -(-main.shape[1] // ranks)
    else:
        row_elements = main.shape[1] + (len(rotation.weights) - matrices)
    rows = min(max(cap // max(row_elements * element, 1), 1), max(whole, 1))
    return [(first, rows) for first in range(0, max(whole, 1), rows)]


def _most_elements(weight: Weight, ranks: int, piece: tuple[int, int], pieces: int) -> int:
    """Elements of rank 0's shard that lie in a piece."""
    elements = weight.shard_elements(ranks)
    if pieces == 1:
        return elements
    first, rows = piece
    size = shard_size(weight.shape[0], ranks, 0) if weight.dim == 0 else weight.shape[0]
    return elements // size * min(max(size - first, 0), rows) if size else 0


def rtp_bytes(
    rotations: Iterable[Rotation],
    ranks: int,
    *,
    rank: int = 0,
    others: Iterable[Weight] = (),
    param_bytes: int = 4,
    compute_bytes: int | None = None,
    reduce_bytes: int = 4,
    optimizer_moments: int = 2,
    slot_cap: int = SLOT_CAP,
    in_place: bool = False,
    sends_anywhere: bool = True,
    receives_anywhere: bool = True,
) -> RotationBytes:
    """Slots and states of one rank that trains with rotation.

    Args:
        rotations: all rotated operations of the model in the order of its forward; backward runs them in reverse.
        others: parameters that do not rotate, such as those of norms; they are sharded along dimension 0.
        param_bytes: of a value of the home shards; gradients and optimizer state have as many.
        compute_bytes: of a value that travels, if shards are cast first (a staging slot holds the cast home shard).
        reduce_bytes: of a value of a travelling gradient.
        optimizer_moments: tensors of optimizer state for each parameter; 2 for AdamW.
        slot_cap: of the ring; 0: none.
        sends_anywhere, receives_anywhere: whether hops start from and land in any memory (nccl, c10d, emulated) or in
            slots only (shm receives so).

    Slots: up to two for weights (one in place) and two for gradients, each of the largest shard of the operation, its
    parts aligned to 64 bytes; one more weight slot where shards are cast, or can leave from slots only. The pool keeps
    them; a slot that is too small makes way. Sources: csrc/schedule/schedule.cpp, csrc/engine/executor.cpp.
    """
    check_at_least("rtp_bytes", 1, ranks=ranks, param_bytes=param_bytes, reduce_bytes=reduce_bytes)
    if not 0 <= rank < ranks:
        raise ValueError(f"rtp_bytes: expected 0 <= rank < {ranks}, got {rank}")
    compute = compute_bytes or param_bytes
    steps = list(rotations)
    weights, gradients = _Pool(), _Pool()

    cast = compute != param_bytes
    stages = cast or (ranks > 1 and not sends_anywhere)
    passes: list[list[_Pass]] = [[], []]

    def size(parts: Sequence[Weight], piece: tuple[int, int], pieces: int, element: int) -> int | None:
        return _slot_bytes([_most_elements(p, ranks, piece, pieces) for p in parts], element) if parts else None

    for rotation in steps:
        pieces = pieces_of(rotation, ranks, slot_cap, max(compute, reduce_bytes))
        whole = len(pieces) == 1
        moves = in_place and whole and not cast and sends_anywhere and receives_anywhere
        for index, parts in enumerate((rotation.weights, rotation.backward_weights)):
            two = ranks > 2 or (ranks == 2 and (rotation.bundle or not receives_anywhere))
            found = [
                _Pass(
                    size(parts, piece, len(pieces), compute),
                    size(rotation.weights, piece, len(pieces), reduce_bytes) if index else None,
                    min(1 if moves else 2, ranks - 1),
                    0 if ranks == 1 else 2 if two else 1,
                    moves,
                )
                for piece in pieces
            ]
            passes[index] = [*passes[index], *found] if index == 0 else [*found, *passes[index]]
    for round_ in range(_STEPS):
        for phase in passes:
            _lease(phase, weights, gradients, stages, prefetch=round_ > 0 and ranks > 1)

    resident = [weight for rotation in steps if not rotation.shared for weight in rotation.weights]
    states = [*resident, *others]
    own = sum(weight.shard_elements(ranks, rank) for weight in states) * param_bytes
    stored = own
    if in_place and compute == param_bytes and sends_anywhere and receives_anywhere and ranks > 1:
        stored += sum(weight.shard_elements(ranks) - weight.shard_elements(ranks, rank) for weight in resident) * (
            param_bytes
        )  # home shards have room for the largest
    return RotationBytes(
        weights.peak,
        gradients.peak,
        tuple(sorted(weights.free)),
        tuple(sorted(gradients.free)),
        stored,
        own,
        own * optimizer_moments,
        4 * len(states) if optimizer_moments == 2 else 0,
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
) -> tuple[list[Rotation], list[Weight]]:
    """What `fully_rotate` makes of a model: its rotations in the order of forward, and what does not rotate.

    tp: tensor-parallel ranks that share every weight. layers, embedding, head: those of one pipeline stage. own_head:
    a tied head has a copy of its own, on another stage than the embedding.
    """
    h, q, kv, f = model.hidden, model.query_features // tp, model.kv_features // tp, model.ffn // tp
    vocab = -(-model.vocab // tp)

    def linear(rows: int, columns: int, bias: bool) -> tuple[Weight, ...]:
        return (Weight((rows, columns)), Weight((rows,))) if bias else (Weight((rows, columns)),)

    def one(weights: tuple[Weight, ...]) -> Rotation:
        return Rotation("linear", weights)

    layer: list[Rotation] = []
    projections = [linear(rows, h, model.qkv_bias) for rows in (q, kv, kv)]
    if model.family == "gpt":  # one fused layer
        projections = [linear(q + 2 * kv, h, model.qkv_bias)]
    if bundle:
        layer.append(one(tuple(weight for projection in projections for weight in projection)))
    else:
        layer += [one(projection) for projection in projections]
    layer.append(one(linear(h, q, model.projection_bias)))
    if model.experts:
        gates = 2 if model.gated else 1
        layer.append(Rotation("bundle", (Weight((model.experts, gates * f, h)), Weight((model.experts, h, f)))))
    elif bundle:
        up = linear(f, h, model.mlp_bias)
        down = (Weight((h, f), 1), *((Weight((h,)),) if model.mlp_bias else ()))
        layer.append(Rotation("bundle", (*(up if model.gated else ()), *up, *down)))
    else:
        layer += [one(linear(f, h, model.mlp_bias))] * (2 if model.gated else 1) + [one(linear(h, f, model.mlp_bias))]

    count = model.layers if layers is None else layers
    rotations: list[Rotation] = []
    if embedding:
        # a tied table is also the head's weight, cut along its outputs
        rotations.append(Rotation("embedding", (Weight((vocab, h), 0 if model.tied else 1),)))
        if model.positions:
            rotations.append(Rotation("embedding", (Weight((model.positions, h), 1),)))
    rotations += layer * count
    norm = [Weight((h,))] * (2 if model.norm_bias else 1)
    others = norm * (2 * count) + [Weight((model.head_dim,))] * (2 * count * model.qk_norm)
    others += [Weight((model.experts, h))] * (count if model.experts else 0)
    if head:
        rotations.append(
            Rotation("head" if fused_loss else "linear", (Weight((vocab, h)),), shared=model.tied and not own_head)
        )
        others += norm
    return rotations, others
