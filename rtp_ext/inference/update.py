"""update_weights: new values for a model that computes forwards only."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import nn

from rtp_ext.convert.methods.stream_weights import BUCKET_BYTES, OTHER_NAMES
from rtp_ext.inference.agreement import agree
from rtp_ext.inference.from_model import copy_from, shape_of, write
from rtp_ext.ring.inference import INFERENCE, InferenceRing

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@torch.no_grad()
def update_weights(model: nn.Module, source: nn.Module | NamedTensors, *, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Copies new values into a model that `rotate_for_inference` has converted. Returns the number of tensors.

    Collective: a rank begins when all ranks have called, so that no forward runs meanwhile, and returns when all have
    ended. Names that do not come keep their values; other dtypes are cast, and values of weights in blocks are encoded
    again.

        rtp_ext.update_weights(inference, training)                          # of a model on the same ranks
        rtp_ext.update_weights(inference, rtp_ext.stream_weights(training))  # of any (name, whole tensor)

    Args:
        source: a model on the same ranks, converted by fully_rotate or not, or named tensors. Of a model, shards that
            both models cut alike are copied where they lie. The others travel in buckets, and each rank keeps its part
            of every bucket. A rank holds one whole weight at a time where several dimensions of a mesh cut the weight,
            or where it is in blocks; no rank holds another whole weight that is cut. A weight that will be in blocks
            holds this rank's rows meanwhile. Named tensors are whole, the same on every rank, in any order; they are
            consumed one by one. A tensor that `stream_weights` yields for several names of a tied model is written
            under all of them.
        bucket_bytes: the most bytes that travel at once, but at least one row of a tensor. Of a model only.

    Raises ValueError for a model that was not converted, and for an unknown name, another shape or names that differ
    between ranks; RotationError on the other ranks. With named tensors the weights are then partly new: update again.
    RingTimeout, which names a rank that does not call within the timeout of the ring; the ring cannot be used any more.
    """
    ring = model.__dict__.get(INFERENCE)
    if not isinstance(ring, InferenceRing):
        kind = type(model).__name__
        raise ValueError(f"update_weights: expected a model that rotate_for_inference converted, got a {kind}")
    if bucket_bytes < 1:
        raise ValueError(f"update_weights: expected bucket_bytes >= 1, got {bucket_bytes}")
    targets = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    ring.end_forward()  # shards that were pulled ahead are old from now on
    ring.synchronize()  # other ranks write without waiting for what this one still reads
    kinds = ring.exchange("a model" if isinstance(source, nn.Module) else "named tensors")
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"update_weights: expected {kinds[0]} on every rank, as on rank 0, got {kind} on rank {rank}"
            )
    if isinstance(source, nn.Module):
        count, failure = copy_from(source, targets, ring, bucket_bytes)
        _end(ring, failure, count)
        return count
    names, failure = [], None
    try:
        for name, tensor in source:
            _update(name, tensor, targets)
            names.append(name)
    except Exception as error:
        failure = error
        if isinstance(source, Generator):
            source.close()  # other ranks may wait for this one in a stream
    _end(ring, failure, sorted(names))
    return len(names)


def _end(ring: InferenceRing, failure: Exception | None, tensors: Any) -> None:
    """Ends an update on all ranks. Collective; for the arguments and errors see `agree`."""
    ring.synchronize()  # other ranks read without waiting for this one's streams
    agree(ring, failure, tensors, written=True)


def _update(name: str, tensor: torch.Tensor, targets: dict[str, torch.Tensor]) -> None:
    if name not in targets:
        raise ValueError(f"update_weights: expected names of the model's state_dict, got {name!r}")
    tied = [other for other in getattr(tensor, OTHER_NAMES, ()) if other in targets]
    for each in (name, *tied):
        target = targets[each]
        if tuple(tensor.shape) != shape_of(target):
            raise ValueError(f"update_weights: {each}: expected shape {shape_of(target)}, got {tuple(tensor.shape)}")
        write(target, tensor)
