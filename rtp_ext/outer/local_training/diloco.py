"""LocalSGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from rtp_ext.outer.buckets import InFlightBucket
from rtp_ext.outer.local_training.after_steps import AfterSteps
from rtp_ext.outer.local_training.optimizers import make_state, parameters_of
from rtp_ext.outer.local_training.peers import mark_written, sum_dtype
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import as_gradient, as_parameter

# -- LocalSGD ----------------------------------------------------------------------------------------------------------


class LocalSGD(AfterSteps):
    """Averages weights over replicas after every `period` steps; each replica trains on its own gradients.

    The optimizer's state is not averaged. With period=1, SGD (including momentum and weight decay) trains as in data
    parallelism; AdamW does not, because its steps are not linear in the gradient. Gradient scaling that skips steps
    (GradScaler) has to skip them on every replica.

    Args:
        period: steps between averages.
        warmup: number of initial steps that are averaged each; the periods begin after them.

    Source: Stich, Local SGD converges fast and communicates little (arXiv 1805.09767); Lin et al., post-local SGD
    (arXiv 1808.07217), whose first phase averages gradients instead.
    """

    def __init__(self, period: int, warmup: int = 0) -> None:
        super().__init__()
        self.period, self.warmup = at_least("LocalSGD", "period", period, 1), at_least("LocalSGD", "warmup", warmup, 0)

    def __repr__(self) -> str:
        return f"LocalSGD(period={self.period}, warmup={self.warmup})"

    def _with_same_settings(self) -> OuterPolicy:
        return LocalSGD(self.period, self.warmup)

    def _act(self) -> None:
        if self._steps <= self.warmup or (self._steps - self.warmup) % self.period == 0:
            self._agree("the mean of weights")
            self._average_weights()


def at_least(policy: str, what: str, value: int, least: int) -> int:
    """Returns `value`. Raises TypeError if it is no int, ValueError if it is smaller than `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{policy}: expected {what} to be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{policy}: expected {what} >= {least}, got {value}")
    return value


# -- DiLoCo ------------------------------------------------------------------------------------------------------------


def nesterov(parameters: list[nn.Parameter]) -> Optimizer:
    """Default outer optimizer: the best one of the DiLoCo paper."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@dataclass
class _MeanInFlight:
    """A mean in flight: the movement of a fragment since its last outer step."""

    fragment: int
    names: list[str]
    moved: list[torch.Tensor]
    flights: list[InFlightBucket]
    left_out: set[str] = field(default_factory=set)  # frozen since it was sent


class DiLoCo(AfterSteps):
    """After every `period` steps, an outer optimizer updates the anchors: the weights that all replicas last shared.

    Its gradient is the mean over replicas of the movement away from the anchors; all replicas continue from the
    result. The anchors take one more copy of the shard, in float32 at least, plus the outer optimizer's state. The
    inner optimizer's state is not shared. With `fragments`, one part of the model at a time is updated, each once per
    period (Streaming DiLoCo); the replicas then never agree on the whole model.

    Outer steps leave out frozen parameters: at the next outer step, replicas take the mean of the values at freezing,
    which then stays constant. After thawing, that mean is the anchor, and the outer optimizer starts without state.

    Args:
        period: steps between outer steps.
        outer_optimizer: function from a list of parameters (DTensors laid out as the model's) to a
            torch.optim.Optimizer; default SGD with lr=0.7, Nesterov momentum 0.9. SGD with lr=1 is local SGD.
        fragments: number of parts of the parameters, each consecutive, of about equal sizes.
        delay: steps between sending a mean and applying it, less than period / fragments. The progress of a replica
            during these steps is lost, except for the share `keep`.
        keep: share of the replica's own weights when the outer step takes effect.

    Sources: Douillard et al., DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512).
    """

    acts_alone = True
    _places: tuple[Any, dict[str, int]] = (None, {})  # anchors, and the numbers of their parameters by name

    def __init__(
        self,
        period: int,
        outer_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        *,
        fragments: int = 1,
        delay: int = 0,
        keep: float = 0.0,
    ) -> None:
        super().__init__()
        self.period, self.fragments = (
            at_least("DiLoCo", "period", period, 1),
            at_least("DiLoCo", "fragments", fragments, 1),
        )
        self.delay, self.keep = at_least("DiLoCo", "delay", delay, 0), float(keep)
        if fragments > period or delay >= max(1, period // fragments):
            raise ValueError(
                f"DiLoCo: expected fragments <= period and delay < period // fragments, so that one travels at a time, "
                f"got period {period}, fragments {fragments}, delay {delay}"
            )
        if not 0 <= self.keep < 1:
            raise ValueError(f"DiLoCo: expected keep in [0, 1), got {keep}")
        self._factory = nesterov if outer_optimizer is None else outer_optimizer
        self._anchors: nn.Module | None = None  # parameters by name, with / instead of .
        self._outer: list[Optimizer] = []  # by fragment
        self._checked: Any = None  # frozen and trained parameters at the last check
        self._fragment_names: list[list[str]] = []  # names by fragment
        self._frozen: set[str] = set()  # names of frozen parameters, whose anchor and outer state are invalid
        self._in_flight: _MeanInFlight | None = None
        self._arrived_means: tuple[int, dict[str, torch.Tensor]] | None = None  # fragment, and means by name

    def __repr__(self) -> str:
        more = "".join(f", {key}={getattr(self, key)}" for key in ("fragments", "delay", "keep"))
        return f"DiLoCo(period={self.period}{more if self.fragments > 1 or self.delay or self.keep else ''})"

    def _with_same_settings(self) -> OuterPolicy:
        return DiLoCo(self.period, self._factory, fragments=self.fragments, delay=self.delay, keep=self.keep)

    def _after_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._expect_same_names()
        super()._after_step(optimizer, arguments, keywords)

    def _expect_same_names(self) -> None:
        """Raises ValueError if modules were exchanged or removed: anchors are identified by parameter names."""
        anchors, known = self._places
        found = {name: index for name, (index, _) in self._named().items() if name in self}
        if anchors is not self._anchors:
            self._places = self._anchors, found
        elif found != known:
            name = next(name for name in known if found.get(name) != known[name])
            raise ValueError(
                f"{self!r}: expected the parameters of the first step under their names, since anchors are stored by "
                f"name, got {'another one' if name in found else 'none'} for {name}: do not exchange or remove "
                "modules after the first step, or convert the model anew with a new policy"
            )

    # -- anchors -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._weights_differ:
            raise ValueError(f"{self!r}: expected replicas that start with the same weights: call average() first")
        self._make_anchors()

    def _before_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        super()._before_step(optimizer, arguments, keywords)
        current = self.fingerprint(), set(self._trained)
        if self._only_creates_state or self._anchors is None or self._checked == current:
            return
        self._checked, named = current, self._named()
        self._expect_one_model(named)
        late = [name for name, (index, _) in named.items() if index in self._trained and name not in self]
        if late:
            raise ValueError(
                f"{self!r}: expected the parameters that are trained from the first step on, got {late[0]} too, "
                "which has no anchor: do not freeze it before the first step"
            )
        with torch.inference_mode(False), torch.no_grad():
            self._update_frozen(named)

    def _expect_one_model(self, named: dict[str, tuple[int, Any]]) -> None:
        """Raises ValueError if a trained parameter has no name in the whole model, which its anchor would need: the
        modules were converted as a list or one by one, without an enclosing module."""
        numbers = {index for index, _ in named.values()}
        others = [(index, p) for index, p in self._handled() if index not in numbers]
        stepped = set(map(id, parameters_of(*self._optimizers)))
        for index, parameter in others:
            if id(parameter) in stepped:
                raise ValueError(
                    f"{self!r}: expected one model with all parameters that its optimizers train, since anchors are "
                    f"stored by name, got {self._members[index].name}, which is outside "
                    f"of the {type(self._whole()).__name__}: call fully_rotate(model) with the model around the parts"
                )

    def _update_frozen(self, named: dict[str, tuple[int, Any]]) -> None:
        """Updates the set of frozen parameters, which replicas compared at the start of the forward. Collective if a
        parameter thaws."""
        names = [name for part in self._fragment_names for name in part]
        frozen = {name for name in names if not self._members[named[name][0]].requires_grad}
        thawed = [name for name in names if name in self._frozen - frozen]
        for name in frozen - self._frozen:  # their means in flight are not applied
            if self._in_flight is not None:
                self._in_flight.left_out.add(name)
            if self._arrived_means is not None:
                self._arrived_means[1].pop(name, None)
        if thawed:
            self._agree(f"new anchors, as of {thawed[0]}")
            self._average_parameters([named[name] for name in thawed])
        for name in thawed:
            held(self._anchor(name)).copy_(held(named[name][1]))
        self._reset_outer_state(thawed)
        self._frozen = frozen

    def _average_parameters(self, members: list[tuple[int, Any]]) -> None:
        """Replaces parameters by their mean over replicas. Collective."""
        if self.size > 1:
            self._average([held(parameter) for _, parameter in members])
            mark_written([parameter for _, parameter in members])

    def __contains__(self, name: str) -> bool:
        """Returns whether a parameter has an anchor."""
        return self._anchors is not None and name.replace(".", "/") in self._anchors._parameters

    def _anchor(self, name: str) -> Any:
        assert self._anchors is not None, "made before the first step"
        return self._anchors._parameters[name.replace(".", "/")]

    def _trainable(self) -> dict[str, Any]:
        return {name: p for name, (_, p) in self._named().items() if p.requires_grad and p.is_floating_point()}

    def _make_anchors(self, parts: list[list[str]] | None = None) -> None:
        """Copies the current weights to anchors and makes outer optimizers without state.

        `parts`: parameter names by fragment; None: the trainable parameters, split evenly.
        """
        if parts is None:
            parts = _split_evenly({name: p.numel() for name, p in self._trainable().items()}, self.fragments)
        named = self._named()
        self._anchors, self._fragment_names, self._frozen = nn.Module(), parts, set()
        for name in (name for part in parts for name in part):
            parameter = named[name][1]
            copied = as_gradient(held(parameter).detach().to(sum_dtype(parameter.dtype), copy=True), parameter._spec)
            self._anchors.register_parameter(name.replace(".", "/"), as_parameter(copied, True))
        self._outer = [
            self._make_outer_optimizer([self._anchor(name) for name in part]) for part in self._fragment_names
        ]

    def _make_outer_optimizer(self, anchors: list[nn.Parameter]) -> Optimizer:
        outer = self._factory(anchors)
        if not isinstance(outer, Optimizer):
            raise TypeError(
                f"DiLoCo: expected outer_optimizer to make a torch.optim.Optimizer, got a {type(outer).__name__}"
            )
        return outer

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        sent = (self._steps - self.delay) % self.period
        for fragment in range(self.fragments):
            due = (fragment + 1) * self.period // self.fragments % self.period
            if self.delay and sent == due and self._is_pending(fragment):
                self._wait_in_flight()
                self._step(fragment)
            if self._steps % self.period == due:
                self._send(fragment)
                if not self.delay:
                    self._wait_in_flight()
                    self._step(fragment)
                    self._weights_differ = self.size > 1 and (self.fragments > 1 or self.keep > 0)

    def _is_pending(self, fragment: int) -> bool:
        in_flight = None if self._in_flight is None else self._in_flight.fragment
        arrived = None if self._arrived_means is None else self._arrived_means[0]
        return fragment in (in_flight, arrived)

    def _send(self, fragment: int) -> None:
        self._agree(f"an outer step of fragment {fragment}")
        weights = self._named()
        frozen = [weights[name] for name in self._fragment_names[fragment] if name in self._frozen]
        # parameters that replicas trained before they were frozen
        self._average_parameters([(index, p) for index, p in frozen if index in self._trained])
        self._trained -= {index for index, _ in frozen}
        names, moved = [name for name in self._fragment_names[fragment] if name not in self._frozen], []
        for name in names:
            anchor = held(self._anchor(name)).detach()
            moved.append(anchor - held(weights[name][1]).to(anchor.dtype))
        flights = list(self._begin_means(moved)) if self.size > 1 else []
        self._in_flight = _MeanInFlight(fragment, names, moved, flights)

    def _wait_in_flight(self) -> None:
        if self._in_flight is None:
            return
        way, self._in_flight = self._in_flight, None
        means = dict(enumerate(way.moved))
        for flight in way.flights:
            means.update(self._end_mean(flight, way.moved))
        arrived = {name: means[number] for number, name in enumerate(way.names) if name not in way.left_out}
        self._arrived_means = way.fragment, arrived

    def _step(self, fragment: int) -> None:
        """Runs the outer step of a fragment and updates the weights."""
        assert self._arrived_means is not None, "it has arrived"
        _, means = self._arrived_means
        self._arrived_means = None
        weights = self._named()
        for name, mean in means.items():
            anchor = self._anchor(name)
            anchor.grad = as_gradient(mean, anchor._spec)
        if means:
            self._outer[fragment].step()
            self._outer[fragment].zero_grad(set_to_none=True)
        for name in means:
            weight, anchor = held(weights[name][1]), held(self._anchor(name)).detach()
            if self.keep:
                anchor = anchor + (weight.to(anchor.dtype) - anchor) * self.keep
            weight.copy_(anchor)
        mark_written([weights[name][1] for name in means])
        if not self.keep:
            self._trained -= {weights[name][0] for name in means}

    def _apply(self) -> None:
        if self._arrived_means is not None:
            self._step(self._arrived_means[0])

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        if self._anchors is None or (self._steps == 0 and not self._weights_differ):
            self._make_anchors()
        assert self._anchors is not None, "made"
        names = [name for name in self._named() if name in self]
        made = [anchor for outer in self._outer for anchor in make_state(outer)]
        made_up = [name for name in names if any(anchor is self._anchor(name) for anchor in made)]
        state = get_optimizer_state_dict(self._anchors, self._outer)
        self._reset_outer_state(made_up)
        own: dict[str, Any] = {
            "anchors": {name: self._anchor(name).detach() for name in names},
            "parts": self._fragment_names,
            "resting": sorted(self._frozen),
            "outer": state,
            "made_up": made_up,
        }
        if self.delay:
            fragment, means = self._arrived_means or (-1, {})
            own["arrived"], own["moved"] = fragment, list(means)
            own["means"] = {
                name: as_gradient(
                    means[name] if name in means else torch.zeros_like(held(self._anchor(name)).detach()),
                    self._anchor(name)._spec,
                )
                for name in names
            }
        return own

    def _reset_outer_state(self, names: Iterable[str]) -> None:
        """Deletes the outer optimizers' state of anchors."""
        for name in names:
            for outer in self._outer:
                outer.state.pop(self._anchor(name), None)

    def _load_own(self, state: dict[str, Any]) -> None:
        # the anchors of parameters that are not frozen here; parts may contain more
        parts, given = state["parts"], state["anchors"]
        known = {name for part in parts for name in part}
        differences = sorted((self._trainable().keys() - known) | (known - self._named().keys()))
        if differences or len(parts) != self.fragments:
            raise ValueError(
                f"{self!r}: expected a state of as many fragments with the same parameters trained, got one of "
                f"{len(parts)} with others: {', '.join(differences[:5])}"
            )
        self._make_anchors(parts)
        assert self._anchors is not None, "made"
        for name, anchor in given.items():
            held(self._anchor(name)).copy_(held(anchor))
        outer_state = state["outer"]["state"]
        absent = [self._anchor(name) for name in known if outer_state and name.replace(".", "/") not in outer_state]
        for anchor in absent:
            anchor.requires_grad_(False)  # torch then expects no state
        set_optimizer_state_dict(self._anchors, self._outer, optim_state_dict=state["outer"])
        for anchor in absent:
            anchor.requires_grad_(True)
        self._reset_outer_state(state["made_up"])
        self._frozen, self._checked = {*state["resting"], *(known - given.keys())}, None
        self._in_flight = self._arrived_means = None
        if self.delay and state["arrived"] >= 0:
            means = {name: held(state["means"][name]).clone() for name in state["moved"] if name in state["means"]}
            self._arrived_means = state["arrived"], means


def _split_evenly(sizes: dict[str, int], fragments: int) -> list[list[str]]:
    """Splits names into `fragments` consecutive, non-empty lists of about equal total size."""
    if len(sizes) < fragments:
        raise ValueError(f"DiLoCo: expected at most as many fragments as parameters, {len(sizes)}, got {fragments}")
    parts: list[list[str]] = [[] for _ in range(fragments)]
    total, before, part = max(sum(sizes.values()), 1), 0, -1
    for number, (name, size) in enumerate(sizes.items()):
        middle = int((before + size / 2) * fragments / total)
        part = min(part + 1, max(part, middle, fragments - (len(sizes) - number)), fragments - 1)
        parts[part].append(name)
        before += size
    return parts
