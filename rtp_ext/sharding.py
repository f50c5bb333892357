"""Parameters sharded over a ring: DTensors of which every rank holds its home shard."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rtp_ext._native import shard_sizes
from rtp_ext.ring import Ring


def shard_bounds(extent: int, ring: Ring) -> tuple[int, int]:
    """The start and the size of this rank's shard of a dimension of `extent`, by the chunk rule of DTensor's Shard."""
    sizes = shard_sizes(extent, ring.size)
    return sum(sizes[: ring.rank]), sizes[ring.rank]


def take_shard(full: torch.Tensor, ring: Ring, dim: int) -> torch.Tensor:
    """This rank's own, contiguous copy of its shard of `full` [...], cut along `dim`."""
    start, size = shard_bounds(full.shape[dim], ring)
    return full.detach().narrow(dim, start, size).clone(memory_format=torch.contiguous_format)


_ROOM = "_rtp_room"  # attribute of a home shard: the memory that `reserve` gave it


def reserve(shard: torch.Tensor, full_shape: torch.Size | tuple[int, ...], dim: int, ring: Ring, name: str) -> None:
    """Gives a home shard storage for the largest shard of its parameter, in place, keeping its values.

    Raises ValueError for a plain shard that is a view of a larger tensor, whose other elements would be overwritten.
    """
    # the DTensor's own tensor: to_local() returns an alias, which would be given the storage alone
    home = shard._local_tensor if isinstance(shard, DTensor) else shard
    if home.device.type == "meta" or getattr(home, _ROOM, None) == (home.data_ptr(), home.dtype):
        return
    if not isinstance(shard, DTensor) and home.untyped_storage().nbytes() != home.nbytes:
        raise ValueError(
            f"{name}: in_place moves the home shard itself: expected one with storage of its own ({home.nbytes} "
            f"bytes), got a view of {home.untyped_storage().nbytes()} bytes"
        )
    largest = _slice_elements(full_shape, dim) * shard_sizes(full_shape[dim], ring.size)[0]
    with torch.no_grad():
        storage = torch.empty(largest, dtype=home.dtype, device=home.device)
        roomy = storage[: home.numel()].view(home.shape)
        roomy.copy_(home)
        home.data = roomy
    setattr(home, _ROOM, (home.data_ptr(), home.dtype))


def _slice_elements(shape: torch.Size | tuple[int, ...], dim: int) -> int:
    elements = 1
    for index, extent in enumerate(shape):
        elements *= 1 if index == dim else extent
    return elements


def as_sharded(home: torch.Tensor, full_shape: torch.Size, ring: Ring, dim: int) -> torch.Tensor:
    """The DTensor whose shard on this rank is `home`; `home` itself on an emulated ring."""
    if ring.mesh is None:
        return home
    stride = torch.empty(full_shape, device="meta").stride()
    return DTensor.from_local(home, ring.mesh, [Shard(dim)], run_check=False, shape=full_shape, stride=stride)


def shard_parameter(parameter: nn.Parameter, ring: Ring, dim: int) -> nn.Parameter:
    """A sharded parameter in place of a whole one (meta device included). Scalars are replicated."""
    if isinstance(parameter, DTensor):
        raise ValueError(f"expected a plain parameter, got a DTensor of shape {tuple(parameter.shape)}")
    if parameter.dim() == 0:
        whole = parameter.detach().clone()
        data = whole if ring.mesh is None else DTensor.from_local(whole, ring.mesh, [Replicate()], run_check=False)
    else:
        home = take_shard(parameter, ring, dim)
        data = as_sharded(home, parameter.shape, ring, dim)
    sharded = nn.Parameter(data, requires_grad=parameter.requires_grad)
    sharded.__dict__.update(parameter.__dict__)
    return sharded


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, differentiable; a plain tensor is its own part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def shard_dim_of(parameter: torch.Tensor) -> int | None:
    """The dimension along which a DTensor is cut; None for plain and replicated tensors."""
    if not isinstance(parameter, DTensor):
        return None
    return next((p.dim for p in parameter.placements if isinstance(p, Shard)), None)


def gather_full(parameter: torch.Tensor) -> torch.Tensor:
    """The whole parameter on every rank, on the CPU. Collective."""
    with torch.no_grad():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return full.detach().cpu().clone()


def init_weights(module: nn.Module, fn: Callable[[nn.Module], object]) -> None:
    """Initialises a converted model as `fn` initialises the plain one.

    For each module in `modules()` order, `fn` runs on a full CPU copy of that one module's own parameters, and this
    rank's shards are kept: values equal those of the plain model under the same seed, whatever R, and at most one
    module's own parameters are held in full. Collective; seed every rank alike.

    Raises ValueError for parameters still on the meta device (call `to_empty` first).
    """
    for name, owner in module.named_modules():
        own = {key: p for key, p in owner._parameters.items() if isinstance(p, DTensor)}
        if not own:
            fn(owner)
            continue
        for key, parameter in own.items():
            if parameter.device.type == "meta":
                raise ValueError(
                    f"init_weights: {name or 'the module'}.{key} is on the meta device; call to_empty first"
                )
        copies = {key: nn.Parameter(gather_full(p), requires_grad=p.requires_grad) for key, p in own.items()}
        owner._parameters.update(copies)
        try:
            fn(owner)
            results = {key: owner._parameters[key] for key in own}
        finally:
            owner._parameters.update(own)
        with torch.no_grad():
            for key, parameter in own.items():
                _keep_shard(parameter, results[key])


def _keep_shard(parameter: DTensor, full: torch.Tensor) -> None:
    home = parameter.to_local()
    dim = shard_dim_of(parameter)
    if dim is None:
        home.copy_(full)
        return
    sizes = shard_sizes(parameter.shape[dim], parameter.device_mesh.size())
    rank = parameter.device_mesh.get_local_rank()
    home.copy_(full.narrow(dim, sum(sizes[:rank]), sizes[rank]))


def shallow_copy(module: nn.Module) -> nn.Module:
    """A copy of `module` with its own parameter table, over the same children and buffers."""
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    return twin
