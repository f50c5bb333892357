"""The steps that all rotated operations share before and around their native call."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rtp_ext import _native
from rtp_ext.functional._selective import as_operator
from rtp_ext.parameters.sharding import frozen_of, held, local_shards, reserve
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.autograd import expect_memory, holds_memory, unseen
from rtp_ext.ring.cpu_offload import on_device
from rtp_ext.ring.links.agree import expect_same
from rtp_ext.ring.mesh import ring_dim, ring_shape
from rtp_ext.ring.routes.route_planner import LayerSize, TableSize

# Dtypes of indices and targets.
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_ALWAYS_THERE = nullcontext()
_requires_grad = operator.attrgetter("requires_grad")


@dataclass(slots=True)
class OperationPlan:
    """The plan of an operation, derived from its parameters and options; the value of one key of a Prepared."""

    name: str
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    shapes: list[tuple[int, ...]]  # whole shapes of the parameters
    serial: int  # the same on every rank; 0: the operation is not prefetched
    size: LayerSize | TableSize | None  # input of the RoutePlanner; None: the operation has one route only
    options: Any = None  # native RotationOptions
    derived: Any = None  # result of `derive`
    late: bool = False  # gradients may arrive after the pass
    by_rows: bool = False  # rows of a table travel, and not its shards
    takes_groups: bool = False  # several shards can be one operand
    storages: list[tuple[int, int]] | None = None  # address and bytes of local shards that can hold the largest shard

    def plan(self, ring: Ring, tokens: int | None) -> None:
        """Chooses the routes of weights and gradients for `tokens`, the largest number on any rank; None: unknown."""
        route = "gather" if ring.gate.gathers and self.takes_groups else ring.hop_route
        halves, group = bool(ring.gate.gradient_halves), None
        if isinstance(self.size, TableSize):
            self.by_rows = ring.gate.plan_table(self.name, tokens, self.size).by_rows
        elif self.size is not None:
            plan = ring.gate.plan(self.name, tokens, self.size, self.compute_dtype, in_place=ring.in_place)
            route, halves, group = plan.route, plan.halves, plan.group
        self.options = ring.route_plan.rotation(
            self.name,
            route=route,
            halves=halves,
            group=group,
            slot_cap=ring.slot_cap,
            in_place=ring.in_place,
            compute_dtype=self.compute_dtype,
            reduce_dtype=self.reduce_dtype,
            late=self.late,
            ranks=ring.size,
            gradient_bytes=sum(map(math.prod, self.shapes)) * self.reduce_dtype.itemsize,
        )


@dataclass(slots=True)
class Call:
    """One call of an operation: its ring, dtypes and native options.

    [Note: watched tensors]
    Passes read local shards, while users write to parameters, and the two are different tensors. The parameters of a
    call are watched by their version counters: a hop that was sent ahead is dropped where one has changed since
    (csrc/engine/prefetch.cpp), and a backward that needs the old values raises. Shards share the counters of their
    parameters (`share_version`); in graphs of compilers, where autograd saves other tensors, versions and addresses
    travel beside what it saves (`torch_compile/operators.py`).
    """

    ring: Ring
    name: str
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    needs: tuple[bool, ...] = ()  # inputs, then parameters, that need gradients; empty: `prepare` fills it in
    # `prepare` sets these:
    options: Any = None
    serial: int = 0
    by_rows: bool = False  # of an embedding: see OperationPlan
    watched: tuple[torch.Tensor, ...] = ()  # the parameters
    late: tuple[Ring, int] | None = None  # see `local_shards`
    params: Sequence[ShardedParameter] = ()  # what `prepare` was given

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        *,
        ring: Ring,
        name: str,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        autocasts: bool = True,
    ) -> Call:
        """Returns a call with its dtypes: that of torch.autocast if enabled, else the arguments, else the weight's."""
        ring.check_alive(name)
        dtype: Any = getattr(weight, "dtype", type(weight))
        if dtype is torch.uint8 and (frozen := frozen_of(weight)) is not None:  # blocks are bytes
            dtype = frozen.dtype
        if not isinstance(weight, torch.Tensor) or not dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating-point weight, got {dtype}")
        compute = compute_dtype or dtype
        kind = ring.device.type  # an offloaded weight is on the host
        if autocasts and torch.is_autocast_enabled(kind) and dtype != torch.float64:
            compute = torch.get_autocast_dtype(kind)
        reduce = reduce_dtype or (torch.float64 if compute == torch.float64 else torch.float32)
        return cls(ring, name, compute, reduce)

    def run(self, function: Any, *arguments: Any) -> Any:
        ring = self.ring
        if not _native.are_memory(arguments):
            arguments = tuple(expect_memory(self.name, arguments))
        identity: dict[str, Any] = {"serial": self.serial, "watched": self.watched, "checked": True}
        if ring.host_memory is None:
            return ring.run(self.name, function, *arguments, **identity)
        with self.on_device():
            return ring.run(self.name, function, *arguments, **identity)

    def once(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        compute: Callable[[], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """Returns `compute()` of a forward, as one operator for selective checkpointing: see `as_operator`."""
        if torch._C._len_torch_dispatch_stack() == 0:
            return compute()
        return as_operator(self, name, inputs, shards, compute)

    def on_device(self) -> AbstractContextManager[None]:
        """Keeps offloaded parameters on the device while native code reads them."""
        return _ALWAYS_THERE if self.ring.host_memory is None else on_device(self.watched)

    def operand(self, x: torch.Tensor, what: str = "an input") -> torch.Tensor:
        """`x` [..., features] in the compute dtype (cast under autocast), checked."""
        if not isinstance(x, torch.Tensor) or x.dim() < 1 or isinstance(x, DTensor):
            raise TypeError(f"{self.name}: expected {what} tensor [..., features], got {x!r:.100}")
        if type(x) is not torch.Tensor:
            expect_memory(self.name, (x,))
        if x.dtype != self.compute_dtype and torch.is_autocast_enabled(self.ring.device.type) and x.is_floating_point():
            x = x.to(self.compute_dtype)
        if x.device != self.ring.device:
            raise TypeError(
                f"{self.name}: expected {what} on {self.ring.device}, the device of the ring, got {x.device}"
            )
        if x.dtype != self.compute_dtype:
            raise TypeError(f"{self.name}: expected {what} of dtype {self.compute_dtype}, got {x.dtype}")
        return x

    def local_shards(self) -> list[torch.Tensor]:
        """Returns this rank's shards of the parameters that `prepare` was given, differentiable."""
        return local_shards(self.watched, self.late)

    @staticmethod
    def rows(x: torch.Tensor) -> torch.Tensor:
        """Returns [..., features] as [rows, features]; either extent may be 0."""
        return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


@dataclass(slots=True)
class ShardedParameter:
    """This rank's local shard of a parameter of `dims` dimensions that is cut along `dim`."""

    what: str
    tensor: torch.Tensor
    dim: int
    dims: int

    def check(self, call: Call) -> None:
        """Raises TypeError or ValueError if the tensor is not such a shard on the ring of the call."""
        tensor, label = self.tensor, f"{call.name}: expected a {self.what}"
        in_blocks = frozen_of(tensor) is not None
        if not in_blocks and (not isinstance(tensor, torch.Tensor) or not tensor.dtype.is_floating_point):
            raise TypeError(f"{label} of floating-point numbers, got {getattr(tensor, 'dtype', type(tensor).__name__)}")
        expect_memory(f"{call.name}: {self.what}", (held(tensor),))
        if not in_blocks and tensor.dim() != self.dims:
            raise ValueError(f"{label} of {self.dims} dimensions, got shape {tuple(tensor.shape)}")
        if isinstance(tensor, DTensor):
            ranks = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)  # replicas come first, the ring last
            if ranks != call.ring.size:
                raise ValueError(f"{label} on {call.ring.size} ranks, got {ranks}")
            if ring_dim(tensor) != self.dim:
                raise ValueError(
                    f"{label} cut along {self.dim}, got placements {tensor.placements}: modules that share a parameter "
                    "have to share it before fully_rotate, which then cuts it for all of them"
                )

    def expect_sharded(self, call: Call) -> None:
        if not isinstance(self.tensor, DTensor):
            raise ValueError(
                f"{call.name}: expected a {self.what} that is a DTensor on the mesh of the ring, got a plain tensor of "
                f"shape {tuple(self.tensor.shape)}: every rank would use a whole tensor as its shard. Load values into "
                "the parameter instead: load_state_dict, rtp_ext.init_weights, or copy_ of a shard"
            )


def needs_gradients(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    """Returns for each tensor whether autograd will compute its gradient for the current computation."""
    grad, found = torch.is_grad_enabled(), []
    for tensor in tensors:
        found.append(grad and tensor is not None and tensor.requires_grad)
    return tuple(found)


def saved(ctx: Any) -> tuple[torch.Tensor, ...]:
    """Returns the saved tensors of `ctx` in its backward. Raises RuntimeError with the module's name if one of them was
    modified after the forward."""
    try:
        ctx.unpacked = ctx.saved_tensors  # for `first_order_only`: a checkpoint returns them once
        return ctx.unpacked
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # from a recomputation, such as RingTimeout
            raise
        raise RuntimeError(f"{ctx.call.name}: {error}") from error


def prepare(
    call: Call,
    prepared: Prepared | None,
    operation: str,
    params: Sequence[ShardedParameter],
    inputs: Sequence[torch.Tensor],
    facts: tuple[tuple[str, Any], ...],
    derive: Callable[[list[tuple[int, ...]]], Any],
    *,
    tokens: int | None = None,
    size: Callable[[list[tuple[int, ...]]], LayerSize | TableSize] | None = None,
    late: bool = False,
    fresh: bool = False,
) -> Any:
    """Makes `call` ready to run and returns `derive(whole shapes)`, computed once and kept in `prepared`.

    All ranks agree on the shapes, on `facts` and on the required gradients before anything travels; in the forward
    of a converted model, before its backward. Collective if `prepared` has no matching entry.

    Args:
        operation: name of the operation.
        inputs: inputs that may require gradients, besides the parameters.
        facts: hashable values by name that decide hops or the result of `derive`. They must not vary between calls.
        derive: raises if the shapes do not match. All calls share its result, which must not hold a tensor or
            properties of an input.
        tokens, size: for an operation with several routes: this rank's number of tokens, and its LayerSize or
            TableSize as a function of the whole shapes.
        late: the backward passes the gradients of parameters on without reading them.
        fresh: the parameters are new tensors in each call, so that no shard can travel ahead of it.
    """
    ring, plain = call.ring, False
    looks: list[tuple] = []
    watched: list[torch.Tensor] = []
    for param in params:
        tensor, spec = param.tensor, None
        if isinstance(tensor, DTensor):
            kind, spec = type(tensor._local_tensor), tensor._spec
        elif isinstance(tensor, torch.Tensor):
            kind, plain = type(tensor), True
        else:
            param.check(call)  # raises
        memory = kind is torch.Tensor or kind is torch.nn.Parameter or holds_memory(kind)
        looks.append((param.what, param.dim, tensor.shape, tensor.dtype, memory, spec))
        watched.append(tensor)
    call.params, call.watched = params, tuple(watched)
    if not call.needs:
        needing = (*inputs, *watched)
        call.needs = tuple(map(_requires_grad, needing)) if torch.is_grad_enabled() else (False,) * len(needing)
    # Plain shards do not determine the whole shapes, so that without a Prepared their plan cannot be found again.
    identified = prepared is not None or not plain or ring.alone
    table = (ring.common if prepared is None else prepared) if identified else Prepared()
    dtypes = (call.compute_dtype, call.reduce_dtype)
    key = (operation, ring.serial, call.name, dtypes, ring.in_place, facts, call.needs, *looks)
    last, ready = table.last
    if last != key:
        ready = table.found.get(key)
    if ready is None:
        _check(call, prepared, params)
        serial = 0 if prepared is None or fresh else ring.new_agreement()
        ready = _agree(call, table, key, params, facts, serial, tokens or 0, size, late)
        ready.derived = derive(ready.shapes)
        table.found[key] = ready
    if last != key:
        table.last = key, ready
    if tokens is not None and prepared is not None and tokens > prepared.seen:
        prepared.seen = tokens
    if ring.in_place and not ring.transport.startswith("shm"):  # over shm copies travel
        _reserve_largest(call, ready, params)
    if ready.late:
        call.late = ring, ring.late_after()
    call.options, call.serial, call.by_rows = ready.options, ready.serial, ready.by_rows
    return ready.derived


@unseen
def _check(call: Call, prepared: Prepared | None, params: Sequence[ShardedParameter]) -> None:
    for param in params:
        param.check(call)
        if prepared is not None and prepared.sharded and call.ring.mesh is not None:
            param.expect_sharded(call)


@unseen
def _agree(
    call: Call,
    table: Prepared,
    key: Any,
    params: Sequence[ShardedParameter],
    facts: tuple[tuple[str, Any], ...],
    serial: int,
    tokens: int,
    size: Callable[[list[tuple[int, ...]]], LayerSize | TableSize] | None,
    late: bool,
) -> OperationPlan:
    ring = call.ring
    wholes = [ring_shape(param.tensor) if isinstance(param.tensor, DTensor) else None for param in params]
    shards = [(param.what, tuple(held(param.tensor).shape), str(param.tensor.dtype), param.dim) for param in params]
    words = [
        f"dtype {call.compute_dtype}",
        f"reduce_dtype {call.reduce_dtype}",
        f"in_place {ring.in_place}",
        f"gradients of inputs {call.needs[: -len(params)]}",
        f"gradients of {', '.join(param.what for param in params)} {call.needs[-len(params) :]}",
        *(f"{name} {value}" for name, value in facts),
    ]
    mine = (call.name, wholes, shards, words, tokens if size is not None and ring.gate.decides else 0)
    most: int | None
    if None not in wholes and ring.postpone(table, key, _describe(mine)):
        answers, most = [mine] * ring.size, table.most
    else:
        answers = ring.exchange(mine)
        most = max(theirs[4] for theirs in answers)
    expect_same(f"{call.name}: the ranks of the ring disagree", answers, show=_describe, key=_comparable)
    shapes = []
    for index, (param, whole) in enumerate(zip(params, wholes, strict=True)):
        locals_ = [theirs[2][index][1] for theirs in answers]
        shapes.append(whole or _assemble(f"{call.name}: {param.what}", locals_, param.dim))
    layer = None if size is None else size(shapes)
    ready = OperationPlan(call.name, call.compute_dtype, call.reduce_dtype, shapes, serial, layer)
    # A gradient may arrive late only if no code reads it before the node of its shard: no cast, no plain tensor.
    arrives = ring.gradients.local_dtype(ring.hop_route, call.reduce_dtype)
    unread = all(isinstance(param.tensor, DTensor) and param.tensor.dtype == arrives for param in params)
    ready.late = late and unread and bool(ring.options.late_gradients)
    in_blocks = any(frozen_of(param.tensor) is not None for param in params)
    ready.takes_groups = _native.operation_kind(key[0]).groups and not in_blocks
    ready.plan(ring, most)
    return ready


@unseen
def _reserve_largest(call: Call, ready: OperationPlan, params: Sequence[ShardedParameter]) -> None:
    """Enlarges the storage of the local shards to the largest shard: in place, other shards arrive in it."""
    if ready.storages != _storages(params):
        for param, shape in zip(params, ready.shapes, strict=True):
            reserve(param.tensor, shape, param.dim, call.ring, call.name)
        ready.storages = _storages(params)


def _storages(params: Sequence[ShardedParameter]) -> list[tuple[int, int]]:
    local = [held(param.tensor) for param in params]
    return [(tensor.data_ptr(), tensor.untyped_storage().nbytes()) for tensor in local]


def _comparable(answers: tuple) -> tuple:
    name, wholes, shards, facts, _ = answers
    return name, wholes, [(what, len(shape), dtype, dim) for what, shape, dtype, dim in shards], facts


def _describe(answers: tuple) -> str:
    name, wholes, shards, facts, _ = answers
    parameters = ", ".join(
        f"{what} {whole or f'shard {shape}'} {dtype} cut along {dim}"
        for whole, (what, shape, dtype, dim) in zip(wholes, shards, strict=True)
    )
    return f"{name} with {parameters}; {', '.join(map(str, facts))}"


def _assemble(name: str, shapes: list[tuple[int, ...]], dim: int) -> tuple[int, ...]:
    """Returns the whole shape of plain shards. Raises ValueError if the shards do not follow the chunk rule."""
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


def expect_shape(call: Call, param: ShardedParameter, actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises ValueError if the whole parameter of a local shard does not have the expected shape."""
    if actual == expected:
        return
    shard = [*expected]
    if param.dim < len(shard):
        shard[param.dim] = _native.shard_sizes(expected[param.dim], call.ring.size)[call.ring.rank]
    raise ValueError(
        f"{call.name}: expected a whole {param.what} of shape {expected}, got {actual}; on rank {call.ring.rank} a "
        f"shard of shape {tuple(shard)}, got {tuple(held(param.tensor).shape)}"
    )
