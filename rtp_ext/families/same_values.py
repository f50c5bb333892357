"""Compares what a module of another package computes with the operation that would take its place.

A small twin of the module, of the same class and with the same settings, runs on the CPU in float64, in training and in
evaluation. Outputs and the gradients of all inputs and parameters have to be those of the operation. A twin that fails,
changes its state or needs other sizes does not match: the module is then converted in another way.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

_PACKAGES = ("transformers", "transformers_modules")  # the second one: code that a checkpoint brings along

TINY = 1 << 14  # numbers of a weight that is no larger than that of its small twin need be

_known: dict[Any, bool] = {}  # results, by class, sizes and settings of a module


def is_of_package(module: nn.Module) -> bool:
    """Returns whether a module's class is of the transformers package. Other code is never compared: it may have
    effects that its values do not show."""
    return type(module).__module__.partition(".")[0] in _PACKAGES


def computes(
    module: nn.Module,
    inputs: Callable[[], Sequence[tuple[tuple[Any, ...], bool]]],
    expected: Callable[..., torch.Tensor],
    sizes: Mapping[int, int],
    key: Any = (),
    *,
    method: str = "forward",
    instead: Mapping[str, nn.Module] = MappingProxyType({}),
    varies: bool = False,
) -> bool:
    """Returns whether a method of a module computes `expected(parameters, *inputs)`, with parameters by name.

    inputs: makes the inputs of several calls, for the small sizes, each with whether the module may refuse it. sizes:
    small values of its sizes, in the shapes of its parameters and in its attributes. key: of the operation that
    `expected` computes. instead: modules in place of some of its own, by path, for the comparison alone. varies:
    whether no number among its attributes may matter, such as a probability of dropout, because these may change.
    """
    replaced = any("forward" in part.__dict__ for part in module.modules())
    if replaced or any(buffer is not None for buffer in module.buffers()):
        return False
    ways = _implementations(module)
    seen = (type(module), key, ways, method, tuple(instead), varies, _settings(module), tuple(sizes.items()))
    if seen not in _known:
        with _alone():
            twins = [[_twin(module, sizes, way, instead, other) for other in {False, varies}] for way in ways]
            _known[seen] = any(all(_is_same(twin, method, inputs(), expected) for twin in each) for each in twins)
    return _known[seen]


def _twin(module: Any, sizes: Mapping[int, int], way: str, instead: Mapping[str, nn.Module], other: bool) -> Any:
    """Returns the small twin with the modules of `instead`, and, if `other`, with other numbers in its attributes."""
    twin = small_twin(module, sizes, way)
    for path, part in instead.items():
        above, _, name = path.rpartition(".")
        twin.get_submodule(above)._modules[name] = part
    for part in twin.modules() if other else ():
        numbers = {key: value for key, value in part.__dict__.items() if type(value) is float}
        part.__dict__.update({key: 0.5 if value != 0.5 else 0.25 for key, value in numbers.items()})
    return twin


def _implementations(module: Any) -> tuple[str, ...]:
    """Returns the forwards of an experts module of transformers that compute as the one that its configuration asks
    for, and run here: its own, and one that stands for all others."""
    asked = getattr(module.__dict__.get("config"), "_experts_implementation", "eager")
    return ("eager",) if asked == "eager" else ("eager", "batched_mm")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Runs on the CPU in plain autograd, whatever the caller's modes are, and leaves its random numbers alone."""
    with (
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.random.default_generator.manual_seed(0)  # that of the CPU alone
        yield


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Returns what decides the results of modules of one class, besides the values of their parameters."""
    found: list[Any] = []
    for name, part in module.named_modules():
        for key, value in part.__dict__.items():
            plain = value is None or isinstance(value, (bool, int, float, str)) or inspect.isroutine(value)
            found.append((name, key, value if plain and not inspect.ismethod(value) else type(value)))
        shapes = [(key, None if p is None else tuple(p.shape)) for key, p in part._parameters.items()]
        found.append((name, type(part), *shapes))
    return tuple(found)


def _state(module: nn.Module) -> list[Any]:
    """Returns what a forward changes if it writes attributes."""
    return [(name, key, id(value)) for name, part in module.named_modules() for key, value in part.__dict__.items()]


def small_twin(module: Any, sizes: Mapping[int, int], way: str) -> Any:
    """Returns a module of the same class with small parameters of random values in float64."""
    twin = object.__new__(type(module))
    for key, value in module.__dict__.items():
        if type(value) is int:
            value = sizes.get(value, value)
        elif type(value) is tuple:  # of a norm
            value = tuple(sizes.get(each, each) if type(each) is int else each for each in value)
        elif isinstance(value, dict):
            value = type(value)() if key.endswith("_hooks") else value.copy()
        twin.__dict__[key] = value
    if "config" in twin.__dict__:
        twin.__dict__["config"] = _Configuration(way)
    for key, parameter in module._parameters.items():
        if parameter is not None:
            shape = [sizes.get(extent, extent) for extent in parameter.shape]
            twin._parameters[key] = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    for key, child in module._modules.items():
        twin._modules[key] = child and small_twin(child, sizes, way)
    return twin


class _Configuration:
    """A configuration of transformers that has no other setting: a forward that reads one is not known."""

    def __init__(self, way: str) -> None:
        self._experts_implementation = way


def _is_same(twin: Any, method: str, inputs: Any, expected: Callable[..., torch.Tensor]) -> bool:
    calls = itertools.product((True, False), inputs)
    return all(_same(twin, method, training, each, expected, may_fail) for training, (each, may_fail) in calls)


def _same(
    twin: Any,
    method: str,
    training: bool,
    inputs: tuple[Any, ...],
    expected: Callable[..., torch.Tensor],
    may_fail: bool,
) -> bool:
    for part in twin.modules():
        part.training = training
    state = _state(twin)
    parameters = dict(twin.named_parameters())
    try:
        actual = getattr(type(twin), method)(twin, *inputs)
    except Exception:  # any error of code that is not known
        return may_fail
    wanted = [x for x in (*inputs, *parameters.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    reference = expected(parameters, *inputs)
    if not isinstance(actual, torch.Tensor) or not _close(actual, reference) or _state(twin) != state:
        return False
    if not actual.requires_grad:
        return False
    cotangent = torch.randn_like(reference)
    ours, theirs = (torch.autograd.grad(y, wanted, cotangent, allow_unused=True) for y in (reference, actual))
    pairs = zip(ours, theirs, strict=True)
    return all(_close(a, b) if a is not None and b is not None else a is b for a, b in pairs)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    scale = expected.detach().abs().max().item() if expected.numel() else 1.0
    return bool(torch.allclose(actual, expected, rtol=1e-9, atol=1e-12 * max(scale, 1.0)))
