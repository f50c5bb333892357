"""Modules whose parameters are too small or too special to rotate: norms, stray parameters, unknown modules.

The registered Parameter is a DTensor shard and stays registered. While a forward of the converted model runs, a
property of the module's subclass returns the gathered parameter instead; the backward of the gather averages the
gradient over the ring. Outside of forwards the property returns the Parameter. A parameter that tensor parallelism has
replicated is returned as a DTensor on its mesh, whose backward sums the gradients of the ranks there.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

from rtp_ext._native import share_version
from rtp_ext.compilers import tracing
from rtp_ext.convert.modules.gathered_copies import GatheredCopies, keep_writes, version_of
from rtp_ext.functional.torch_compile import traced
from rtp_ext.outer.policy import OuterPolicy, Unit
from rtp_ext.parameters.extensions import is_extended, shard_extended
from rtp_ext.parameters.gather import GatherPlan, gather
from rtp_ext.parameters.sharded_module import ShardedModule
from rtp_ext.parameters.sharding import shard_parameter
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import first_order_only, summing_dtype, unseen
from rtp_ext.ring.registry import register
from rtp_ext.ring.replicated_gradients import check_replicated_gradient

# Up to this many bytes of whole parameters a module is small: the parameters of all small modules are gathered
# together, once in a forward. Autograd keeps them for backward in any case. Others are gathered at their use.
_SMALL = 1 << 20


class ForwardScope:
    """The nesting depth of a converted model's forwards, and the parameters gathered for the outermost one."""

    def __init__(self, ring: Ring, mp_policy: MixedPrecisionPolicy) -> None:
        self.ring = ring
        self.mp_policy = mp_policy
        self.depth = 0
        self.root_depth = 0  # nesting depth of forwards of the whole model
        self.split = False  # whether a backward may compute input gradients first, and parameter gradients later
        self.small: list[GatheredModule] = []  # modules that a forward of the whole model gathers in one collective
        self.gathered: dict[int, GatheredCopies] = {}  # by id of the owner
        self.failing: Any = None  # the exception that was being handled when the forward began
        # For compiled graphs:
        self._rtp_number = register(self)
        self.handed = False  # whether the small ones have been gathered for the forward that runs
        self.in_graph: list[torch.Tensor] | None = None  # their parameters, while the whole forward is traced

    def enter(self) -> None:
        self.depth += 1

    def hand_out(self) -> None:
        """Gathers the small modules at the beginning of a forward of the whole model. Within another forward, or after
        one without an end, earlier gathered parameters remain valid unless they were written since."""
        if not self.small or torch._C._current_graph_task_id() != -1:
            return
        if self.handed and all(self.gathered[id(each)].serve() for each in self.small):
            return
        self._gather_for(self.small)
        for each in self.small:
            each.__dict__["_rtp_wholes"] = [*self.gathered[id(each)].wholes.values()]
        self.handed = True

    def leave(self) -> None:
        self.depth = max(self.depth - 1, 0)
        if self.depth == 0:
            try:
                self._end_copies()
            finally:
                self.gathered.clear()
                if self.handed:
                    self.handed = False
                    for each in self.small:
                        each.__dict__["_rtp_wholes"] = None

    def _end_copies(self) -> None:
        """Handles writes to gathered copies at the end of a forward."""
        if sys.exc_info()[1] is not self.failing or torch._C._current_graph_task_id() != -1:
            return
        keep_writes([*self.gathered.values()], self.ring)

    def __deepcopy__(self, memo: dict) -> ForwardScope:
        twin = type(self)(self.ring, self.mp_policy)
        memo[id(self)] = twin
        twin.small = copy.deepcopy(self.small, memo)
        return twin

    def parameter(self, owner: GatheredModule, name: str) -> Any:
        """Returns the parameter `name` of `owner`: the gathered one inside a forward, else the registered one."""
        if torch.compiler.is_dynamo_compiling() and tracing(self.ring):
            return self.parameters_while_compiling(owner)[owner._rtp_gathered.index(name)]
        registered = owner._parameters[name]
        if registered is None or name not in owner._rtp_gathered:
            return registered
        # In a backward, activation checkpointing may recompute a function that is no module's forward.
        recomputing = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        if self.depth == 0:
            return self._gather([owner])[0][name] if recomputing else registered
        known = self.gathered.get(id(owner))
        if known is None or not known.serve():
            self._gather_for(self.small if self.root_depth > 0 and not recomputing and owner in self.small else [owner])
        return self.gathered[id(owner)].wholes[name]

    def parameters_while_compiling(self, owner: GatheredModule) -> list[torch.Tensor]:
        """Returns the whole parameters of `owner` while a compiler traces."""
        if self.in_graph is not None and owner._rtp_first >= 0:
            return self.in_graph[owner._rtp_first : owner._rtp_first + len(owner._rtp_gathered)]
        handed = owner._rtp_wholes
        return self.gather_in_graph(owner) if handed is None else handed

    def gather_in_graph(self, owner: GatheredModule) -> list[torch.Tensor]:
        """Gathers the parameters of `owner` in a graph: a part that is called without the model, or is not small."""
        return traced.gather(owner, self.ring, [*owner.rtp_sharded().values()], self.mp_policy)

    def gather_small_in_graph(self) -> None:
        """Gathers the small modules where a forward of the whole model begins in a graph."""
        if self.small:
            parameters = [parameter for each in self.small for parameter in each.rtp_sharded().values()]
            self.in_graph = traced.gather(self, self.ring, parameters, self.mp_policy)

    def _gather_plan(self) -> GatherPlan:
        owners = [pair for each in self.small for pair in each.rtp_owned()]
        return GatherPlan(owners, self.ring, self.mp_policy)

    @unseen
    def _gather_for(self, owners: list[GatheredModule]) -> None:
        """Gathers the parameters of several modules for the forward that runs."""
        known = [self.gathered[id(each)] for each in owners if id(each) in self.gathered]
        self.gathered.update((id(copies.owner), copies) for copies in keep_writes(known, self.ring))
        if len(known) == len(owners) and all(self.gathered[id(each)].serve() for each in owners):
            return
        sent: list[torch.Tensor] = []
        wholes, parts = self._gather(owners, sent), iter(sent)
        for each, whole in zip(owners, wholes, strict=True):
            own = {name: next(parts) for name in whole} if sent else {}
            self.gathered[id(each)] = GatheredCopies(each, version_of(each), whole, own)

    @unseen
    def _gather(
        self, owners: list[GatheredModule], sent: list[torch.Tensor] | None = None
    ) -> list[dict[str, torch.Tensor]]:
        """Returns the whole parameters of each owner, gathered by one collective. sent: see `gather`."""
        own = [owner.rtp_sharded() for owner in owners]
        # A pipeline that computes input gradients first computes parameter gradients later, for one node of autograd
        # after the other, and frees the graph between the uses of its parameters.
        counts = None
        if self.split or self.root_depth == 0:
            counts = [count for owner in owners for count in owner.rtp_used_together()]
        parameters = [p for each in own for p in each.values()]
        belong = [pair for owner in owners for pair in owner.rtp_owned()]
        whole = iter(gather(parameters, self.ring, self.mp_policy, belong, counts, sent))
        return [
            {name: self._shown(owner, name, next(whole)) for name in each}
            for owner, each in zip(owners, own, strict=True)
        ]

    def _shown(self, owner: GatheredModule, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that stands for a whole parameter in its module."""
        if name not in owner._rtp_replicated:
            return whole
        assert self.ring.tensor_mesh is not None, "tensor parallelism replicated it"
        shown = DTensor.from_local(whole, self.ring.tensor_mesh, [Replicate()], run_check=False)
        share_version(shown, owner._parameters[name])
        return shown


class GatheredModule(ShardedModule):
    """Mixin of modules whose own parameters are gathered. Made by `make_gathered`."""

    _parameters: dict[str, Any]
    _modules: dict[str, Any]
    _rtp_scope: ForwardScope
    _rtp_gathered: tuple[str, ...]
    _rtp_replicated: frozenset[str]  # those that are DTensors of tensor parallelism
    _rtp_first: int  # index of its first parameter among those of all small modules; -1: it is not small
    _rtp_wholes: list[torch.Tensor] | None  # the gathered parameters, for compiled graphs

    def rtp_sharded(self) -> dict[str, torch.Tensor]:
        """Returns the registered parameters that are gathered, by name."""
        return {name: self._parameters[name] for name in self._rtp_gathered}

    def rtp_owned(self: Any) -> list[tuple[str, Any]]:
        """Returns the name of each parameter that is gathered, and the module."""
        return [(name, self) for name in self._rtp_gathered]

    def _gather_plan(self) -> GatherPlan:
        return GatherPlan(self.rtp_owned(), self._rtp_scope.ring, self._rtp_scope.mp_policy)

    def rtp_is_handed(self) -> bool:
        """Returns whether a forward of the whole model has gathered its parameters."""
        return self._rtp_first >= 0 and (self._rtp_scope.handed or self._rtp_scope.in_graph is not None)

    def rtp_gather_own(self) -> None:
        """Gathers its parameters while a compiler traces, once for all uses in its forward."""
        if not self.rtp_is_handed():
            self._rtp_wholes = self._rtp_scope.gather_in_graph(self)

    def rtp_used_together(self) -> list[int]:
        """Returns numbers of gathered parameters that are used at one place, with no other module in between."""
        count = len(self._rtp_gathered)
        return [1] * count if self._modules else [count]


class GatheredRNN(GatheredModule):
    """A recurrent layer. It keeps a list of its weights, in which gathered parameters would outlive the forward."""

    _flat_weights: list[Any]
    _flat_weight_refs: list[Any]
    _flat_weights_names: list[str]

    def list_registered(self) -> None:
        """Fills the list with the registered parameters; the next forward makes another list."""
        for index, name in enumerate(self._flat_weights_names):
            if name in self._rtp_gathered:
                self._flat_weights[index] = self._parameters[name]
                self._flat_weight_refs[index] = _NOTHING  # to a parameter, it would keep it from being swapped

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().forward(*arguments, **keywords)  # type: ignore[misc]
        finally:
            self.list_registered()

    def __deepcopy__(self, memo: dict) -> Any:
        twin = super().__deepcopy__(memo)
        twin.list_registered()
        return twin


_NOTHING: weakref.ref[Any] = weakref.ref(set())  # a dead reference

_CLASSES: dict[tuple[type, tuple[str, ...]], type] = {}


def make_gathered(
    module: nn.Module, ring: Ring, scope: ForwardScope, memo: dict[int, nn.Parameter], label: str
) -> None:
    """Shards the module's own parameters along their first dimension, to be gathered in forwards."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    replicated = frozenset(name for name, parameter in own.items() if isinstance(parameter, DTensor))
    for name, parameter in own.items():
        if id(parameter) not in memo:
            special = is_extended(parameter)
            memo[id(parameter)] = shard_extended(parameter, ring) if special else shard_parameter(parameter, ring, 0)
        module._parameters[name] = memo[id(parameter)]
    names = tuple(own)
    size = sum(parameter.numel() * parameter.element_size() for parameter in own.values())
    base = type(module)
    if (base, names) not in _CLASSES:
        members = {name: _gathered_property(name) for name in names}
        mixin = GatheredRNN if issubclass(base, nn.RNNBase) else GatheredModule
        _CLASSES[base, names] = type(f"Gathered{base.__name__}", (mixin, base), members)
    module.__class__ = _CLASSES[base, names]
    module.__dict__["_rtp_scope"] = scope
    module.__dict__["qualified_name"] = label
    module.__dict__["_rtp_gathered"] = names
    module.__dict__["_rtp_replicated"] = replicated
    if isinstance(module, GatheredRNN):
        module.list_registered()
    module.__dict__["_rtp_wholes"] = None
    module.__dict__["_rtp_number"] = register(module)
    module.__dict__["_rtp_first"] = sum(len(each._rtp_gathered) for each in scope.small) if size <= _SMALL else -1
    if size <= _SMALL:
        scope.small.append(module)  # type: ignore[arg-type]


def _gathered_property(name: str) -> property:
    def read(self: Any) -> Any:
        adapted = self.__dict__.get(name)  # by an adapter, for the forward that runs
        return self._rtp_scope.parameter(self, name) if adapted is None else adapted

    return property(read)


_WATCHED = "_rtp_averaged"  # attribute of a whole parameter: the serial of the ring that averages its gradient


def is_averaged(parameter: torch.Tensor, ring: Ring) -> bool:
    """Returns whether `average_gradient` was called with a whole parameter."""
    return parameter.__dict__.get(_WATCHED) == ring.serial


def foreign_hooks(parameter: torch.Tensor) -> list[Any]:
    """Returns the tensor hooks of a parameter without those of `average_gradient`."""
    return [hook for hook in (parameter._backward_hooks or {}).values() if not hasattr(hook, _WATCHED)]


def average_gradient(name: str, parameter: torch.Tensor, ring: Ring, outer: OuterPolicy | None, unit: Unit) -> bool:
    """Averages every new gradient of a whole parameter over the ring and its replicas, in each backward, even where the
    outer policy postpones others. Returns False if an earlier call has arranged this. Raises in the first backward
    where ranks of tensor parallelism have different gradients."""
    if is_averaged(parameter, ring):
        return False
    # A stand-in for the comparison: torch swaps tensors only while nothing refers to the parameter itself.
    compared = types.SimpleNamespace(shape=parameter.shape, device=parameter.device)

    @first_order_only
    def average(_: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        if isinstance(gradient, DTensor):  # a scalar that was used with DTensors of tensor parallelism has one
            gradient = gradient.full_tensor()
        # as wide as the reduction of shards, which may be asked for in fewer bits than these few numbers need
        wide = torch.promote_types(summing_dtype(gradient.dtype), unit.reduce_dtype or torch.float32)
        dense = gradient.to_dense().to(wide, copy=True, memory_format=torch.contiguous_format)
        dense = ring.all_reduce(dense, f"the gradient of {name}").div_(ring.size)
        if outer is not None:
            dense = outer.reduce_whole(dense, name, unit)
        if ring.tensor_mesh is not None and ring.parameter_mesh is not None:
            check_replicated_gradient(compared, dense, ring.parameter_mesh, ring.communicator.collectively)
        dense = dense.to(gradient.dtype)
        return dense.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else dense

    # A hook after accumulation would not run under torch.autograd.grad, which zero-bubble pipelines use.
    hook = torch.utils.hooks.unserializable_hook(functools.partial(average, types.SimpleNamespace()))
    # After torch.utils.swap_tensors the listed hooks do not run until the list is set again.
    holder: Any = parameter
    holder._post_accumulate_grad_hooks = holder._post_accumulate_grad_hooks
    listed = holder._backward_hooks or {}
    for key in [key for key, other in listed.items() if hasattr(other, _WATCHED)]:
        del listed[key]
    holder._backward_hooks = listed or None
    setattr(hook, _WATCHED, ring.serial)
    parameter.register_hook(hook)
    parameter.__dict__[_WATCHED] = ring.serial
    return True
