"""The weights of a converted model for other engines: this rank's shards, or whole tensors one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rtp_ext._native import RotationError
from rtp_ext.convert.scopes import ring_of_module
from rtp_ext.parameters.frozen import gather_plain, local_plain
from rtp_ext.parameters.sharding import frozen_of, held
from rtp_ext.ring import Ring
from rtp_ext.ring.links.agree import agree
from rtp_ext.ring.mesh import own_bounds

BUCKET_BYTES = 64 << 20
OTHER_NAMES = "_rtp_other_names"  # attribute of a streamed tensor that is tied: its names but the first


class LocalShard(NamedTuple):
    """A part of a whole tensor: it begins at `offsets` of a tensor of `shape`. `tensor` shares the model's memory, but
    for a weight in blocks, whose values it holds."""

    name: str
    tensor: torch.Tensor
    shape: torch.Size
    offsets: tuple[int, ...]


def local_shards(model: nn.Module) -> Iterator[LocalShard]:
    """Yields this rank's part of each tensor of the plain model's state_dict, without communication.

    Names are those of the plain model, tied tensors under each of their names. The parts of all ranks of the ring cover
    each cut tensor once; a part may be empty. A tensor that no rank cuts (a buffer, an ignored parameter) is whole on
    every rank, at offsets 0. Of a frozen weight in blocks it yields the values that this rank's blocks stand for. Where
    several dimensions of a mesh cut a tensor (tensor parallelism, `outer.ZeroOuter`), the parts are those of all ranks
    of the mesh. A stage of a pipeline has the names of its own module. Raises ValueError for a model that was not
    converted.
    """
    _ring(model, "local_shards")
    for name, value in _tensors(model):
        frozen = frozen_of(value)
        if frozen is not None:
            values, first = local_plain(value)  # type: ignore[arg-type]
            yield LocalShard(name, values, torch.Size(frozen.shape), first)
            continue
        offsets = [0] * value.dim()
        if isinstance(value, DTensor):
            offsets = [start for start, _ in own_bounds(value.shape, value.device_mesh, value.placements)]
        yield LocalShard(name, held(value).detach(), value.shape, tuple(offsets))


def stream_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    ranks: Collection[int] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, whole tensor) for the plain model's state_dict, one tensor at a time. Collective.

    A tensor is gathered when it is asked for, and belongs to the caller; the iterator holds none. Besides it, this
    rank holds one bucket (and the caller's loop variable the tensor before it, unless it is deleted). Tied tensors come
    once, under the first of their names; `update_weights` writes them under all. Frozen weights in blocks come as the
    values that they stand for; each rank holds the blocks of one whole weight meanwhile. Tensors are on the device of
    the model. Every rank iterates to the end, also where it gets nothing:

        for name, tensor in rtp_ext.stream_weights(model, dtype=torch.bfloat16, ranks=[0]):
            engine.load(name, tensor)  # on rank 0 only

    >>> model = rtp_ext.fully_rotate(nn.Linear(4, 2))
    >>> {name: tuple(tensor.shape) for name, tensor in rtp_ext.stream_weights(model)}
    {'weight': (2, 4), 'bias': (2,)}

    Args:
        dtype: floating-point tensors are cast to it before they travel; None: their own.
        bucket_bytes: the most bytes that travel at once, but at least one row of a tensor. Ranks make sure that all go
            on after each bucket of tensors.
        ranks: ranks of the default process group that get the tensors; None: all.

    Raises ValueError for a model that was not converted, and on every rank where the arguments or the tensors of ranks
    differ; RotationError where another rank leaves the loop early.
    """
    ring = _ring(model, "stream_weights")
    if bucket_bytes < 1:
        raise ValueError(f"stream_weights: expected bucket_bytes >= 1, got {bucket_bytes}")
    receivers = None if ranks is None else sorted(set(ranks))
    keep = receivers is None or not dist.is_initialized() or dist.get_rank() in receivers
    return _stream(model, ring, dtype, bucket_bytes, receivers, keep)


def _stream(
    model: nn.Module,
    ring: Ring,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    receivers: list[int] | None,
    keep: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    names: dict[int, list[str]] = {}
    for name, value in (every := _tensors(model)):
        names.setdefault(id(value), []).append(name)
    tensors = [(name, value) for name, value in every if name == names[id(value)][0]]
    looks = [(name, tuple(value.shape), str(value.dtype), str(frozen_of(value))) for name, value in tensors]
    _agree(ring, (str(dtype), bucket_bytes, receivers, hashlib.sha256(repr(looks).encode()).hexdigest()))
    largest = max((value.numel() * value.element_size() for _, value in tensors), default=0)
    # one for all: a process group may keep tensors alive for a while after it has sent them
    buffer = torch.empty(min(bucket_bytes, largest), dtype=torch.uint8, device=ring.device)
    options: dict[str, Any] = {"dtype": dtype, "buffer": buffer, "waits": ring.communicator}
    for bucket in _buckets(tensors, bucket_bytes):
        _go_on(ring, bucket[0][0])
        for place, (name, value) in enumerate(bucket, start=1):
            with ring.communicator.ended_by_errors("stream_weights"):
                whole = gather_plain(value, keep=keep, device=held(value).device, **options)
            if keep:
                if others := names[id(value)][1:]:
                    setattr(whole, OTHER_NAMES, tuple(others))
                try:
                    yield name, whole
                except GeneratorExit:
                    if ring.alive:  # the other ranks are in this bucket
                        for _, rest in bucket[place:]:
                            gather_plain(rest, keep=False, **options)
                        ring.exchange(f"it left after {name}")
                    raise
            del whole
    _go_on(ring)


def _buckets(tensors: list[tuple[str, torch.Tensor]], bucket_bytes: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Returns runs of tensors of at most so many bytes, or of one tensor."""
    buckets: list[list[tuple[str, torch.Tensor]]] = []
    size = bucket_bytes
    for name, value in tensors:
        own = value.numel() * value.element_size()
        if size + own > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append((name, value))
        size += own
    return buckets


def _agree(ring: Ring, mine: tuple) -> None:
    agree(
        "stream_weights: ranks differ in (dtype, bucket_bytes, ranks, digest of names, shapes and dtypes)", ring, mine
    )


def _go_on(ring: Ring, name: str = "the end") -> None:
    """Raises RotationError where another rank has left the loop. Collective."""
    for rank, news in enumerate(ring.exchange("")):
        if news:
            raise RotationError(f"stream_weights, before {name}: expected every rank to go on, but rank {rank}: {news}")


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(n, value) for n, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)]


def _ring(model: nn.Module, what: str) -> Ring:
    ring = next((ring for part in model.modules() if (ring := ring_of_module(part)) is not None), None)
    if ring is None:
        raise ValueError(f"{what}: expected a model that fully_rotate converted, got a {type(model).__name__}")
    return ring
