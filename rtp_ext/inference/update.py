"""update_weights: new values for a model that computes forwards only."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rtp_ext._native import RotationError
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.inference import INFERENCE, InferenceRing
from rtp_ext.ring.mesh import own_part


@torch.no_grad()
def update_weights(model: nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Copies new values into a model that `rotate_for_inference` has converted. Returns the number of tensors.

    Collective: every rank passes the same names, in any order, each with the whole tensor, and keeps its part. A rank
    begins when all ranks have called, so that no forward runs meanwhile, and returns when all have ended. Tensors are
    consumed one by one: `update_weights(inference, rtp_ext.stream_weights(training))` holds one of them. Names that do
    not come keep their values; other dtypes are cast.

    Raises ValueError for a model that was not converted, and for an unknown name, another shape or names that differ
    between ranks; RotationError on the other ranks. The weights are then partly new: update again. RingTimeout, which
    names a rank that does not call within the timeout of the ring; the ring cannot be used any more.
    """
    ring = model.__dict__.get(INFERENCE)
    if not isinstance(ring, InferenceRing):
        kind = type(model).__name__
        raise ValueError(f"update_weights: expected a model that rotate_for_inference converted, got a {kind}")
    targets = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    ring.drop_pulled()
    ring.exchange("update_weights begins")
    names, failure = [], None
    try:
        for name, tensor in named_tensors:
            _update(name, tensor, targets)
            names.append(name)
    except Exception as error:
        failure = error
        if isinstance(named_tensors, Generator):
            named_tensors.close()  # other ranks may wait for this one in a stream
    digest = hashlib.sha256(repr(sorted(names)).encode()).hexdigest()
    if ring.device.type == "cuda":
        torch.cuda.synchronize(ring.device)  # other ranks read without waiting for this one's streams
    answers = ring.exchange((None if failure is None else f"{type(failure).__name__}: {failure}", digest))
    if failure is not None:
        raise failure
    for rank, (problem, theirs) in enumerate(answers):
        if problem is not None:
            raise RotationError(f"update_weights failed on rank {rank}, the weights are partly new: {problem}")
        if theirs != answers[0][1]:
            raise ValueError(f"update_weights: expected the names of rank 0 on every rank, got others on rank {rank}")
    return len(names)


def _update(name: str, tensor: torch.Tensor, targets: dict[str, torch.Tensor]) -> None:
    target = targets.get(name)
    if target is None:
        raise ValueError(f"update_weights: expected names of the model's state_dict, got {name!r}")
    if tensor.shape != target.shape:
        raise ValueError(f"update_weights: {name}: expected shape {tuple(target.shape)}, got {tuple(tensor.shape)}")
    if isinstance(target, DTensor):
        held(target).copy_(own_part(tensor, target.device_mesh, target.placements))
    else:
        target.copy_(tensor)
