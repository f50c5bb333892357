"""Initial values: what the constructor of a plain module draws, drawn in pieces into this rank's shards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rtp_ext.parameters.sharding import as_sharded, held, shard_bounds
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import as_parameter

logger = logging.getLogger("rtp_ext")

_PIECE = 1 << 20  # bytes that are drawn at once
_BLOCK = 16  # elements that normal_ computes together

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
# Written element after element, in the order of memory.
_WRITES = {_aten.uniform_.default, _aten.normal_.default, _aten.fill_.Scalar, _aten.zero_.default}


class _NotInPieces(Exception):
    """The constructor does what cannot be done piece by piece."""


@dataclass
class _Write:
    target: torch.Tensor  # without memory: a parameter of the plain module, or a part of one
    function: Any
    arguments: tuple
    keywords: dict[str, Any]


class _Recorder(TorchDispatchMode):
    """Notes what is written to tensors without memory. Raises _NotInPieces for what it does not know."""

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
    """A parameter of the plain module that is to be drawn."""

    owner: Any  # a rotated module, once it has been rotated
    key: str
    shape: torch.Size
    device: torch.device


@dataclass
class InitialValues:
    """What the constructor of a plain module has written to its parameters, in order. See `construct`."""

    places: dict[int, _Place] = field(default_factory=dict)  # by storage
    writes: list[_Write] = field(default_factory=list)

    def fill(self, ring: Ring) -> None:
        """Gives this rank's shards their memory and their values, in place of the shards on the meta device."""
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
    """Calls the constructor of a plain module with the parameters on the meta device, and returns their values to be.

    Once the module has been rotated, `fill` of what is returned leaves it, and the random number generator, as if the
    constructor had drawn whole parameters and this rank had kept its shards. Alive beyond the shards is one piece of
    1 MiB at most; on other devices than CPUs, whose random numbers depend on the size of the tensor, one whole
    parameter at a time.

    The parameters are drawn whole right away, where they are given and not drawn, where a class of the user's has a
    reset_parameters of its own, and where the constructor computes what pieces do not suffice for.
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
    """What a user's own code draws from (NumPy, say) must not be drawn from twice, should it not come in pieces."""
    resets = {"reset_parameters", "_reset_parameters"}
    author = next(cls for cls in kind.__mro__ if resets & vars(cls).keys())
    if author.__module__.partition(".")[0] not in ("rtp_ext", "torch"):
        raise _NotInPieces(f"{author.__name__} has a reset_parameters of its own")


def _taken_from(module: nn.Module, writes: list[_Write]) -> InitialValues:
    """Replaces the parameters without memory by such on the meta device, which can be sharded."""
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


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _draw(write: _Write, local: torch.Tensor, whole: torch.Size, dim: int, ring: Ring) -> None:
    """Draws all that one call wrote to a parameter of shape `whole`, and keeps what lies in the shard."""
    begin, elements = int(write.target.storage_offset()), write.target.numel()
    if local.shape == whole:
        write.function(local.view(-1)[begin : begin + elements], *write.arguments, **write.keywords)
        return
    step = elements
    if local.device.type == "cpu":  # a piece for the next time begins where normal_ would begin a block
        step = max(_BLOCK, _PIECE // local.element_size() // _BLOCK * _BLOCK)
    scratch = torch.empty(min(elements, step + _BLOCK - 1), dtype=local.dtype, device=local.device)
    at = 0
    while at < elements:
        # normal_ draws the last block once more where it is not a full one: the last piece has more than that rest
        end = at + step if elements - at - step >= _BLOCK else elements
        piece = scratch[: end - at]
        write.function(piece, *write.arguments, **write.keywords)
        _keep(piece, begin + at, local, whole, dim, ring)
        at = end


def _keep(piece: torch.Tensor, begin: int, local: torch.Tensor, whole: torch.Size, dim: int, ring: Ring) -> None:
    """Copies to the shard what it has of the elements from `begin` on of the whole parameter."""
    inner = math.prod(whole[dim + 1 :])
    first, width = (inner * number for number in shard_bounds(whole[dim], ring))
    row = inner * whole[dim]  # the parameter as rows, of which the shard has the columns from `first` on
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
