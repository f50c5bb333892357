"""Initial values: draws the values of a plain module's constructor piece by piece into this rank's shards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from rtp_ext.dtensor_hooks import patch_random
from rtp_ext.parameters.sharding import as_sharded, held, shard_bounds
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import as_gradient, as_parameter
from rtp_ext.ring.mesh import mesh_roles, own_part

logger = logging.getLogger("rtp_ext")

_PIECE = 1 << 20  # bytes of one piece
_BLOCK = 16  # elements that normal_ computes as one block

_aten = torch.ops.aten
_HARMLESS = {
    _aten.empty.memory_format,
    _aten.detach.default,
    _aten.alias.default,
    _aten.view.default,
    _aten.select.int,
    _aten.slice.Tensor,
    torch.ops.prim.device.default,
}
# Operators that write elements in the order of memory.
_WRITES = {_aten.uniform_.default, _aten.normal_.default, _aten.fill_.Scalar, _aten.zero_.default}


class _NotInPieces(Exception):
    """The constructor calls an operator that cannot run piece by piece."""


@dataclass
class _Write:
    target: torch.Tensor  # fake: a parameter of the plain module, or a part of one
    function: Any
    arguments: tuple
    keywords: dict[str, Any]


class _Recorder(TorchDispatchMode):
    """Records writes to fake tensors. Raises _NotInPieces for an unsupported operator."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[_Write] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WRITES and args[0].is_contiguous():
            self.writes.append(_Write(args[0], func, args[1:], kwargs))
        elif func not in _HARMLESS:
            raise _NotInPieces(f"it calls {func}")
        return func(*args, **kwargs)


@dataclass
class _Place:
    """A parameter of the plain module whose values must be drawn."""

    owner: Any  # the module that holds it; rotated when `fill` runs
    key: str
    shape: torch.Size
    device: torch.device


@dataclass
class InitialValues:
    """The writes of a plain module's constructor to its parameters, in order. See `construct`."""

    places: dict[int, _Place] = field(default_factory=dict)  # by storage
    writes: list[_Write] = field(default_factory=list)

    def fill(self, ring: Ring) -> None:
        """Replaces this rank's shards on the meta device by shards with memory and initial values."""
        local_shards: dict[int, torch.Tensor] = {}
        for storage, place in self.places.items():
            empty = held(place.owner._parameters[place.key])
            local_shards[storage] = torch.empty(empty.shape, dtype=empty.dtype, device=place.device)
        with torch.no_grad():
            for write in self.writes:
                storage = _storage(write.target)
                place = self.places[storage]
                dim = place.owner.shard_dims[place.key]
                _draw(write, local_shards[storage], place.shape, dim, ring)
        for storage, place in self.places.items():
            data = as_sharded(local_shards[storage], place.shape, ring, place.owner.shard_dims[place.key])
            requires_grad = place.owner._parameters[place.key].requires_grad
            place.owner._parameters[place.key] = as_parameter(data, requires_grad)


def construct(module: nn.Module, constructor: Callable[..., None], *arguments: Any) -> InitialValues:
    """Calls the constructor of a plain module with its parameters on the meta device, and returns their initial values.

    After the module has been rotated, `fill` draws the values. The module and the random number generator are then in
    the state that they would have if the constructor had drawn whole parameters and this rank had kept its shards.
    Besides the shards, memory holds one piece of at most 1 MiB; on devices other than CPUs, where random numbers
    depend on the size of the tensor, one whole parameter.

    The constructor draws whole parameters at once if a parameter is passed as an argument, if a user's class defines
    reset_parameters, or if the constructor calls an operator that cannot run piece by piece.
    """
    if any(isinstance(argument, torch.Tensor) for argument in arguments):
        constructor(*arguments)
        return InitialValues()
    try:
        _expect_known_reset(type(module))
        with FakeTensorMode(), _Recorder() as recorder:
            constructor(*arguments)
        return _taken_from(module, recorder.writes)
    except _NotInPieces as reason:
        logger.info("%s: initialised whole and then sharded: %s", type(module).__name__, reason)
    constructor(*arguments)
    return InitialValues()


def _expect_known_reset(kind: type) -> None:
    """Raises _NotInPieces if user code initialises the module: a second run of it after a failed recording would draw
    twice, for example from NumPy."""
    resets = {"reset_parameters", "_reset_parameters"}
    author = next(cls for cls in kind.__mro__ if resets & vars(cls).keys())
    if author.__module__.partition(".")[0] not in ("rtp_ext", "torch"):
        raise _NotInPieces(f"{author.__name__} has a reset_parameters of its own")


def _taken_from(module: nn.Module, writes: list[_Write]) -> InitialValues:
    """Replaces fake parameters by parameters on the meta device, which can be sharded, and returns their values."""
    if next(module.buffers(), None) is not None:
        raise _NotInPieces("it has buffers")
    values = InitialValues(writes=[write for write in writes if write.target.device.type != "meta"])
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if parameter.device.type != "meta":
                values.places[_storage(parameter)] = _Place(owner, key, parameter.shape, parameter.device)
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            owner._parameters[key] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    if any(_storage(write.target) not in values.places for write in values.writes):
        raise _NotInPieces("it draws for other tensors than its parameters")
    return values


# -- random operators on shards ----------------------------------------------------------------------------------------

_IN_PLACE = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float)
# what a functional operator draws into a new tensor
_LIKE = {
    _aten.randn_like.default: _aten.normal_.default,
    _aten.rand_like.default: _aten.uniform_.default,
}


def draw_as_whole() -> None:
    """Has random operators on shards draw what they would draw for the whole tensor under the same seed: `nn.init`,
    `parameter.data.normal_()`, `torch.randn_like(parameter)`."""
    patch_random((*_IN_PLACE, *_LIKE), _is_ours, _draw_shard)


def _is_ours(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh in mesh_roles


def _draw_shard(operator: Any, tensor: Any, *arguments: Any, **keywords: Any) -> DTensor:
    """Calls a random operator on the whole tensor, piece by piece where one dimension of the mesh cuts it, and keeps
    this rank's shard."""
    local, mesh, placements = tensor._local_tensor, tensor.device_mesh, tensor.placements
    if operator in _LIKE:
        operator, given, keywords = _LIKE[operator], keywords, {}
        local = torch.empty(
            local.shape, dtype=given.get("dtype") or local.dtype, device=given.get("device") or local.device
        )
        tensor = as_gradient(local, tensor._spec)
    if local.is_meta:
        return tensor
    values = torch.empty(local.shape, dtype=local.dtype, device=local.device)  # a shard may be in another memory format
    cuts = [index for index, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if not cuts:
        operator(values, *arguments, **keywords)
    elif len(cuts) == 1 and type(placements[cuts[0]]) is Shard and operator is not _aten.bernoulli_.float:
        ranks = SimpleNamespace(size=mesh.size(cuts[0]), rank=mesh.get_local_rank(cuts[0]))
        whole = torch.empty(tensor.shape, dtype=local.dtype, device="meta")
        _draw(_Write(whole, operator, arguments, keywords), values, tensor.shape, placements[cuts[0]].dim, ranks)
    else:  # cut twice, or by an operator that draws otherwise for a piece
        whole = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
        values = own_part(operator(whole, *arguments, **keywords), mesh, placements)
    local.copy_(values)
    return tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _draw(write: _Write, local: torch.Tensor, whole: torch.Size, dim: int, ring: Any) -> None:
    """Repeats one write to a parameter of shape `whole`, and keeps the elements of the shard."""
    begin, elements = int(write.target.storage_offset()), write.target.numel()
    if local.shape == whole:
        write.function(local.view(-1)[begin : begin + elements], *write.arguments, **write.keywords)
        return
    step = elements
    if local.device.type == "cpu":  # every piece begins at a block of normal_
        step = max(_BLOCK, _PIECE // local.element_size() // _BLOCK * _BLOCK)
    scratch = torch.empty(min(elements, step + _BLOCK - 1), dtype=local.dtype, device=local.device)
    at = 0
    while at < elements:
        # normal_ redraws the last 16 elements if the last block is partial: the last piece must have at least one block
        end = at + step if elements - at - step >= _BLOCK else elements
        piece = scratch[: end - at]
        write.function(piece, *write.arguments, **write.keywords)
        _keep(piece, begin + at, local, whole, dim, ring)
        at = end


def _keep(piece: torch.Tensor, begin: int, local: torch.Tensor, whole: torch.Size, dim: int, ring: Any) -> None:
    """Copies the shard's part of `piece`, the elements from `begin` on of the whole parameter, to the shard."""
    inner = math.prod(whole[dim + 1 :])
    first, width = (inner * number for number in shard_bounds(whole[dim], ring))
    row = inner * whole[dim]  # length of a row; the shard is the `width` columns from `first` on
    shard = local.view(math.prod(whole[:dim]), width)
    at, end = begin, begin + piece.numel()
    while at < end:
        number, column = divmod(at, row)
        full = 0 if column else (end - at) // row
        if full:
            rows = piece[at - begin : at - begin + full * row].view(full, row)
            shard[number : number + full].copy_(rows[:, first : first + width])
            at += full * row
            continue
        stop = min(end - number * row, row)  # the column where this part of a row ends
        left, right = max(column, first), min(stop, first + width)
        if left < right:
            source = number * row - begin
            shard[number, left - first : right - first].copy_(piece[source + left : source + right])
        at = number * row + stop
