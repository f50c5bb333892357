"""The scope of a forward of a converted model: the comparison of ranks, casts and gathers, and its end."""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rtp_ext.compilers import eager, tracing
from rtp_ext.convert.adapters import extend_adapters
from rtp_ext.convert.agreement import Mode, agree_on_model, facts_of, plan_anew, walk, want_gradients
from rtp_ext.convert.containers import map_tensors
from rtp_ext.convert.modules.bundled import OWN_HOOKS
from rtp_ext.convert.modules.gathered import ForwardScope, GatheredModule, average_gradient, is_averaged
from rtp_ext.convert.modules.refused import refuse_additions
from rtp_ext.convert.modules.whole_embedding import WholeEmbedding
from rtp_ext.functional._scaled import exchange_amaxes
from rtp_ext.functional.torch_compile import traced
from rtp_ext.nn import RotatedLinear
from rtp_ext.outer.micro_batches import follow_pipelines
from rtp_ext.outer.policy import UNIT, OuterPolicy, Unit, Units
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import unseen
from rtp_ext.ring.cpu_offload import keep_on_host
from rtp_ext.ring.parameters_in_use import expect_own_shard

logger = logging.getLogger("rtp_ext")

_STATE = "_rotation_state"  # attribute of a module that was the argument of fully_rotate
_INSIDE = "_rotation_inside"  # attribute of every converted module, the argument included
INFERENCE = "_rtp_inference"  # attribute of a model: its InferenceRing


class RotationState(ForwardScope):
    """The state of a converted model's root: the ring, the policy, and the properties that the ranks have compared.

    A part that was converted before the model around it has a state of its own. `around`: the states of such models.
    While a forward of one runs, a part neither compares (the model has) nor starts a forward of the ring.
    """

    def __init__(
        self, ring: Ring, mp_policy: MixedPrecisionPolicy, root: nn.Module | None = None, unit: Unit | None = None
    ) -> None:
        """`unit`: the unit of all modules in the same call of fully_rotate as `root`."""
        super().__init__(ring, mp_policy)
        self.unit = unit or Unit(mp_policy.reduce_dtype)
        self.root = None if root is None else weakref.ref(root)
        self.around: list[weakref.ref[RotationState]] = []
        self.began = False  # whether this state has started a forward of the ring
        self.forwards = 0  # number of forwards that it has started
        self.agreed: Any = None  # facts of the model that the ranks have compared
        self.modes: set[Mode] = set()  # modes that the ranks have compared with these facts
        self.splits: dict[bool, str] = {}  # values of `split` that the ranks have compared
        self.ignored: set[str] = set()  # names of parameters that are not averaged
        self.outer_policy: OuterPolicy | None = None  # the policy between replicas
        self.left_open = False  # whether a graph has begun a forward that has not ended yet

    def __deepcopy__(self, memo: dict) -> RotationState:
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, RotationState)
        twin.ignored = set(self.ignored)
        twin.outer_policy = copy.deepcopy(self.outer_policy, memo)
        twin.root = _copy_of(self.root, memo)
        twin.unit = copy.deepcopy(self.unit, memo)
        if twin.root is not None:
            twin.unit.members.append(twin.root)
        for around in self.around:
            state = around()
            if state is not None and _copy_of(state.root, memo) is not None:  # copied along with its model
                twin.around.append(weakref.ref(copy.deepcopy(state, memo)))
        return twin

    def outer(self) -> Iterator[RotationState]:
        """Yields the states of all models around this one."""
        for around in self.around:
            state = around()
            if state is not None:
                yield state
                yield from state.outer()

    def enter(self) -> None:
        self.check()
        super().enter()

    def check(self, mode: Mode | None = None) -> None:
        """Compares the models of all ranks unless a forward or backward runs: a part may be called without the model
        around it, and activation checkpointing calls parts in backward."""
        if self.depth == 0 and self.root is not None and torch._C._current_graph_task_id() == -1:
            root = self.root()
            if root is not None and not any(state.depth for state in self.outer()):
                self.ring.check_alive(f"{type(root).__name__} forward")
                _agree(self, root, mode)

    def open(self, root: nn.Module, mode: Mode | None, split: bool | None) -> None:
        """Starts a forward of the whole model. May be collective. `split`: see `foresee`."""
        self.begin()
        self.check(mode)
        super().enter()
        self.return_local_shards()
        self.plan(root)
        self.ring.check_alive(f"{type(root).__name__} forward")
        self.exchange_amaxes(root)
        self.foresee(root, split)

    def in_graph_event(self, event: str, split: bool, autocast: torch.dtype | None) -> None:
        """Handles an event in a compiled graph: the beginning or end of a forward, which hooks handle in eager mode."""
        root = None if self.root is None else self.root()
        assert root is not None, "its forward runs"
        if event == "check":
            self.check(Mode(autocast))
        elif event != "close":
            if self.left_open:  # by a graph that failed without a close event
                self.root_depth = self.depth = 1
                self.leave()
                self.end(failed=True)
            self.open(root, Mode(autocast), split if event == "open with gradients" else None)
            self.left_open = True
        else:
            self.left_open = False
            self.leave()
            self.end()

    def begin(self) -> None:
        """Counts a forward of the whole model, and starts one of the ring where it is the outermost."""
        self.root_depth += 1
        if self.root_depth > 1 or torch._C._current_graph_task_id() != -1:
            return
        if not any(state.root_depth for state in self.outer()):
            self.ring.begin_forward()
            if self.outer_policy is not None:
                self.outer_policy.restart()
                if self.outer_policy.replicas is not None:
                    follow_pipelines()
            self.began = True
            self.forwards += 1
            self.failing = sys.exc_info()[1]

    def return_local_shards(self) -> None:
        """Has the outer policy bring the local shards up to date."""
        if self.began and self.root_depth == 1 and self.outer_policy is not None:
            self.outer_policy.begin_forward()

    def plan(self, root: nn.Module) -> None:
        """Plans the routes of the model's layers anew at the beginning of forwards 2, 4, 8, ..."""
        number = self.forwards
        if self.began and self.root_depth == 1 and number > 1 and number & (number - 1) == 0:
            plan_anew(root, self.ring)

    def exchange_amaxes(self, root: nn.Module) -> None:
        """Has the ranks exchange the largest magnitudes of weights whose shards have one scale. Collective, where the
        model has such."""
        if self.ring.has_one_scale and self.began and self.root_depth == 1:
            layers = (part for part in root.modules() if isinstance(part, RotatedLinear) and part.ring is self.ring)
            weights: list[Any] = [
                part._parameters["weight"] for part in layers if part.recipe and part.recipe.forward.whole
            ]
            if weights:
                exchange_amaxes(self.ring, weights)

    def end(self, failed: bool = False) -> None:
        """Ends a forward of the whole model, and runs the postponed comparisons of its layers. After an exception the
        next forward or backward runs them."""
        self.root_depth = max(self.root_depth - 1, 0)
        if self.root_depth > 0 or not self.began:
            return
        self.ring.end_forward()
        if self.outer_policy is not None:
            self.outer_policy.end_forward()
        self.began = False
        failed = failed or sys.exc_info()[1] is not self.failing
        self.failing = None
        if not failed:
            self.ring.settle()

    def foresee(self, root: nn.Module, split: bool | None) -> None:
        """Records whether the backward of this forward may be split, which is where an input of the whole model
        requires a gradient. The reductions of the backward depend on it, so that the ranks compare it before."""
        if self.root_depth > 1 or torch._C._current_graph_task_id() != -1 or split is None:
            return
        around = next((state for state in self.outer() if state.root_depth), None)
        if around is not None:
            self.split = around.split
            return
        self.split = split
        if self.split not in self.splits:
            self.splits[self.split] = f"{type(root).__name__} with inputs that want gradients: {self.split}"
            self.ring.compare_later(self.splits, self.split, self.splits[self.split])

    def handle_gradients(self, root: nn.Module) -> None:
        """Gives the sharded parameters of a model to the outer policy, and marks those that stay on the host."""
        if self.outer_policy is not None:
            self.outer_policy.handle_gradients(root)
        if self.ring.host_memory is not None:
            keep_on_host(root, self.ring.host_memory)

    def check_agreement(self, root: nn.Module, mode: Mode | None = None) -> None:
        """Compares the models of all ranks before the first forward, and after a change of properties that decide
        hops."""
        modules, named = walk(root)
        facts, mode = self._facts(modules, named), mode or Mode.now(self.ring)
        if facts == self.agreed and mode in self.modes:
            return
        agree_on_model(root, self.ring, mode)
        refuse_additions(root, self.ring, self.ignored)
        if facts != self.agreed:
            self.handle_gradients(root)
            self._average_newcomers(root, named)
            extend_adapters(root)
            self.agreed, self.modes = self._facts(modules, named), set()
        self.modes.add(mode)

    def _facts(self, modules: list[nn.Module], named: list[tuple[str, nn.Parameter]]) -> Any:
        """Returns the facts of a model, and the names of averaged plain parameters, by which a replacement of one,
        which is not averaged yet, shows."""
        plain = [name for name, p in named if not isinstance(p, DTensor) and is_averaged(p, self.ring)]
        return facts_of(modules, named), plain

    def _average_newcomers(self, root: nn.Module, named: list[tuple[str, nn.Parameter]]) -> None:
        """Starts to average parameters that were added after conversion, such as adapters'; they stay whole."""
        if self.ring.mesh is None:
            return
        units = Units(root)
        tables = {id(part._parameters["weight"]) for part in root.modules() if isinstance(part, WholeEmbedding)}
        added = [
            name
            for name, parameter in named
            if parameter.requires_grad
            and not isinstance(parameter, DTensor)
            and name not in self.ignored
            and id(parameter) not in tables  # sparse gradients are averaged already
            and average_gradient(name, parameter, self.ring, self.outer_policy, units.of(name, parameter))
        ]
        if added:
            logger.info(
                "%d parameters were added after fully_rotate (%s, ...): they stay whole on every rank, and their "
                "gradients are averaged",
                len(added),
                added[0],
            )


def _copy_of(root: weakref.ref[nn.Module] | None, memo: dict) -> weakref.ref[nn.Module] | None:
    module = None if root is None else root()
    copied = None if module is None else memo.get(id(module))
    return None if copied is None else weakref.ref(copied)


def state_of(module: nn.Module) -> RotationState | None:
    """Returns the state of a module that was the argument of fully_rotate; None for any other."""
    return module.__dict__.get(_STATE)


def is_inside(module: nn.Module) -> bool:
    """Returns whether fully_rotate has converted a module, itself or in a model."""
    return _INSIDE in module.__dict__


def ring_of_module(part: nn.Module) -> Ring | None:
    """Returns the ring of a module's own parameters; None without one."""
    scope = part.__dict__.get("_rtp_scope")
    ring = scope.ring if isinstance(scope, ForwardScope) else part.__dict__.get("ring")
    return ring if isinstance(ring, Ring) else None


def mark_inside(root: nn.Module) -> None:
    """Marks a model and all modules in it for `is_inside`."""
    for part in root.modules():
        part.__dict__[_INSIDE] = True


def install(root: nn.Module, state: RotationState) -> None:
    """Installs hooks by which forwards of a model, and of modules in it with gathered parameters, open its scope."""
    # A module below the root may be called on its own, or by activation checkpointing in backward. Every module with
    # parameters of this scope in it therefore opens it around its forward.
    for part in root.modules():
        if part is not root and any(isinstance(i, GatheredModule) and i._rtp_scope is state for i in part.modules()):
            part.register_forward_pre_hook(OpenScope(state), prepend=True)
            part.register_forward_hook(_Close(state), always_call=True)
    mark_inside(root)
    object.__setattr__(root, _STATE, state)
    object.__setattr__(root, UNIT, state.unit)
    state.unit.members.append(weakref.ref(root))
    root.register_forward_pre_hook(open_root, with_kwargs=True, prepend=True)
    root.register_forward_hook(close_root, always_call=True)
    root.register_load_state_dict_pre_hook(_expect_own_shards)


def _expect_own_shards(root: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in root.named_parameters(remove_duplicate=False):
        expect_own_shard(state_dict.get(prefix + name), parameter, f"load_state_dict of {prefix}{name}")


class OpenScope:
    """Hook that opens a scope. A copy of the module has a copy of the hook, with the copy's scope."""

    def __init__(self, scope: ForwardScope) -> None:
        self.scope = scope

    def __call__(self, part: nn.Module, _arguments: Any) -> None:
        if torch.compiler.is_dynamo_compiling() and tracing(self.scope.ring):
            if self.scope.in_graph is None and not self.scope.handed:
                traced.scope(self.scope, "check")  # a part that is called alone
            if isinstance(part, GatheredModule):
                part.rtp_gather_own()
            return
        self.scope.enter()


class _Close:
    def __init__(self, scope: ForwardScope) -> None:
        self.scope = scope

    def __call__(self, part: nn.Module, _arguments: Any, _output: Any) -> None:
        if torch.compiler.is_dynamo_compiling() and tracing(self.scope.ring):
            if isinstance(part, GatheredModule) and not part.rtp_is_handed():
                part._rtp_wholes = None
            return
        self.scope.leave()


# torch.compile(model) calls hooks of the model itself outside of its graph, and would compile the functions they call.
@eager
@unseen
def _agree(state: RotationState, root: nn.Module, mode: Mode | None) -> None:
    state.check_agreement(root, mode)


@eager
@unseen
def _open_eagerly(state: RotationState, root: nn.Module, split: bool | None) -> None:
    state.open(root, None, split)
    state.hand_out()


@eager
@unseen
def _close_eagerly(state: RotationState) -> None:
    try:
        state.leave()
    finally:
        state.end()


def open_root(root: nn.Module, arguments: tuple, keywords: dict) -> tuple[tuple, dict] | None:
    state: RotationState = root._rotation_state  # type: ignore[assignment]
    if torch.compiler.is_dynamo_compiling() and tracing(state.ring):
        split = want_gradients((arguments, keywords))
        traced.scope(state, "open" if split is None else "open with gradients", bool(split))
        state.gather_small_in_graph()
    else:
        _open_eagerly(state, root, want_gradients((arguments, keywords)))
    policy = state.mp_policy
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return None
    return map_tensors(_caster(policy.param_dtype), (arguments, keywords))


def close_root(root: nn.Module, _arguments: Any, output: Any) -> Any:
    state: RotationState = root._rotation_state  # type: ignore[assignment]
    if torch.compiler.is_dynamo_compiling() and tracing(state.ring):
        state.in_graph = None
        traced.scope(state, "close")
    else:
        _close_eagerly(state)
    dtype = state.mp_policy.output_dtype
    return output if dtype is None else map_tensors(_caster(dtype), output)


for _hook in (OpenScope, _Close):
    setattr(_hook, OWN_HOOKS, True)


def _caster(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return cast
