"""Base of the local training policies, which act after steps of the optimizer.

Gradients are averaged over the ring of a replica only. The same holds for norms: clip_grad_norm_ clips every replica by
the norm of its own gradients, as n independent workers would. After each step, the policy applies to the shards the
operation that the algorithm applies to whole models. Mixing over replicas commutes with cutting over a ring, so the
result equals the algorithm on whole models.

Replicas differ after the first step. Parameters, gradients and the optimizer's state are therefore DTensors on the mesh
of one ring. On the mesh of all replicas they would be Replicate(); torch assumes that replicated values are equal
everywhere, and splits products of them (Muon, Shampoo, a penalty on weights) over the replicas.

A plain state dict would save a mixture of replicas. State dicts of the model and of the optimizer are therefore refused
until `average()` has made the replicas equal; the policy's own state dict has a leading replica dimension.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from rtp_ext.dtensor_hooks import before_steps_of
from rtp_ext.outer.local_training.optimizers import (
    Guard,
    leaves,
    mixture,
    parameters_of,
    refuse_scaler,
    refuse_unattached,
    rehearses,
    unsharded_state,
)
from rtp_ext.outer.local_training.peers import (
    Means,
    mark_written,
    own_replica_slice,
    place_on_ring,
    with_replica_dim,
    without_replica_dim,
)
from rtp_ext.outer.policy import Unit
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import GRADIENT_HANDLER
from rtp_ext.ring.links.agree import differing, expect_same, expect_same_lines
from rtp_ext.ring.parameters_in_use import register_mesh


class AfterSteps(Means):
    """Base class: each replica trains on its own gradients, and the policy acts after steps of the optimizer.

    `attach` registers the optimizer. State beyond parameters and the optimizer's state (buffers, schedules) is not
    synchronized.
    """

    allows_tensor_parallel = False

    def __init__(self) -> None:
        super().__init__()
        self._optimizers: list[Optimizer] = []
        self._handles: list[Any] = []
        self._stepped: set[int] = set()  # ids of optimizers that have stepped while others have not
        self._only_creates_state = False
        self._arrived = False  # whether there are gradients since the last step
        self._weights_differ = self._states_differ = False  # whether replicas may differ
        self._stateless: set[int] = set()  # numbers of parameters whose state in a checkpoint was not loaded
        self._own_state_dict = False
        refuse_unattached()

    def __deepcopy__(self, memo: dict) -> AfterSteps:
        """Copies the settings, without optimizers and at step 0."""
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, AfterSteps)
        twin._weights_differ, twin._trained = self._weights_differ, set(self._trained)
        copied = (memo.get(id(reference())) for reference in self._roots if reference() is not None)
        twin._roots = [weakref.ref(root) for root in copied if root is not None]
        twin._verified, twin._compared = (self._verified, self._compared) if self._weights_differ else ("", 0)
        return twin

    # -- the model -----------------------------------------------------------------------------------------------------

    @property
    def _ring_mesh(self) -> DeviceMesh:
        """Mesh of this replica's ring, on which its parameters lie."""
        assert self.ring is not None and self.ring.mesh is not None, "set by fully_rotate"
        return self.ring.mesh

    @property
    def _mesh(self) -> DeviceMesh:
        """Mesh of the replicas and the ring."""
        assert self.ring is not None and self.ring.parameter_mesh is not None, "set by fully_rotate"
        return self.ring.parameter_mesh

    @property
    def acts(self) -> bool:
        """Whether the policy has anything to do."""
        return self.size > 1 or self.acts_alone

    def placement_over(self, replicas: int, shape: Sequence[int], dim: int | None, ranks: int) -> Placement | None:
        return None if replicas > 1 or self.acts_alone else Replicate()

    def handle_gradients(self, root: nn.Module) -> None:
        super().handle_gradients(root)
        if self.acts:
            register_mesh(self._ring_mesh, 1, False)
            for _, parameter in self._handled():
                place_on_ring(parameter, self._ring_mesh)
                if parameter.grad is not None:
                    place_on_ring(parameter.grad, self._ring_mesh)
        for module in root.modules() if self.size > 1 else ():
            own = module._parameters.values()
            known = (getattr(hook, "policy", None) for hook in module._state_dict_pre_hooks.values())
            if any(p is not None and self._has(p) for p in own) and not any(policy is self for policy in known):
                module.register_state_dict_pre_hook(Guard(self))

    def begin_forward(self) -> None:
        if self.acts and self._arrived and not self._optimizers and torch.is_grad_enabled():
            raise ValueError(
                f"{self!r} acts after steps of the optimizer and has none: expected "
                "outer_of(model).attach(optimizer) before the second forward that trains"
            )

    def reduce_gradient(self, index: int, ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self._arrived = True
        return None if gradient is None else self.scaled(index, gradient)

    def reduce_whole(self, gradient: torch.Tensor, name: str, unit: Unit) -> torch.Tensor:
        if self.acts:
            raise ValueError(
                f"{name} is held whole by every rank, outside of the parameters that {self!r} averages: expected a "
                "parameter that was in the model, or a part that fully_rotate has converted, when it was converted"
            )
        return gradient.mul_(self.scale(unit))

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def attach(self, *optimizers: Optimizer) -> None:
        """Registers optimizers of the model; the policy acts after each of those registered has stepped once.

        Replaces those attached before that share parameters with these, and keeps the others: two calls with an
        optimizer each are one call with both. Raises TypeError for an argument that is no torch.optim.Optimizer, and
        ValueError for an optimizer that has none of the model's parameters.
        """
        if self.ring is None:
            raise ValueError(f"{self!r}: expected fully_rotate(..., outer=this policy) before attach")
        if not optimizers:
            raise TypeError(f"{self!r}: expected an optimizer to attach to, got none")
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"{self!r}: expected a torch.optim.Optimizer, got a {type(optimizer).__name__}")
            if self.acts and not any(map(self._has, parameters_of(optimizer))):
                raise ValueError(
                    f"{self!r}: expected an optimizer of the parameters of the model that the policy was given to, got "
                    f"a {type(optimizer).__name__} that has none of them: build it after fully_rotate"
                )
        for handle in self._handles:
            handle.remove()
        theirs = set(map(id, parameters_of(*optimizers)))
        kept = [each for each in self._optimizers if theirs.isdisjoint(map(id, parameters_of(each)))]
        self._optimizers = [*kept, *dict.fromkeys(optimizers)]
        self._stepped &= set(map(id, kept))
        self._handles = []
        for optimizer in self._optimizers if self.acts else ():
            self._handles += [
                before_steps_of(optimizer, self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_state_dict_pre_hook(self._before_state_dict),
            ]

    def _before_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._only_creates_state = not self._arrived and rehearses(optimizer, arguments, keywords)
        if self._only_creates_state:
            return
        if id(optimizer) in self._stepped:
            raise ValueError(
                f"{self!r} is attached to {len(self._optimizers)} optimizers: expected each to step once before any "
                f"steps again, got a second step of a {type(optimizer).__name__}"
            )
        refuse_scaler(self)
        self._note_trained()
        if self._has_to_verify():
            expect_same(
                "replicas disagree on the policy",
                self.exchange(f"{self!r} before step {self._steps + 1}"),
                named="replica {}".format,
                hint=": every rank has to use the same policy, and to freeze the same parameters at the same step",
            )
            self.verify()
        if self._steps == 0 and not self._stepped:
            with torch.inference_mode(False), torch.no_grad():
                self._start()

    def _note_trained(self) -> None:
        """Records the parameters that this step may change: a gradient counts even if its parameter is frozen now."""
        for index, parameter in self._handled():
            if parameter.requires_grad and index in self._stateless:
                raise ValueError(
                    f"{self._members[index].name} was frozen when a checkpoint was loaded, so that the optimizer has "
                    "no state for it, and is trained again: load the checkpoint first, then freeze it"
                )
            if (parameter.requires_grad or parameter.grad is not None) and parameter.is_floating_point():
                self._trained.add(index)

    def _has_to_verify(self) -> bool:
        """Returns whether replicas compare policies, models and weights before this step."""
        return self.replicas is not None and self._verified != self.fingerprint()

    def _after_step(self, optimizer: Optimizer, _arguments: Any, _keywords: Any) -> None:
        if self._only_creates_state:
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) < len(self._optimizers):
            return
        self._stepped.clear()
        self._arrived = False
        self._steps += 1
        self._weights_differ = self._states_differ = self.size > 1
        with torch.inference_mode(False), torch.no_grad():
            self._act()

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        cut = (isinstance(value, DTensor) for state in optimizer.state.values() for _, value in leaves(state))
        if self._states_differ and not self._own_state_dict and any(cut):
            raise ValueError(mixture(f"state_dict of {type(optimizer).__name__}", self))

    # -- hooks for subclasses ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Called before the first step, when all replicas have the same weights."""

    def _act(self) -> None:
        """Called after step number `_steps`. Collective over all ranks."""
        raise NotImplementedError

    def _wait_in_flight(self) -> None:
        """Waits for transfers in flight, and stores the results until they are due. Collective."""

    def _apply(self) -> None:
        """Applies the stored results before they are due."""

    def _own_state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint needs beyond weights, optimizer and number of steps."""
        return {}

    def _load_own(self, state: dict[str, Any]) -> None:
        """Loads the result of `_own_state`."""

    # -- equal replicas ------------------------------------------------------------------------------------------------

    def _average_weights(self) -> None:
        if self.size > 1:
            weights = [parameter for _, parameter in self._weights()]
            self._average([held(weight) for weight in weights])
            mark_written(weights)
        self._trained.clear()  # frozen parameters are not averaged again
        self._weights_differ = False

    def average(self) -> None:
        """Replaces weights and sharded optimizer state by their means over replicas. Plain state dicts are correct from
        here on until the next step. Collective.

        Raises ValueError if only some replicas have optimizer state of a parameter, or if optimizers differ in values
        that have no mean: step counts, and settings of groups.
        """
        if not self._weights_differ and not self._states_differ:
            return
        self._whole()  # raises where there is none
        with torch.inference_mode(False), torch.no_grad():
            self._wait_in_flight()
            self._apply()
            self._agree("average()")
            states = self._optimizer_state()
            self._compare_plain("average")
            self._average_weights()
            self._average([held(value) for value in states.values()])
        self._states_differ = False

    def _optimizer_state(self) -> dict[tuple[int, str], DTensor]:
        """Returns the optimizers' sharded state by parameter number and key. Collective."""
        found: dict[tuple[int, str], DTensor] = {}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in leaves(state) if self._has(parameter) else ():
                    if isinstance(value, DTensor) and value.is_floating_point():
                        found[parameter.__dict__[GRADIENT_HANDLER].index, key] = value
        found = dict(sorted(found.items()))
        answers = self.exchange(tuple(found))
        for index, key in sorted({one for theirs in answers for one in theirs}):
            have = [replica for replica, theirs in enumerate(answers) if (index, key) in theirs]
            if len(have) < self.size:
                raise ValueError(
                    f"average: expected state {key} of {self._members[index].name} in the optimizers of all replicas, "
                    f"or of none, got it in replicas {have}: the others have not used that parameter yet"
                )
        return found

    def _compare_plain(self, what: str) -> None:
        """Raises ValueError if the unsharded state of optimizers differs between replicas (step counts differ where one
        replica used a parameter more often): a checkpoint holds one value for all. Collective."""
        if self.replicas is None:
            return

        def name_of(parameter: Any) -> str | None:
            return self._members[parameter.__dict__[GRADIENT_HANDLER].index].name if self._has(parameter) else None

        mine = sorted(f"{key} {value}" for key, value in unsharded_state(self._optimizers, name_of).items())
        expect_same_lines(
            f"{what}, state of optimizers that is not sharded", differing(self, mine), named="replica {}".format
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of training: weights and the optimizer's state, with a leading replica dimension, and the
        state of the policy. For torch.distributed.checkpoint: shares memory with the model. Collective.

        Raises ValueError before `attach`, and if optimizers differ between replicas in values without a replica
        dimension: step counts, and settings of groups. {} where there is one replica and nothing to do.
        """
        if not self.acts:
            return {}
        self._expect_attached("state_dict")
        with torch.inference_mode(False), torch.no_grad():
            self._wait_in_flight()
            self._compare_plain("state_dict")
            named = self._named()
            stateful = self._stateful(named)
            with self._as_its_own():
                began = [bool(optimizer.state) for optimizer in self._optimizers]
                optimizer_state = self._optimizer_state_dict()
                for optimizer, had_any in zip(self._optimizers, began, strict=True):
                    if not had_any:  # torch has created state to load a checkpoint into
                        optimizer.state.clear()
            return {
                "policy": type(self).__name__,
                "steps": self._steps,
                "trained": [name for name, (index, _) in named.items() if index in self._trained],
                "stateful": stateful,
                "differ": [self._weights_differ, self._states_differ],
                "began": began,
                "parameters": {name: with_replica_dim(parameter, self._mesh) for name, (_, parameter) in named.items()},
                "optimizer": tree_map_only(DTensor, lambda value: with_replica_dim(value, self._mesh), optimizer_state),
                **self._own_state(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of `state_dict` of as many replicas. Raises ValueError for any other value. Collective."""
        if not self.acts:
            return super().load_state_dict(state)
        self._expect_attached("load_state_dict")
        if state.get("policy") != type(self).__name__:
            raise ValueError(
                f"{self!r}: expected the state of a {type(self).__name__}, got one of {state.get('policy')!r}"
            )
        with torch.inference_mode(False), torch.no_grad():
            self._wait_in_flight()
            named, given = self._named(), state["parameters"]
            if given.keys() != named.keys():
                differences = ", ".join(sorted(given.keys() ^ named.keys())[:5])
                raise ValueError(f"{self!r}: expected a state of the same parameters, got differences in {differences}")
            layers = {name: self._own_replica_slice(given[name], p, name) for name, (_, p) in named.items()}
            for name, (_, parameter) in named.items():
                held(parameter).copy_(layers[name])
            mark_written([parameter for _, parameter in named.values()])
            with self._as_its_own():
                own = tree_map_only(
                    DTensor, lambda value: without_replica_dim(value, self._ring_mesh), state["optimizer"]
                )
                set_optimizer_state_dict(self._whole(), self._optimizers, optim_state_dict=own)
            for optimizer, began in zip(self._optimizers, state["began"], strict=True):
                if not began:
                    optimizer.state.clear()
            have = self._stateful(named)
            self._stateless = {named[name][0] for name in state["stateful"] if name not in have}
            self._steps = state["steps"]
            self._trained = {named[name][0] for name in state["trained"]}
            self._weights_differ, self._states_differ = state["differ"]
            self._verified, self._compared = self.fingerprint(), len(self._members)
            self._arrived, self._stepped = False, set()
            self._load_own(state)

    def _stateful(self, named: dict[str, tuple[int, Any]]) -> list[str]:
        """Returns the names of the parameters that have optimizer state."""
        return [name for name, (_, p) in named.items() if any(leaves(each.state.get(p)) for each in self._optimizers)]

    def _own_replica_slice(self, value: Any, like: Any, name: str) -> torch.Tensor:
        return own_replica_slice(value, like, self._mesh, f"load_state_dict of {name}")

    def _optimizer_state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self._whole(), self._optimizers)  # type: ignore[return-value]

    def _expect_attached(self, what: str) -> None:
        if not self._optimizers:
            raise ValueError(f"{self!r}: expected attach(optimizer) before {what}, which is of the optimizer too")
        own = {id(parameter) for parameter in self._whole().parameters()}
        for optimizer in self._optimizers:
            if any(id(p) not in own for p in parameters_of(optimizer)):
                raise ValueError(
                    f"{self!r}: expected optimizers of this model alone before {what}, got a "
                    f"{type(optimizer).__name__} with parameters of another, such as the next stage of a pipeline: "
                    "build and attach one for each; of parts of one model, call fully_rotate(model) around them"
                )

    @contextlib.contextmanager
    def _as_its_own(self) -> Iterator[None]:
        """Context in which state dicts are not refused, because the policy itself requests them."""
        before, self._own_state_dict = self._own_state_dict, True
        try:
            yield
        finally:
            self._own_state_dict = before
