"""DiLoCo: replicas train apart, and an outer optimizer steps on what they have moved on average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from rtp_ext.outer.apart.after_steps import AfterSteps
from rtp_ext.outer.apart.local_sgd import at_least
from rtp_ext.outer.apart.means import wide, written
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.outer.travel import Flight
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import as_gradient, as_parameter


def nesterov(parameters: list[nn.Parameter]) -> Optimizer:
    """What DiLoCo found best."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(AfterSteps):
    """After every `period` steps an outer optimizer steps on the weights that replicas agreed on last, with the mean of
    how far they have come from there in the place of a gradient; all go on from the result.

    The weights agreed on last, the anchors, are one more copy of the shard in float32 at least, and the outer optimizer
    keeps state of them. The inner optimizer's state stays every replica's own. With `fragments`, a part of the model at
    a time, each once a period (Streaming DiLoCo): replicas then never agree as a whole.

    Args:
        period: steps from one outer step to the next.
        outer_optimizer: a function from parameters, DTensors laid out as the model's, to a torch.optim.Optimizer;
            default SGD with lr=0.7, Nesterov momentum 0.9. SGD with lr=1 is local SGD.
        fragments: in how many parts the parameters are taken, neighbours together, of about equal sizes.
        delay: steps for which a mean may travel before it takes effect; what a replica has learned in them is lost but
            for `keep`. Less than period / fragments.
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
        self._anchors: nn.Module | None = None  # parameters by name, / for .
        self._outer: list[Optimizer] = []  # by fragment
        self._checked: set[int] = set()  # numbers of trained parameters that were seen to have anchors
        self._parts: list[list[str]] = []  # names by fragment
        self._on_way: tuple[int, list[torch.Tensor], list[Flight]] | None = None  # fragment, what moved, and buckets
        self._arrived_means: tuple[int, dict[str, torch.Tensor]] | None = None  # fragment, and means by name

    def __repr__(self) -> str:
        more = "".join(f", {key}={getattr(self, key)}" for key in ("fragments", "delay", "keep"))
        return f"DiLoCo(period={self.period}{more if self.fragments > 1 or self.delay or self.keep else ''})"

    def _anew(self) -> OuterPolicy:
        return DiLoCo(self.period, self._factory, fragments=self.fragments, delay=self.delay, keep=self.keep)

    def _after_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._expect_places()
        super()._after_step(optimizer, arguments, keywords)

    def _expect_places(self) -> None:
        """Anchors go by the names of parameters: raises ValueError where modules have been exchanged or removed."""
        anchors, known = self._places
        found = {name: index for name, (index, _) in self._named().items() if name in self}
        if anchors is not self._anchors:
            self._places = self._anchors, found
        elif found != known:
            name = next(name for name in known if found.get(name) != known[name])
            raise ValueError(
                f"{self!r}: expected the parameters of the first step under their names, since anchors go by these, "
                f"got {'another one' if name in found else 'none'} for {name}: do not exchange or remove modules after "
                "the first step, or convert the model anew with a new policy"
            )

    # -- anchors -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._weights_differ:
            raise ValueError(f"{self!r}: expected replicas that start with the same weights: call average() before")
        self._make_anchors()

    def _before_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        super()._before_step(optimizer, arguments, keywords)
        if self._rehearsing or self._anchors is None or self._checked == self._trained:
            return
        self._checked = set(self._trained)
        late = [name for name, (index, _) in self._named().items() if index in self._trained and name not in self]
        if late:
            raise ValueError(
                f"{self!r}: expected the parameters that are trained from the first step on, got {late[0]} too, of "
                "which there is no anchor: do not freeze it before the first step"
            )

    def __contains__(self, name: str) -> bool:
        """Whether there is an anchor of a parameter."""
        return self._anchors is not None and name.replace(".", "/") in self._anchors._parameters

    def _anchor(self, name: str) -> Any:
        assert self._anchors is not None, "made before the first step"
        return self._anchors._parameters[name.replace(".", "/")]

    def _make_anchors(self) -> None:
        """Of the weights as they are, with an outer optimizer that has seen nothing."""
        named = {name: p for name, (_, p) in self._named().items() if p.requires_grad and p.is_floating_point()}
        self._anchors = nn.Module()
        for name, parameter in named.items():
            copied = as_gradient(held(parameter).detach().to(wide(parameter.dtype), copy=True), parameter._spec)
            self._anchors.register_parameter(name.replace(".", "/"), as_parameter(copied, True))
        self._parts = _parted({name: p.numel() for name, p in named.items()}, self.fragments)
        self._outer = [self._outer_of([self._anchor(name) for name in part]) for part in self._parts]

    def _outer_of(self, anchors: list[nn.Parameter]) -> Optimizer:
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
            if self.delay and sent == due and self._in_hand(fragment):
                self._arrive()
                self._step(fragment)
            if self._steps % self.period == due:
                self._send(fragment)
                if not self.delay:
                    self._arrive()
                    self._step(fragment)
                    self._weights_differ = self.size > 1 and (self.fragments > 1 or self.keep > 0)

    def _in_hand(self, fragment: int) -> bool:
        held_back = self._on_way or self._arrived_means
        return held_back is not None and held_back[0] == fragment

    def _send(self, fragment: int) -> None:
        self._meet(f"an outer step of fragment {fragment}")
        weights = self._named()
        moved = []
        for name in self._parts[fragment]:
            anchor = held(self._anchor(name)).detach()
            moved.append(anchor - held(weights[name][1]).to(anchor.dtype))
        flights = list(self._begin_means(moved)) if self.size > 1 else []
        self._on_way = fragment, moved, flights

    def _arrive(self) -> None:
        if self._on_way is None:
            return
        fragment, moved, flights = self._on_way
        self._on_way = None
        means = dict(enumerate(moved))
        for flight in flights:
            means.update(self._end_mean(flight, moved))
        self._arrived_means = fragment, {name: means[i] for i, name in enumerate(self._parts[fragment])}

    def _step(self, fragment: int) -> None:
        """The outer step, and the weights that come of it."""
        assert self._arrived_means is not None, "it has arrived"
        _, means = self._arrived_means
        self._arrived_means = None
        weights = self._named()
        for name, mean in means.items():
            anchor = self._anchor(name)
            anchor.grad = as_gradient(mean, anchor._spec)
        self._outer[fragment].step()
        self._outer[fragment].zero_grad(set_to_none=True)
        for name in means:
            weight, anchor = held(weights[name][1]), held(self._anchor(name)).detach()
            if self.keep:
                anchor = anchor + (weight.to(anchor.dtype) - anchor) * self.keep
            weight.copy_(anchor)
        written([weights[name][1] for name in means])

    def _apply(self) -> None:
        if self._arrived_means is not None:
            self._step(self._arrived_means[0])

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        if self._anchors is None or (self._steps == 0 and not self._weights_differ):
            self._make_anchors()
        assert self._anchors is not None, "made"
        named = self._named()
        names = [name for name in named if name in self]
        began = [bool(outer.state) for outer in self._outer]
        state = get_optimizer_state_dict(self._anchors, self._outer)
        self._forget(began)
        own: dict[str, Any] = {
            "anchors": {name: self._anchor(name).detach() for name in names},
            "outer": state,
            "outer_began": began,
        }
        if self.delay:
            fragment, means = self._arrived_means or (-1, {})
            own["arrived"] = fragment
            own["means"] = {
                name: as_gradient(
                    means[name] if name in means else torch.zeros_like(held(self._anchor(name)).detach()),
                    self._anchor(name)._spec,
                )
                for name in names
            }
        return own

    def _forget(self, began: list[bool]) -> None:
        """What torch has made up for outer optimizers that have not stepped."""
        for outer, real in zip(self._outer, began, strict=True):
            if not real:
                outer.state.clear()

    def _load_own(self, state: dict[str, Any]) -> None:
        self._make_anchors()
        assert self._anchors is not None, "made"
        mine = {name for name in self._named() if name in self}
        if mine != set(state["anchors"]):
            differences = ", ".join(sorted(mine ^ set(state["anchors"]))[:5])
            raise ValueError(f"{self!r}: expected a state with the same parameters trained, got others: {differences}")
        for name, anchor in state["anchors"].items():
            held(self._anchor(name)).copy_(held(anchor))
        set_optimizer_state_dict(self._anchors, self._outer, optim_state_dict=state["outer"])
        self._forget(state["outer_began"])
        self._on_way = self._arrived_means = None
        if self.delay and state["arrived"] >= 0:
            fragment = state["arrived"]
            self._arrived_means = fragment, {name: held(state["means"][name]).clone() for name in self._parts[fragment]}


def _parted(sizes: dict[str, int], fragments: int) -> list[list[str]]:
    """Names in so many parts, neighbours together, of about equal sizes, none empty: by where the middle of each is."""
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
