"""Optimizers of other packages on this rank's shards."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rtp_ext.convert.optimizers import ON_SHARDS, StandIn
from rtp_ext.optim import whole_and_parts
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.parameters_in_use import rotates

O = TypeVar("O", bound=Optimizer)  # noqa: E741
_WHY = (
    ". A shard can step by itself only where the step of a number depends on no other: on no norm of a tensor, "
    "statistic of a row or column, or product of matrices"
)


def on_shards(Optimizer: type[O], params: Iterable[Any], **options: Any) -> O:
    """Returns `Optimizer(params, **options)`, whose steps see plain tensors: this rank's shards of parameters,
    gradients and state. For optimizers of other packages that fail on DTensors and act on each number by itself.

    That they do is tested here: small random tensors, whole and in parts, make 32 steps with different gradients, and
    all numbers must be equal to 1e-6 of the largest. Nothing is sent, torch's random numbers stay as they are, and all
    ranks with equal arguments decide alike. Takes about a second for each dtype. A step or group with other options
    than those that were tested is tested before it runs.

    The result is an instance of the class. State and state dicts hold DTensors, for torch.distributed.checkpoint; the
    closure of a step, hooks, schedules and parameter groups work as usual. Methods `train()` and `eval()`, as those of
    schedule-free optimizers, run on shards too.

    Args:
        Optimizer: a subclass of torch.optim.Optimizer, with `step(closure=None)`.
        params: parameters of a converted model, plain ones, or groups of either, without names.
        options: of the constructor.

    Raises:
        TypeError: `Optimizer` is no such class.
        ValueError: the class cannot be built or stepped; its numbers depend on others (norms of tensors, statistics of
            rows or columns, products of matrices), on random numbers or on the loss; its state could not be cut.
    """
    if not (isinstance(Optimizer, type) and issubclass(Optimizer, torch.optim.Optimizer)):
        raise TypeError(f"on_shards: expected a subclass of torch.optim.Optimizer, got {Optimizer!r}")
    groups = _groups_of(params)
    tested = _Tested(Optimizer, options)
    tested.test([{key: value for key, value in group.items() if key != "params"} for group in groups], _shards(groups))
    optimizer = Optimizer(groups, **options)
    tested.begin(optimizer)
    return optimizer


def _groups_of(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = [params] if isinstance(params, Tensor) else list(params)
    groups: list[Any] = [dict(each) for each in given] if given and isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        each = group["params"]
        group["params"] = [each] if isinstance(each, Tensor) else list(each)
    for parameter in (each for group in groups for each in group["params"]):
        if not isinstance(parameter, Tensor):
            raise ValueError(
                f"on_shards: expected parameters without names, got a {type(parameter).__name__}: that a step by names "
                "acts on each number by itself cannot be tested"
            )
        if isinstance(parameter, DTensor) and not rotates(parameter):
            raise ValueError(
                "on_shards: expected parameters of a model after fully_rotate, or plain ones, got another DTensor of "
                f"shape {tuple(parameter.shape)}"
            )
    return groups


def _shards(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [held(parameter) for group in groups for parameter in group["params"]]


@dataclass
class _Tested:
    """What has been tested of one optimizer; a call checks that a step is covered, and returns the names of state that
    is one number."""

    cls: type[Optimizer]
    options: dict[str, Any]
    findings: whole_and_parts.Findings = field(default_factory=whole_and_parts.Findings)
    keys: set[str] = field(default_factory=set)  # options of groups on which the step may depend
    known: set[Any] = field(default_factory=set)  # their values, and the dtypes, that have been tested

    def __call__(self, optimizer: Optimizer, arguments: tuple, keywords: dict[str, Any]) -> Collection[str]:
        if len(arguments) > 1 or keywords.keys() - {"closure"}:
            raise ValueError(
                f"on_shards: expected a step of {self.cls.__name__} with a closure alone, got more arguments"
            )
        for group in optimizer.param_groups:
            if group["params"] and not self._values(group) <= self.known:
                options = {key: value for key, value in group.items() if key in self.keys}
                if group.get("lr"):  # may be 0 for now
                    options["lr"] = group["lr"]
                self.test([options], _shards([group]))
                self.known |= self._values(group)
        return self.findings.numbers

    def test(self, groups: list[dict[str, Any]], shards: list[Tensor]) -> None:
        kept = {_fixed(group): group for group in groups}
        devices = {shard.device for shard in shards if shard.device.type != "meta"} or {torch.device("cpu")}
        for dtype in sorted({shard.dtype for shard in shards} or {torch.get_default_dtype()}, key=str):
            for device in sorted(devices, key=str):
                try:
                    whole_and_parts.test(self.cls, list(kept.values()), self.options, dtype, device, self.findings)
                except whole_and_parts.Unfit as error:
                    why = "" if isinstance(error, whole_and_parts.Fails) else _WHY
                    given = f"{self.cls.__module__}.{self.cls.__qualname__}"
                    raise ValueError(f"on_shards: {given} {error}{why} (docs/optimizers.md)") from error

    def begin(self, optimizer: Optimizer) -> None:
        self.keys = {key for group in optimizer.param_groups for key in group}
        self.keys -= {"params", "lr", *self.findings.changed}
        for group in optimizer.param_groups:
            self.known |= self._values(group)
        optimizer.__dict__[ON_SHARDS] = self
        for mode in whole_and_parts.MODES:
            if callable(getattr(self.cls, mode, None)):
                optimizer.__dict__[mode] = types.MethodType(_Mode(mode, self), optimizer)

    def _values(self, group: dict[str, Any]) -> set[Any]:
        options = _fixed({key: value for key, value in group.items() if key in self.keys})
        return {(options, shard.dtype) for shard in _shards([group])}


@dataclass
class _Mode:
    name: str
    tested: _Tested

    def __call__(self, optimizer: Optimizer) -> None:
        StandIn(optimizer, numbers=self.tested(optimizer, (), {})).call(self.name)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.autograd.graph.increment_version(parameters)  # these methods write through `.data`


def _fixed(group: dict[str, Any]) -> Any:
    """Returns the options of a group on which the kind of its step may depend. Rates change in training: of those only
    whether they are 0."""
    return tuple(sorted((key, _kind(value)) for key, value in group.items() if key != "lr"))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "tensor"  # whose value the host would have to wait for
    if isinstance(value, float):
        return str(bool(value))
    if isinstance(value, (list, tuple)):
        return str([_kind(each) for each in value])
    return f"{type(value).__name__} {value!r}"
