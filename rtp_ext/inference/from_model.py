"""New values for a model that computes forwards only, from a model on the same ranks: no rank holds a whole weight that
is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from rtp_ext.inference.ring import InferenceRing
from rtp_ext.parameters.cut_over_replicas import is_piece
from rtp_ext.parameters.frozen import gather_plain, load_plain
from rtp_ext.parameters.sharding import frozen_of, held, sections
from rtp_ext.ring.mesh import own_bounds, own_part

_Transit = dict[str, Any]  # keywords of `sections`
Write = Callable[[torch.Tensor, torch.Tensor, _Transit], None]
_Copy = tuple[str, torch.Tensor, torch.Tensor, Write]


def copy_from(source: nn.Module, model: nn.Module, ring: InferenceRing, bucket_bytes: int) -> int:
    """Copies the tensors of a model into another one. Returns their number. Collective.

    Raises ValueError, on every rank, where names and shapes do not fit, or differ between ranks.
    """
    found: list[_Copy] = []
    failure: Exception | None = None
    try:
        found = _copies(source, tensors_of(model))
    except Exception as error:  # user code may run in state_dict
        failure = error
    looks = [f"{name} {shape_of(value)} {value.dtype} by {way.__name__}" for name, value, _, way in found]
    ring.agree_on_update(failure, [f"buckets of {bucket_bytes} bytes", *looks], written=False)
    sizes = (value.nbytes for _, value, _, way in found if way is not _copy_local)
    with ring.communicator.ended_by_errors("update_weights"):  # others may be waiting for this rank's part
        buffer = torch.empty(min(bucket_bytes, max(sizes, default=0)), dtype=torch.uint8)
        for name, value, target, way in found:
            try:
                way(value, target, {"buffer": buffer, "waits": ring.communicator})
            except ValueError as error:  # of this rank's part, which has come: the other ranks go on
                failure = failure or ValueError(f"update_weights: {name}: {error}")
    ring.synchronize()  # other ranks read without waiting for this one's streams
    ring.agree_on_update(failure, [f"{len(found)} tensors"], written=bool(found))
    return len(found)


def _copies(source: nn.Module, targets: dict[str, torch.Tensor]) -> list[_Copy]:
    found, seen = [], set()
    for name, value in tensors_of(source).items():
        target = targets.get(name)
        if target is None:
            raise ValueError(f"update_weights: expected names of the model's state_dict, got {name!r}")
        if shape_of(value) != shape_of(target):
            raise ValueError(f"update_weights: {name}: expected shape {shape_of(target)}, got {shape_of(value)}")
        if (id(value), id(target)) not in seen:
            seen.add((id(value), id(target)))
            found.append((name, value, target, _way(value, target)))
    return found


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of the plain tensor."""
    frozen = frozen_of(tensor)
    return tuple(tensor.shape) if frozen is None else frozen.shape


def write(target: torch.Tensor, whole: Any) -> None:
    """Copies this rank's part of a whole tensor, or of rows that are collected, into a parameter or buffer."""
    if frozen_of(target) is not None:
        assert isinstance(target, DTensor), "blocks are cut"
        load_plain(target, whole)
    elif isinstance(target, DTensor):
        held(target).copy_(own_part(whole, target.device_mesh, target.placements))
    else:
        target.copy_(whole)


def _way(value: torch.Tensor, target: torch.Tensor) -> Write:
    """Returns how the values of a tensor get to their places. The same on every rank."""
    if not isinstance(value, DTensor):
        return _copy_whole if frozen_of(value) is None else _gather
    if isinstance(target, DTensor) and _ranks(value) == _ranks(target) and value.placements == target.placements:
        mine, theirs = frozen_of(value), frozen_of(target)
        if mine is theirs is None or (mine and theirs and mine.same_blocks(theirs)):
            return _copy_local
    if frozen_of(value) is not None or is_piece(value) or len(_cuts(value)) > 1:
        return _gather
    return _copy_sections if _cuts(value) else _copy_whole


def _ranks(tensor: DTensor) -> list[Any]:
    return tensor.device_mesh.mesh.tolist()


def _cuts(value: DTensor) -> list[tuple[int, Any]]:
    return [(index, placement) for index, placement in enumerate(value.placements) if not placement.is_replicate()]


def _copy_local(value: torch.Tensor, target: torch.Tensor, transit: _Transit) -> None:
    held(target).copy_(held(value))


def _copy_whole(value: torch.Tensor, target: torch.Tensor, transit: _Transit) -> None:
    write(target, held(value))


def _gather(value: torch.Tensor, target: torch.Tensor, transit: _Transit) -> None:
    """For tensors that several dimensions of a mesh cut, and for blocks: each rank holds one whole tensor."""
    write(target, gather_plain(value, **transit))


def _copy_sections(value: torch.Tensor, target: torch.Tensor, transit: _Transit) -> None:
    assert isinstance(value, DTensor), "it is cut"
    if frozen_of(target) is not None:
        write(target, _Part(value, transit))
        return
    bounds = [(0, extent) for extent in target.shape]
    if isinstance(target, DTensor):
        bounds = own_bounds(target.shape, target.device_mesh, target.placements)
    _collect(value, held(target), bounds, transit)


class _Part:
    """A part of a cut tensor, collected when it is asked for, which every rank does once."""

    def __init__(self, value: DTensor, transit: _Transit) -> None:
        self._value, self._transit = value, transit

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        shape = self._value.shape
        ends = [cut.indices(extent)[:2] for cut, extent in zip(part, shape, strict=False)]
        ends += [(0, extent) for extent in shape[len(part) :]]
        bounds = [(first, max(0, end - first)) for first, end in ends]
        into = torch.empty([size for _, size in bounds], dtype=self._value.dtype)
        _collect(self._value, into, bounds, self._transit)
        return into


def _collect(value: DTensor, into: torch.Tensor, bounds: list[tuple[int, int]], transit: _Transit) -> None:
    """Copies the part of a cut tensor within `bounds` (start and size along each dimension) into a tensor, in whose
    dtype it travels. Collective over the ranks that the tensor is cut over."""
    ((index, placement),) = _cuts(value)
    assert isinstance(placement, Shard), "_way has looked"
    part, shape = held(value).detach().to(into.dtype), tuple(value.shape)
    mesh = value.device_mesh
    for start, section in sections(part, mesh, index, placement.dim, shape, device=part.device, **transit):
        mine, theirs = [], []
        for first, extent, (low, size) in zip(start, section.shape, bounds, strict=True):
            begin, end = max(first, low), min(first + extent, low + size)
            mine.append(slice(begin - low, max(begin, end) - low))
            theirs.append(slice(begin - first, max(begin, end) - first))
        into[tuple(mine)].copy_(section[tuple(theirs)])
