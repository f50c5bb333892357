"""Parameters as shards of a ring."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from rtp_ext._native import RotationError, delivered, shard_sizes, share_version
from rtp_ext.dtensor_hooks import patch_data, patch_grad_scaler
from rtp_ext.parameters.cut_over_replicas import gather_local, is_piece
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import (
    FROZEN,
    GRADIENT_HANDLER,
    OFFLOADED,
    Delivery,
    as_gradient,
    as_parameter,
    computes_plainly,
    deliver_gradient,
    other_modes,
    seen_by,
    storing_modes,
    unseen,
)
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.mesh import local_placements, own_part, ring_shape
from rtp_ext.ring.parameters_in_use import rotates

# -- tensor subclasses that wrap plain tensors -------------------------------------------------------------------------


def type_name(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    return f"{kind.__module__}.{kind.__qualname__}"


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Returns the plain floating-point tensors inside a wrapper if they have its shape; None for any other tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    plain = all(computes_plainly(type(each)) and each.shape == tensor.shape for each in inner)
    return inner if inner and plain and all(each.is_floating_point() for each in inner) else None


def with_inner(like: Any, inner: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a tensor of the class of `like` that wraps `inner`, tensors of one shape."""
    names, context = like.__tensor_flatten__()
    shape, stride = inner[0].shape, inner[0].stride()
    return type(like).__tensor_unflatten__(dict(zip(names, inner, strict=True)), context, shape, stride)


# -- assignments to `parameter.data` -----------------------------------------------------------------------------------


def let_data_be_assigned() -> None:
    """Has `parameter.data = values` write to the shard of a parameter on a ring, with `values` whole or laid out as the
    parameter is, and has writes to `parameter.data` count as those to the parameter."""
    patch_data(rotates, _assign, share_version)


def _assign(parameter: DTensor, values: Any) -> None:
    """Copies the values of a whole tensor, or of a DTensor, to the shard; collective for a DTensor that is laid out
    otherwise."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"parameter.data: expected a tensor, got a {type(values).__name__}")
    shape = tuple(parameter.shape)
    if values.shape != parameter.shape:
        raise ValueError(
            f"parameter.data: expected the values of the whole parameter, of shape {shape}, got {tuple(values.shape)}; "
            "write to a shard with parameter.to_local().copy_(values) under torch.no_grad()"
        )
    if values.dtype != parameter.dtype:
        raise TypeError(
            f"parameter.data: expected {parameter.dtype}, the dtype of the parameter of shape {shape}, got "
            f"{values.dtype}; model.to(dtype) changes it"
        )
    if values.is_meta or parameter.is_meta:
        raise ValueError(
            f"parameter.data: expected a parameter of shape {shape} and values with storage, got one of them on the "
            "meta device: call to_empty(device=...) first"
        )
    with torch.inference_mode(False), torch.no_grad():
        parameter._local_tensor.copy_(_part_of(values.detach(), parameter))
        torch.autograd.graph.increment_version(parameter)


def _part_of(values: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    if isinstance(values, DTensor):
        if values.device_mesh == parameter.device_mesh and values.placements == parameter.placements:
            return values.to_local()
        values = values.full_tensor()
    return own_part(values, parameter.device_mesh, parameter.placements)


# -- shards ------------------------------------------------------------------------------------------------------------

logger = logging.getLogger("rtp_ext")


def shard_bounds(extent: int, ring: Ring) -> tuple[int, int]:
    """Returns start and size of this rank's shard of a dimension of `extent`, by the chunk rule of DTensor's Shard."""
    sizes = shard_sizes(extent, ring.size)
    return sum(sizes[: ring.rank]), sizes[ring.rank]


def take_shard(full: torch.Tensor, ring: Ring, dim: int) -> torch.Tensor:
    """Returns a contiguous copy of this rank's shard of `full` [...], cut along `dim`."""
    start, size = shard_bounds(full.shape[dim], ring)
    return full.detach().narrow(dim, start, size).clone(memory_format=torch.contiguous_format)


def held(shard: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor, without the alias and the graph node that to_local() makes."""
    return shard._local_tensor if isinstance(shard, DTensor) else shard


def frozen_of(parameter: Any) -> Any:
    """Returns the description, a `FrozenWeight`, of a weight that is stored in blocks; None for any other tensor."""
    return parameter.__dict__.get(FROZEN) if isinstance(parameter, torch.Tensor) else None


@unseen
def over_ranks(parameter: Any, ranks: Sequence[int] | None) -> bool:
    """Returns whether a parameter is a DTensor over these ranks, in one dimension."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh.tolist() == list(ranks or ())


def make_contiguous(shard: torch.Tensor) -> None:
    """Makes a local shard in another memory format (channels_last) contiguous, in place.

    A contiguous copy in each call would not be the prefetched tensor. Empty and tiny shards count as contiguous and
    need no copy, so that ranks would differ.
    """
    local = held(shard)
    if local.is_leaf and not local.is_contiguous():
        with torch.inference_mode(False), torch.no_grad():
            local.data = local.contiguous()


_ROOM = "_rtp_room"  # attribute of a local shard: the memory that `reserve` gave it


def reserve(shard: torch.Tensor, full_shape: torch.Size | tuple[int, ...], dim: int, ring: Ring, name: str) -> None:
    """Enlarges the storage of a local shard to the largest shard of its parameter, in place, keeping its values.

    Raises ValueError for a plain shard that is a view of a larger tensor, whose other elements would be overwritten.
    """
    local = held(shard)  # with an alias, only the alias would get the storage
    if local.device.type == "meta" or getattr(local, _ROOM, None) == (local.data_ptr(), local.dtype):
        return
    if not isinstance(shard, DTensor) and local.untyped_storage().nbytes() != local.nbytes:
        raise ValueError(
            f"{name}: in_place moves the local shard itself: expected one with storage of its own ({local.nbytes} "
            f"bytes), got a view of {local.untyped_storage().nbytes()} bytes"
        )
    largest = _slice_elements(full_shape, dim) * shard_sizes(full_shape[dim], ring.size)[0]
    # The first forward may run in inference mode; the shard's memory outlives it.
    with torch.inference_mode(False), torch.no_grad():
        storage = torch.empty(largest, dtype=local.dtype, device=local.device)
        roomy = storage[: local.numel()].view(local.shape)
        roomy.copy_(local)
        local.data = roomy
    setattr(local, _ROOM, (local.data_ptr(), local.dtype))


def _slice_elements(shape: torch.Size | tuple[int, ...], dim: int) -> int:
    elements = 1
    for index, extent in enumerate(shape):
        elements *= 1 if index == dim else extent
    return elements


def as_sharded(
    local: torch.Tensor, full_shape: torch.Size, ring: Ring, dim: int | None, tensor: Placement | None = None
) -> torch.Tensor:
    """Returns the DTensor whose local shard is `local`; `local` itself on an emulated ring.

    dim: the dimension that the ring cuts; None: replicated. tensor: placement over the mesh dimension of tensor
    parallelism.
    """
    if ring.parameter_mesh is None:
        return local
    let_data_be_assigned()
    if ring.tensor_mesh is not None:
        patch_grad_scaler()
    stride = torch.empty(full_shape, device="meta").stride()
    placements = ring.placements(dim, tensor)
    if ring.host_memory is not None:  # from_local would move it to the device of the mesh
        meta = TensorMeta(full_shape, stride, local.dtype)
        spec = DTensorSpec(ring.parameter_mesh, tuple(placements), tensor_meta=meta)
        return as_gradient(ring.host_memory.keep(local), spec)
    return DTensor.from_local(local, ring.parameter_mesh, placements, run_check=False, shape=full_shape, stride=stride)


def shard_parameter(parameter: nn.Parameter, ring: Ring, dim: int) -> nn.Parameter:
    """Returns a sharded parameter for a whole one (meta device included). Scalars are replicated.

    The ring cuts the local part of a DTensor of tensor parallelism.
    """
    if parameter.dim() == 0:
        return replicate_parameter(parameter, ring)
    local, tensor = take_shard(_values(parameter), ring, dim), _over_tensor(parameter, ring)
    return _in_place_of(parameter, as_sharded(local, parameter.shape, ring, dim, tensor))


def shard_anew(parameter: Any, ring: Ring) -> nn.Parameter:
    """Returns a sharded parameter, cut along dimension 0, for a DTensor `Shard(0)` over a mesh of one dimension, on the
    meta device too. Collective among the ranks of that mesh."""
    part, mesh = _values(parameter).detach(), parameter.device_mesh
    start, size = shard_bounds(parameter.shape[0], ring)
    shape = parameter.shape
    local = part.new_empty(size, *shape[1:]) if mesh.size() > 1 else part[start : start + size].clone()
    moves = mesh.size() > 1 and not part.is_meta
    for (first, *_), section in sections(part, mesh, 0, 0, tuple(shape), None, part.device) if moves else ():
        begin, end = max(first, start), min(first + len(section), start + size)
        if begin < end:
            local[begin - start : end - start] = section[begin - first : end - first]
    return _in_place_of(parameter, as_sharded(local, shape, ring, 0))


def replicate_parameter(parameter: nn.Parameter, ring: Ring) -> nn.Parameter:
    """Returns a replicated parameter for a plain one (meta device included)."""
    whole, tensor = _values(parameter).detach().clone(), _over_tensor(parameter, ring)
    if ring.parameter_mesh is not None:
        patch_grad_scaler()
        whole = as_sharded(whole, parameter.shape, ring, None, tensor)
    return _in_place_of(parameter, whole)


def _values(parameter: nn.Parameter) -> torch.Tensor:
    """Returns this rank's values of a parameter before the ring cuts it, as a plain tensor."""
    values = held(parameter)
    if nn.parameter.is_lazy(values) or type(values) in (torch.Tensor, nn.Parameter):
        return values
    if not computes_plainly(type(values)):
        raise TypeError(
            f"expected a plain parameter, got a {type_name(values)} of shape {tuple(values.shape)}, a tensor subclass "
            "that computes by rules of its own; fully_rotate gathers those that have fsdp_pre_all_gather and "
            "fsdp_post_all_gather"
        )
    return values.detach().as_subclass(torch.Tensor)


def _over_tensor(parameter: nn.Parameter, ring: Ring) -> Placement | None:
    """Returns the placement of tensor parallelism of a parameter before the ring cuts it; None for a plain one."""
    if not isinstance(parameter, DTensor):
        return None
    if ring.tensor_mesh is None or parameter.device_mesh != ring.tensor_mesh:
        raise ValueError(f"expected a plain parameter, got a DTensor of shape {tuple(parameter.shape)}")
    return parameter.placements[0]


def _in_place_of(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    converted = as_parameter(data, parameter.requires_grad)
    converted.__dict__.update(parameter.__dict__)
    keep_hooks(converted, parameter)
    return converted


def keep_hooks(converted: Any, parameter: Any) -> None:
    """Has a converted parameter run the post-accumulate hooks of the one that it replaces, which get the converted one.
    Handles of these hooks still remove them. fully_rotate refuses hooks of tensors."""
    if parameter._post_accumulate_grad_hooks:
        converted._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of one parameter: see `local_shards`."""
    return local_shards([parameter])[0]


def local_shards(
    parameters: Sequence[torch.Tensor], late: tuple[Ring, int] | None = None, scale: float = 1.0
) -> list[torch.Tensor]:
    """Returns this rank's shard of each parameter, differentiable; a plain tensor itself. For an offloaded shard,
    returns its stand-in on the device: see rtp_ext.ring.cpu_offload.

    Replaces `to_local`, whose backward takes 0.1 ms to derive the spec that the parameter has.

    late: set if the gradients may still be travelling when the backward of the operation returns them: the ring,
    and the sequence number of the autograd nodes that wait for them.
    scale: what gradients of DTensors are multiplied by.
    """
    if torch._C._len_torch_dispatch_stack() > 0 and storing_modes():
        with seen_by(other_modes()):
            return local_shards(parameters, late, scale)
    differentiable, (waits, after) = torch.is_grad_enabled(), late or (None, None)
    shards = [*parameters]
    for place, parameter in enumerate(parameters):
        if not isinstance(parameter, DTensor):
            continue
        attributes, spec = parameter.__dict__, parameter._spec
        handler, kept = attributes.get(GRADIENT_HANDLER), attributes.get(OFFLOADED)
        if handler is None and len(spec.placements) > 1 and is_piece(parameter):
            raise RotationError(
                f"a parameter of shape {tuple(parameter.shape)} is cut over the replicas, but belongs to no outer "
                "policy: expected a parameter of a model that fully_rotate has converted, and a forward of that model "
                "before"
            )
        local = parameter._local_tensor if handler is None else handler.local(parameter)
        share_version(local, parameter)  # a write to either one counts for both
        if kept is not None:
            local = kept.stand_in(local)
            share_version(local, parameter)
        if differentiable and parameter.requires_grad:
            delivery = Delivery(spec, handler, kept, waits, scale)
            local = delivered(parameter, local, functools.partial(deliver_gradient, delivery), after)
        shards[place] = local
    return shards


_BLOCK = 1 << 20  # bytes of one broadcast of `gather_full`


def gather_full(
    parameter: torch.Tensor,
    *,
    keep: bool = True,
    dtype: torch.dtype | None = None,
    buffer: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    waits: Communicator | None = None,
) -> torch.Tensor:
    """Returns the whole parameter on every rank that passes `keep`, an empty tensor on the others. Collective.

    Makes no second whole copy; if tensor parallelism cuts the parameter too, an additional copy of its local part.

    Args:
        dtype: shards of floating-point numbers are cast to it before they travel; None: their own.
        buffer: bytes [n] on the device of the shards, through which at most n bytes travel at once, at least one row;
            None: a new one of 1 MiB.
        device: of the result.
        waits: of a ring, whose timeout ends waits for other ranks, and which ends then; None: that of the mesh's group.
    """
    with torch.no_grad():
        if not isinstance(parameter, DTensor):
            part = _cast(parameter.detach(), dtype)
            return part.to(device, copy=part.data_ptr() == parameter.data_ptr()) if keep else part.new_empty(0)
        part = gather_local(parameter) if is_piece(parameter) else held(parameter).detach()
        if not computes_plainly(type(part)):
            inner = inner_tensors(part)
            if inner is None:
                raise TypeError(
                    f"a parameter of shape {tuple(parameter.shape)}: expected shards that are plain tensors, or "
                    f"wrappers of plain ones of their shape that have __tensor_flatten__, got a {type_name(part)}, of "
                    "which no whole tensor can be made"
                )
            options: dict[str, Any] = {"keep": keep, "dtype": dtype, "buffer": buffer, "device": device, "waits": waits}
            wholes = [gather_full(as_gradient(each, parameter._spec), **options) for each in inner]
            return with_inner(part, wholes) if keep else torch.empty(0)
        part = _cast(part, dtype)
        mesh, shape = parameter.device_mesh, ring_shape(parameter)
        placements = local_placements(parameter._spec)
        cut = [(index, p.dim) for index, p in enumerate(placements) if isinstance(p, Shard)]
        for index, dim in reversed(cut):  # the ring's cut is the last one
            if index != mesh.ndim - 1:
                shape = tuple(parameter.shape)
            keeps = keep or index != cut[0][0]  # what another dimension cuts as well travels again
            target = torch.device(device) if keeps else None
            transit: dict[str, Any] = {"buffer": buffer, "device": held(parameter).device, "waits": waits}
            whole = torch.empty(shape, dtype=part.dtype, device=target or "meta")
            for start, section in sections(part, mesh, index, dim, shape, **transit):
                if keeps:
                    bounds = zip(start, section.shape, strict=True)
                    whole[tuple(slice(first, first + extent) for first, extent in bounds)] = section
            part = whole
        if not keep:
            return part.new_empty(0)
        return part if cut else part.to(device, copy=True)


def _cast(part: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return part if dtype is None or not part.is_floating_point() else part.to(dtype)


def sections(
    part: torch.Tensor,
    mesh: DeviceMesh,
    index: int,
    dim: int,
    shape: tuple[int, ...],
    buffer: torch.Tensor | None,
    device: torch.device,
    waits: Communicator | None = None,
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yields a tensor of `shape` section by section, whose parts, cut along `dim`, the ranks along mesh dimension
    `index` hold: where a section begins, and its values, valid until the next one. Collective: every rank goes on to
    the end. device: that of the mesh. buffer, waits: as in `gather_full`."""
    if math.prod(shape) == 0:
        return
    sizes = shard_sizes(shape[dim], mesh.size(index))
    largest = torch.empty((*shape[:dim], sizes[0], *shape[dim + 1 :]), dtype=part.dtype, device="meta")
    # one buffer for all sections: a process group may keep tensors alive for a while after it has sent them
    rows = max(1, (_BLOCK if buffer is None else buffer.numel()) // largest[0].nbytes)
    needed = largest[:rows].nbytes
    if buffer is None or buffer.numel() < needed or buffer.device != device:
        buffer = torch.empty(needed, dtype=torch.uint8, device=device)
    values = buffer[:needed].view(part.dtype)
    for owner, size in enumerate(sizes):
        extents = [*shape[:dim], size, *shape[dim + 1 :]]
        for first in range(0, extents[0] if size else 0, rows):
            of_section = [min(rows, extents[0] - first), *extents[1:]]
            section = values[: math.prod(of_section)].view(of_section)
            if owner == mesh.get_local_rank(index):
                section.copy_(part[first : first + rows])
            post = functools.partial(dist.broadcast, group_src=owner)
            values_of = section.view(-1).view(torch.uint8)
            if waits is None:
                post(values_of, group=mesh.get_group(index))
            else:
                waits.collectively("a broadcast of weights", post, values_of, group=mesh.get_group(index))
            start = [0] * len(shape)
            start[dim] = sum(sizes[:owner])
            start[0] += first
            yield start, section


class _WholeCopies(TorchDispatchMode):
    """Replaces sharded parameters of other modules by whole copies while an initialisation accesses them."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, tuple[DTensor, torch.Tensor]] = {}  # by storage of the local shard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(DTensor, self._copy_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _copy_of(self, parameter: DTensor) -> torch.Tensor:
        key = parameter._local_tensor.untyped_storage()._cdata
        if key not in self.copies:
            self.copies[key] = (parameter, gather_full(parameter))
        return self.copies[key][1]


def init_weights(module: nn.Module, fn: Callable[[nn.Module], object]) -> None:
    """Initialises a converted model as `fn` initialises the plain one.

    For each module in `modules()` order, `fn` runs on a full CPU copy of that module's own parameters, and this rank
    keeps its shards. Values equal those of the plain model under the same seed, for any R. At most one module's own
    parameters are held in full, besides a block of 1 MiB. Parameters of other modules that `fn` accesses (as GPT-2's
    scaled initialisation does) are held in full until it returns. Collective; use the same seed on every rank.

    Raises ValueError for parameters still on the meta device (call `to_empty` first).
    """
    for name, parameter in module.named_parameters():
        if parameter.device.type == "meta":
            raise ValueError(f"init_weights: {name} is on the meta device; call to_empty first")
        if frozen_of(parameter) is not None:
            raise ValueError(
                f"init_weights: expected weights in a floating-point dtype, got {name}, which fully_rotate has stored "
                f"in {frozen_of(parameter).format}: initialise the model before, or use load_safetensors"
            )
    for owner in module.modules():
        _init_module(owner, fn)


def _init_module(owner: nn.Module, fn: Callable[[nn.Module], object]) -> None:
    own: dict[str, Any] = {key: p for key, p in owner._parameters.items() if isinstance(p, DTensor)}
    copies = {key: nn.Parameter(gather_full(p), requires_grad=p.requires_grad) for key, p in own.items()}
    owner._parameters.update(copies)
    try:
        with _WholeCopies() as others:
            fn(owner)
        results: dict[str, Any] = {key: owner._parameters[key] for key in own}
    finally:
        owner._parameters.update(own)
    with torch.no_grad():
        for key, parameter in own.items():
            _keep_shard(parameter, results[key])
        for parameter, whole in others.copies.values():
            _keep_shard(parameter, whole)


def _keep_shard(parameter: DTensor, full: torch.Tensor) -> None:
    parameter.to_local().copy_(own_part(full, parameter.device_mesh, parameter.placements))


def placed_as(full: torch.Tensor, spec: DTensorSpec) -> nn.Parameter:
    """Returns a parameter with the layout `spec` from a whole tensor that is the same on every rank."""
    local = own_part(full.detach(), spec.mesh, spec.placements).clone(memory_format=torch.contiguous_format)
    data = DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)
    return as_parameter(data, full.requires_grad)


def shallow_copy(module: nn.Module) -> nn.Module:
    """Returns a copy of `module` with a separate parameter table and the same children and buffers."""
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    return twin
