"""update_weights: new values for a model that computes forwards only."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable

import torch
from torch import nn

from rtp_ext.convert.methods.stream_weights import BUCKET_BYTES, OTHER_NAMES
from rtp_ext.convert.scopes import INFERENCE
from rtp_ext.inference.from_model import copy_from, shape_of, tensors_of, write
from rtp_ext.inference.ring import InferenceRing
from rtp_ext.ring.bootstrap import compare_calls
from rtp_ext.ring.links.agree import expect_same

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@torch.no_grad()
def update_weights(model: nn.Module, source: nn.Module | NamedTensors, *, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Copies new values into a model that `rotate_for_inference` has converted. Returns the number of tensors.

    Collective: a rank begins when all ranks have called and their running forwards of the model have ended, in other
    threads too, and returns when all have ended. Forwards that begin meanwhile wait: each computes with the old weights
    of all ranks, or with the new ones. Of a part of the model that is called alone, each layer does. Names that do not
    come keep their values; other dtypes are cast, and values of weights in blocks are encoded again.

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
    between ranks; RotationError on the other ranks, where weights were written before: they are then partly new, and
    forwards raise until an update has succeeded. RingTimeout, which names a rank that does not call, or a forward that
    does not end, within the timeout of the ring; the ring cannot be used any more, nor after KeyboardInterrupt.
    """
    ring = model.__dict__.get(INFERENCE)
    if ring is None:
        kind = type(model).__name__
        raise ValueError(f"update_weights: expected a model that rotate_for_inference converted, got a {kind}")
    refusal = None
    if bucket_bytes < 1:
        refusal = ValueError(f"update_weights: expected bucket_bytes >= 1, got {bucket_bytes}")
    elif _runs(model):
        refusal = ValueError("update_weights: expected a call between forwards, got one within a forward of the model")
    with ring.updating():
        kind = "a model" if isinstance(source, nn.Module) else "named tensors"
        kinds = compare_calls(ring.communicator, kind, refusal=refusal)
        expect_same("update_weights, the source", kinds)
        if isinstance(source, nn.Module):
            return copy_from(source, model, ring, bucket_bytes)
        return _copy_named(source, model, ring)


def _runs(model: nn.Module) -> bool:
    """Returns whether this thread is in a forward of the model."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is model:
            return True
    return False


def _copy_named(source: NamedTensors, model: nn.Module, ring: InferenceRing) -> int:
    names, failure, written = [], None, False
    try:
        targets = tensors_of(model)
        for name, tensor in source:
            places = _places(name, tensor, targets)
            written = True
            for each in places:
                write(each, tensor)
            names.append(name)
    except Exception as error:
        failure = error
        if isinstance(source, Generator):
            source.close()  # other ranks may wait for this one in a stream
    ring.synchronize()  # other ranks read without waiting for this one's streams
    ring.agree_on_update(failure, sorted(names), written=written)
    return len(names)


def _places(name: str, tensor: torch.Tensor, targets: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors of the model that get the values of `tensor`."""
    if name not in targets:
        raise ValueError(f"update_weights: expected names of the model's state_dict, got {name!r}")
    tied = [other for other in getattr(tensor, OTHER_NAMES, ()) if other in targets]
    for each in (name, *tied):
        if tuple(tensor.shape) != shape_of(targets[each]):
            raise ValueError(
                f"update_weights: {each}: expected shape {shape_of(targets[each])}, got {tuple(tensor.shape)}"
            )
    return [targets[each] for each in (name, *tied)]
