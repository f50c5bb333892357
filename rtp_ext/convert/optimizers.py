"""Optimizers of converted models: some step on DTensors, some on this rank's shards, others are refused.

torch's optimizers step on DTensors, as they do after fully_shard. Where DTensor has no rule for an operation of an
optimizer, or for those that `rtp_ext.optim.on_shards` has made, the step gets plain tensors instead: hooks pass it a
stand-in that holds the local parts of parameters, gradients and state. An elementwise step on those equals the step on
the whole. Optimizers that a stand-in does not support are refused by name. docs/optimizers.md has the table.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import SGD, Adafactor, Adagrad, Muon, Optimizer, Rprop

from rtp_ext.convert.adafactor import shard_of, step_on_shards
from rtp_ext.dtensor_hooks import after_steps, before_steps
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import as_gradient
from rtp_ext.ring.parameters_in_use import rotates

REPLACED = "_rtp_replaced"  # attribute of a plain parameter that a model has replaced by shards: its name there
# Attribute of an optimizer whose step has been tested to act on each number by itself: a function that is called before
# each step, with the optimizer and the arguments and keywords of the step, and returns the `numbers` of a StandIn.
ON_SHARDS = "_rtp_on_shards"

# Optimizers that no hook can correct, by the package and the name of a class or of one of its bases.
_REFUSED = {
    ("torch", "LBFGS"): (
        "its stopping rules and line search follow the loss of one rank, so that ranks would take different numbers of "
        "forwards, and it flattens all parameters into one vector. Use torch.optim.AdamW, Muon or Adafactor"
    ),
    ("transformers", "Adafactor"): (
        "it mixes its own plain tensors with sharded parameters. Use torch.optim.Adafactor, whose row and column "
        "statistics are summed over the ring"
    ),
    ("bitsandbytes", "Optimizer8bit"): (
        "its kernels take no shards, and its quantized state could not be saved as parts of the whole. Use "
        "torchao.optim.AdamW8bit, AdamW4bit or AdamWFp8, or torch.optim.AdamW, whose state is cut over the ring"
    ),
}


# -- optimizers that were built too early ------------------------------------------------------------------------------


def weak_parameters(module: nn.Module) -> list[tuple[str, weakref.ref]]:
    """Returns weak references to the parameters of a model, by name."""
    kind = type(module).__name__
    return [(f"{kind}.{name}", weakref.ref(p)) for name, p in module.named_parameters()]


def mark_replaced(module: nn.Module, before: Iterable[tuple[str, weakref.ref]]) -> None:
    """Marks the parameters, plain or of tensor parallelism, that a model had `before` and has replaced, and that other
    references keep alive.

    An optimizer that was built too early has such references, and would go on to train these parameters: its step
    raises ValueError.
    """
    now = {id(parameter) for parameter in module.parameters()}
    for name, reference in before:
        parameter = reference()
        if parameter is not None and id(parameter) not in now:
            parameter.__dict__[REPLACED] = name


def _refuse_stale(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if REPLACED in parameter.__dict__:
                raise ValueError(
                    f"{type(optimizer).__name__}: expected an optimizer of the converted model's parameters, got one "
                    f"that holds the plain {parameter.__dict__[REPLACED]}, which fully_rotate has replaced by shards: "
                    "build the optimizer after fully_rotate"
                )


# -- hooks of every step -----------------------------------------------------------------------------------------------


def watch_optimizers() -> None:
    """Registers the hooks below for the steps of all optimizers of this process; once."""
    before_steps("stale", _refuse_step)
    before_steps("stand-in", _stand_in)
    after_steps(_after_step)


def _refuse_step(optimizer: Optimizer, _arguments: tuple, _keywords: dict[str, Any]) -> None:
    _refuse_stale(optimizer)
    rotated = _rotated(optimizer)
    if rotated:
        _refuse_unfit(optimizer, rotated)


def _rotated(optimizer: Optimizer) -> list[DTensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if rotates(p)]


def _stand_in(optimizer: Optimizer, arguments: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict] | None:
    if not _rotated(optimizer):
        return None
    adafactor = _takes(optimizer, Adafactor)
    tested = optimizer.__dict__.get(ON_SHARDS)
    if tested is not None:
        stand_in = StandIn(optimizer, numbers=tested(optimizer, arguments[1:], keywords))
    elif adafactor or _elementwise(optimizer):
        stand_in = StandIn(optimizer, adafactor)
    else:
        return None
    closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")

    def fill() -> Any:
        return stand_in.fill(closure)

    return (stand_in.optimizer, fill), {}


def _after_step(_optimizer: Optimizer, arguments: tuple, _keywords: dict[str, Any]) -> None:
    stand_in = arguments[0].__dict__.get(_STAND_IN)
    if stand_in is not None:
        stand_in.give_back()


def _takes(optimizer: Optimizer, cls: type[Optimizer]) -> bool:
    """Returns whether the step of an optimizer is that of `cls`, a class of torch."""
    return type(optimizer).step is cls.step


def _elementwise(optimizer: Optimizer) -> bool:
    """Returns whether a step is elementwise and cannot run on DTensors: it uses operations without a DTensor rule, or,
    as those of torchao, graphs whose cache confuses uneven shards of different ranks."""
    if any(base.__module__ == "torchao.optim.adam" for base in type(optimizer).__mro__):
        return True
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return _takes(optimizer, Rprop) or (fused and (_takes(optimizer, SGD) or _takes(optimizer, Adagrad)))


def _refuse_unfit(optimizer: Optimizer, rotated: list[DTensor]) -> None:
    kind = type(optimizer).__name__
    for base in type(optimizer).__mro__:
        why = _REFUSED.get((base.__module__.partition(".")[0], base.__name__))
        if why is not None:
            raise ValueError(
                f"{base.__module__.partition('.')[0]}'s {kind} cannot train the sharded parameters of a converted "
                f"model: {why} (docs/optimizers.md)"
            )
    if _takes(optimizer, Muon):
        for parameter in rotated:
            _refuse_few_rows(kind, parameter)


def _refuse_few_rows(kind: str, parameter: DTensor) -> None:
    """Raises ValueError where a rank has no row or column of a matrix, which DTensor cannot multiply."""
    shards = [1] * parameter.dim()
    for index, placement in enumerate(parameter.placements):
        if isinstance(placement, (Shard, _StridedShard)):
            shards[placement.dim] *= parameter.device_mesh.size(index)
    for dim, (extent, ranks) in enumerate(zip(parameter.shape, shards, strict=True)):
        if extent < ranks:
            raise ValueError(
                f"{kind}: expected matrices of at least {ranks} numbers along dimension {dim}, which {ranks} ranks "
                f"share, got a parameter of shape {tuple(parameter.shape)}: give it to torch.optim.AdamW in an "
                "optimizer of its own (docs/optimizers.md)"
            )


_STAND_IN = "_rtp_stand_in"  # attribute of an optimizer that stands for another in one step: its _StandIn


class StandIn:
    """A stand-in for an optimizer in one step: an optimizer of the same class, of this rank's plain shards.

    The closure of the step fills it, after all hooks and before the optimizer reads a gradient. A step that fails
    leaves the optimizer itself unchanged. `adafactor`: rotated parameters are left out, and step before the others.
    `numbers`: names of state that is one number, even where a shard has one number too.
    """

    def __init__(self, given: Optimizer, adafactor: bool = False, numbers: Collection[str] = ("step",)) -> None:
        self.given, self.adafactor, self.numbers = given, adafactor, numbers
        self.optimizer: Any = object.__new__(type(given))
        self.optimizer.__dict__.update(given.__dict__, **{_STAND_IN: self})
        self.owners: dict[torch.Tensor, torch.Tensor] = {}  # parameters by their plain shards
        self.filled = 0

    def shard(self, parameter: Any) -> torch.Tensor:
        """Returns this rank's shard of a parameter, with the shard of its gradient."""
        if not rotates(parameter):
            return parameter
        shard = held(parameter).detach().requires_grad_(parameter.requires_grad)
        if parameter.grad is not None:
            shard.grad = shard_of(parameter.grad, parameter)
        return shard

    def laid_out(self, value: torch.Tensor, parameter: Any) -> torch.Tensor:
        """Returns a new value of the state with the layout of its parameter."""
        return as_gradient(value, parameter._spec)

    def fill(self, closure: Callable[[], Any] | None) -> Any:
        self.filled += 1
        loss = None if closure is None else closure()
        with torch.no_grad():
            stand_ins: dict[torch.Tensor, torch.Tensor] = {}
            for group in self.given.param_groups:
                if self.adafactor:
                    step_on_shards(group, list(filter(rotates, group["params"])), self.given.state)
                for parameter in group["params"]:
                    if not (self.adafactor and rotates(parameter)):
                        stand_ins[parameter] = self.shard(parameter)
            self.owners = {shard: parameter for parameter, shard in stand_ins.items()}
            self.optimizer.param_groups = [
                {**group, "params": [stand_ins[p] for p in group["params"] if p in stand_ins]}
                for group in self.given.param_groups
            ]
            whole = {key: value for key, value in self.given.state.items() if not isinstance(key, torch.Tensor)}
            self.optimizer.state = defaultdict(dict, whole)
            for parameter, shard in stand_ins.items():
                if parameter in self.given.state:
                    state = self.given.state[parameter]
                    self.optimizer.state[shard] = {key: shard_of(value, parameter) for key, value in state.items()}
        return loss

    def give_back(self) -> None:
        """Moves the state after the step to the optimizer."""
        left = self.optimizer.__dict__
        for group, known in zip(left.pop("param_groups"), self.given.param_groups, strict=True):
            known.update({key: value for key, value in group.items() if key != "params"})
        for shard, state in left.pop("state").items():
            if not isinstance(shard, torch.Tensor):
                self.given.state[shard] = state
                continue
            parameter = self.owners[shard]
            known = self.given.state[parameter]
            for key, value in state.items():
                if parameter is shard or not self._is_cut(key, value, shard):
                    known[key] = value
                elif held(known.get(key)) is not value:  # new: else it has been written in place
                    known[key] = self.laid_out(value, parameter)
        del left[_STAND_IN]
        self.given.__dict__.update(left)

    def _is_cut(self, key: str, value: Any, shard: torch.Tensor) -> bool:
        """Returns whether a value of the state has the layout of its shard."""
        return isinstance(value, torch.Tensor) and key not in self.numbers and value.shape == shard.shape

    def call(self, method: str) -> None:
        """Calls a method of the optimizer's class that writes to parameters outside of steps."""
        self.fill(None)
        getattr(type(self.given), method)(self.optimizer)
        self.give_back()
