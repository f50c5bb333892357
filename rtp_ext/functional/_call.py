"""What every rotated operation does before and around its native call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rtp_ext import _native
from rtp_ext.parameters.sharding import held, local_shard, reserve
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import rounded
from rtp_ext.ring.gate import Plan
from rtp_ext.ring.mesh import ring_dim, ring_shape
from rtp_ext.ring.primitives import agreements

# What indices and targets may be of.
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Agreed:
    """What the ranks have agreed on for one call: once for each first parameter, ring and combination of facts."""

    shapes: list[tuple[int, ...]]  # of the whole parameters
    serial: int  # the same on every rank
    plan: Plan | None  # None: the operation leaves no choice


@dataclass
class Call:
    """How one call of an operation rotates."""

    ring: Ring
    name: str
    in_place: bool
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    agreed: Agreed | None = None  # set by `agree`
    watched: tuple[torch.Tensor, ...] = ()  # the parameters

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        *,
        ring: Ring,
        name: str,
        in_place: bool,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        autocasts: bool = True,
    ) -> Call:
        """With dtypes chosen: torch.autocast's where it is enabled, else the ones asked for, else the weight's own."""
        ring.check_alive(name)
        if not isinstance(weight, torch.Tensor) or not weight.dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating-point weight, got {getattr(weight, 'dtype', type(weight))}")
        compute = compute_dtype or weight.dtype
        kind = weight.device.type
        if autocasts and torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:
            compute = torch.get_autocast_dtype(kind)
        reduce = reduce_dtype or (torch.float64 if compute == torch.float64 else torch.float32)
        return cls(ring, name, in_place, compute, reduce)

    def options(self) -> Any:
        plan = self.agreed.plan if self.agreed else None
        return _native.RotationOptions(
            route=plan.route if plan else self.ring.hop_route,
            in_place=self.in_place,
            compute_dtype=self.compute_dtype,
            reduce_dtype=self.reduce_dtype,
            slot_cap=self.ring.slot_cap,
            halves=plan is not None and plan.halves,
            name=self.name,
        )

    def run(self, function: Any, *arguments: Any) -> Any:
        return self.ring.run(
            self.name, function, *arguments, serial=self.agreed.serial if self.agreed else 0, watched=self.watched
        )

    def operand(self, x: torch.Tensor, what: str = "an input") -> torch.Tensor:
        """`x` [..., features] in the compute dtype (cast under autocast), checked."""
        if not isinstance(x, torch.Tensor) or x.dim() < 1 or isinstance(x, DTensor):
            raise TypeError(f"{self.name}: expected {what} tensor [..., features], got {x!r:.100}")
        if torch.is_autocast_enabled(self.ring.device.type) and x.is_floating_point():
            x = x.to(self.compute_dtype)
        if x.device != self.ring.device:
            raise TypeError(
                f"{self.name}: expected {what} on {self.ring.device}, the device of the ring, got {x.device}"
            )
        if x.dtype != self.compute_dtype:
            raise TypeError(f"{self.name}: expected {what} of dtype {self.compute_dtype}, got {x.dtype}")
        return x

    @staticmethod
    def rows(x: torch.Tensor) -> torch.Tensor:
        """[..., features] as [rows, features], of which either may be 0."""
        return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@dataclass(frozen=True)
class Home:
    """A home shard: this rank's part of a parameter that is cut along `dim`."""

    what: str
    tensor: torch.Tensor
    dim: int

    @property
    def local(self) -> torch.Tensor:
        return local_shard(self.tensor)

    def check(self, call: Call, dims: int) -> None:
        """Raises where this cannot be a shard of a parameter of `dims` dimensions on the ring of the call."""
        tensor, label = self.tensor, f"{call.name}: expected a {self.what}"
        if not isinstance(tensor, torch.Tensor) or not tensor.dtype.is_floating_point:
            raise TypeError(f"{label} of floating-point numbers, got {getattr(tensor, 'dtype', type(tensor).__name__)}")
        if tensor.dim() != dims:
            raise ValueError(f"{label} of {dims} dimensions, got shape {tuple(tensor.shape)}")
        if isinstance(tensor, DTensor):
            ranks = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)  # replicas come first, the ring last
            if ranks != call.ring.size:
                raise ValueError(f"{label} on {call.ring.size} ranks, got {ranks}")
            if ring_dim(tensor) != self.dim:
                raise ValueError(f"{label} cut along {self.dim}, got placements {tensor.placements}")


def wants(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    """Which tensors will get gradients of what is computed now."""
    grad = torch.is_grad_enabled()
    return tuple(grad and tensor is not None and tensor.requires_grad for tensor in tensors)


def in_dtypes_of(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients, which travelled in the reduce dtype, as autograd wants them: in the dtypes of their parameters."""
    pairs = zip(parameters, gradients, strict=True)
    return [None if gradient is None else rounded(gradient, parameter.dtype) for parameter, gradient in pairs]


def watched_where_read(parameters: Sequence[torch.Tensor], read: Sequence[bool]) -> list[torch.Tensor]:
    """What to save of home shards for a backward: those that it reads as they are, so that autograd notices a write in
    between; of all others, which tell it their shapes only, aliases that anybody may write to."""
    return [parameter if is_read else parameter.data for parameter, is_read in zip(parameters, read, strict=True)]


def saved(ctx: Any) -> tuple[torch.Tensor, ...]:
    """The saved tensors of `ctx`, in its backward. Raises RuntimeError, naming the module, where one of them was
    written since."""
    try:
        ctx.unpacked = ctx.saved_tensors  # for `first_order_only`: a checkpoint hands them out once
        return ctx.unpacked
    except RuntimeError as error:
        raise RuntimeError(f"{ctx.call.name}: {error}") from error


def agree(
    call: Call, homes: Sequence[Home], facts: Sequence[Any], planned: tuple[int, Callable[..., Plan]] | None = None
) -> list[tuple[int, ...]]:
    """The whole shape of every parameter; all ranks agree on them, and on `facts`, before anything travels.

    A DTensor knows its shape. Of plain shards the ranks tell each other, and check that they belong together. Done
    once for each first parameter and combination of facts. Collective then.

    Args:
        planned: this rank's number of tokens, and what makes a Plan of the largest number of any rank and the shapes.
    """
    told_facts = (
        f"dtype {call.compute_dtype}",
        f"reduce_dtype {call.reduce_dtype}",
        f"in_place {call.in_place}",
        *facts,
    )
    mine = [(h.what, tuple(held(h.tensor).shape), str(h.tensor.dtype), h.dim) for h in homes]
    agreed = agreements(homes[0].tensor)
    key = (call.ring.serial, tuple(mine), told_facts)
    if key not in agreed:
        agreed[key] = _agree_anew(call, homes, mine, told_facts, planned)
    call.agreed = agreed[key]
    call.watched = tuple(home.tensor for home in homes)
    return agreed[key].shapes


def _agree_anew(
    call: Call,
    homes: Sequence[Home],
    mine: list[tuple],
    facts: tuple,
    planned: tuple[int, Callable[..., Plan]] | None,
) -> Agreed:
    wholes = [ring_shape(h.tensor) if isinstance(h.tensor, DTensor) else None for h in homes]
    told = call.ring.exchange((call.name, wholes, mine, facts, planned[0] if planned else 0))
    for rank, theirs in enumerate(told):
        if _comparable(theirs) != _comparable(told[0]):
            raise ValueError(
                f"{call.name}: the ranks of the ring disagree: expected {_describe(told[0])} (rank 0), got "
                f"{_describe(theirs)} on rank {rank}"
            )
    shapes = []
    for index, (home, whole) in enumerate(zip(homes, wholes, strict=True)):
        locals_ = [theirs[2][index][1] for theirs in told]
        shapes.append(whole or _assemble(f"{call.name}: {home.what}", locals_, home.dim))
    plan = planned[1](max(theirs[4] for theirs in told), shapes) if planned else None
    return Agreed(shapes, call.ring.new_agreement(), plan)


def _comparable(told: tuple) -> tuple:
    name, wholes, shards, facts, _ = told
    return name, wholes, [(what, len(shape), dtype, dim) for what, shape, dtype, dim in shards], facts


def _describe(told: tuple) -> str:
    name, wholes, shards, facts, _ = told
    parameters = ", ".join(
        f"{what} {whole or f'shard {shape}'} {dtype} cut along {dim}"
        for whole, (what, shape, dtype, dim) in zip(wholes, shards, strict=True)
    )
    return f"{name} with {parameters}; {', '.join(map(str, facts))}"


def _assemble(name: str, shapes: list[tuple[int, ...]], dim: int) -> tuple[int, ...]:
    """The whole shape of plain shards, which must be what the chunk rule makes of it."""
    extent = sum(shape[dim] for shape in shapes)
    whole = [*shapes[0]]
    whole[dim] = extent
    sizes = _native.shard_sizes(extent, len(shapes))
    for rank, shape in enumerate(shapes):
        expected = [*whole]
        expected[dim] = sizes[rank]
        if list(shape) != expected:
            raise ValueError(
                f"{name} shards do not belong together: expected shape {tuple(expected)} on rank {rank} for a whole "
                f"of {tuple(whole)}, got {tuple(shape)}; shards of all ranks: {shapes}"
            )
    return tuple(whole)


def expect_shape(call: Call, home: Home, actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises ValueError where the whole parameter behind a home shard has another shape than expected."""
    if actual == expected:
        return
    shard = [*expected]
    if home.dim < len(shard):
        shard[home.dim] = _native.shard_sizes(expected[home.dim], call.ring.size)[call.ring.rank]
    raise ValueError(
        f"{call.name}: expected a whole {home.what} of shape {expected}, got {actual}; on rank {call.ring.rank} a "
        f"shard of shape {tuple(shard)}, got {tuple(home.local.shape)}"
    )


def prepare_in_place(call: Call, homes: Sequence[Home], shapes: Sequence[tuple[int, ...]]) -> None:
    """Gives the home shards room for the largest shard, where they will travel themselves."""
    if not call.in_place or call.ring.transport == "shm":  # over shm copies travel
        return
    for home, shape in zip(homes, shapes, strict=True):
        reserve(home.tensor, shape, home.dim, call.ring, call.name)
