"""A test of whether the step of an optimizer acts on each number of a parameter by itself: a few small tensors, stepped
whole and in parts. It sends nothing, and is the same on every rank."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rtp_ext.convert.optimizers import StandIn

Groups = Sequence[dict[str, Any]]

PARTS = 3
# One of the small shapes is shorter than the number of parts in one dimension. The large one is above sizes from which
# optimizers keep factors or quantized state (128, 256 and 4096), and its parts are below one of them. It comes second:
# what needs square matrices of all numbers is refused before.
SHAPES = (((7,), (7, 5), (2, 5, 3)), ((260, 263),))
# Of the gradients of successive steps: they jump in both directions, so that rules for large and small ones come into
# force; the last steps, where the dtype has the range, by orders of magnitude.
SCALES = (*(1.0, 1e-3, 30.0, 0.1, 1e-2, 10.0, 1.0, 0.3) * 3, 1e3, 1.0, 1e-6, 1.0, 1e6, 1e-3, 1e-10, 1.0)
MODERATE = (1e-3, 30.0)
STEPS = len(SCALES)
MODES = ("eval", "train")  # methods of optimizers that keep averaged weights, which exchange them with the parameters


class Unfit(Exception):
    """The optimizer cannot step on parts; its text says why, as the end of a sentence that begins with its name."""


class Fails(Unfit):
    """The class raises an error of its own."""


@dataclass
class Findings:
    """numbers: names of state that is one number for each parameter. changed: options of groups that steps change."""

    numbers: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)


class _PartsStandIn(StandIn):
    """Gives the optimizer other tensors than those it was built of, in each step, as those of shards are."""

    def __init__(self, given: Optimizer, parts: dict[Tensor, Tensor], numbers: set[str]) -> None:
        super().__init__(given, numbers=numbers)
        self.parts = parts

    def shard(self, parameter: Any) -> Tensor:
        part = self.parts[parameter].detach().requires_grad_()
        part.grad = self.parts[parameter].grad
        return part

    def laid_out(self, value: Tensor, parameter: Any) -> Tensor:
        return value


@dataclass
class _Whole:
    optimizer: Optimizer
    parameters: list[Tensor]

    def step(self, closure: Callable[[], Any] | None) -> None:
        bare_step(self.optimizer)(self.optimizer, *([] if closure is None else [closure]))

    def switch(self, mode: str) -> None:
        getattr(self.optimizer, mode)()


@dataclass
class _Part:
    """Part `index` of all tensors, cut along dimension `cut`, or the last one where a tensor has fewer."""

    cut: int
    index: int
    optimizer: Optimizer
    parameters: list[Tensor]
    parts: dict[Tensor, Tensor]
    numbers: set[str]

    def of(self, whole: Tensor) -> Tensor:
        return _part(whole, self.cut, self.index)

    def step(self, closure: Callable[[], Any] | None) -> None:
        stand_in = _PartsStandIn(self.optimizer, self.parts, self.numbers)
        bare_step(self.optimizer)(stand_in.optimizer, lambda: stand_in.fill(closure))
        if stand_in.filled != 1:
            raise Unfit(f"calls the closure of a step {stand_in.filled} times: expected once")
        stand_in.give_back()

    def switch(self, mode: str) -> None:
        _PartsStandIn(self.optimizer, self.parts, self.numbers).call(mode)


def _part(whole: Tensor, cut: int, index: int) -> Tensor:
    dim = min(cut, whole.dim() - 1)
    extent = whole.shape[dim]
    size = -(-extent // PARTS)
    first = min(index * size, extent)
    return whole.narrow(dim, first, min(size, extent - first))


def bare_step(optimizer: Optimizer) -> Any:
    """Returns the step of an optimizer without the hooks that torch wraps around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def test(
    cls: type[Optimizer],
    groups: Groups,
    options: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    findings: Findings,
) -> None:
    """Steps small random tensors of one dtype whole and in parts along each dimension, and adds to `findings`. Raises
    Unfit where any number differs. `groups`: options of parameter groups, without parameters. Leaves torch's random
    numbers as they are."""
    others = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    wide = torch.promote_types(dtype, torch.float64)
    with torch.random.fork_rng(others, device_type=kind), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Steps are small beside numbers: rounding could hide what float64 shows, which not every class takes.
        with contextlib.suppress(Fails):
            for shapes in SHAPES if dtype != wide else ():
                _Test(cls, groups, options, shapes * len(groups), wide, device, Findings()).run()
        for shapes in SHAPES:
            _Test(cls, groups, options, shapes * len(groups), dtype, device, findings).run()


@dataclass
class _Test:
    cls: type[Optimizer]
    groups: Groups
    options: dict[str, Any]
    shapes: Sequence[tuple[int, ...]]  # of all parameters
    dtype: torch.dtype
    device: torch.device
    findings: Findings
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(2311))
    values: list[Tensor] = field(default_factory=list)  # of the parameters, before the first step

    def run(self) -> None:
        values = self.values = [self.draw(shape) for shape in self.shapes]
        cuts = [(cut, index) for cut in range(max(map(len, self.shapes))) for index in range(PARTS)]
        with self.told("cannot be built here"):
            whole = _Whole(*self.built(values))
            parts = [self.part(values, *cut) for cut in cuts]
        before = [_options(group) for group in whole.optimizer.param_groups]
        modes = [mode for mode in MODES if callable(getattr(self.cls, mode, None))]
        for number in range(STEPS):
            self.step(number, whole, parts)
            for mode in modes if number == STEPS // 2 else ():
                with self.told(f"has a method {mode}() that fails with parts of tensors"):
                    whole.switch(mode)
                    for part in parts:
                        part.switch(mode)
                        self.compare(whole, part, f"after {mode}()")
        if all(map(torch.equal, whole.parameters, values)):
            raise Unfit(f"changes no parameter in {STEPS} steps, so that it cannot be tested (a learning rate of 0?)")
        for group, known in zip(whole.optimizer.param_groups, before, strict=True):
            changed = {key for key, value in _options(group).items() if not _same(value, known.get(key), 0.0)}
            self.findings.changed |= changed

    def step(self, number: int, whole: _Whole, parts: Sequence[_Part]) -> None:
        scale = SCALES[number]
        if torch.finfo(self.dtype).max < 1e30:
            scale = min(max(scale, MODERATE[0]), MODERATE[1])
        gradients = [self.draw(shape, spread=2) * scale for shape in self.shapes]
        for parameter, gradient in zip(whole.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        # The loss of a rank is not that of the others; every other step is without one.
        losses = [None if number % 2 else torch.tensor(float(1 + i)) for i in range(1 + len(parts))]
        with self.told("cannot be stepped with plain tensors"):
            whole.step(_closure(losses[0]))
        if not all(bool(parameter.isfinite().all()) for parameter in whole.parameters):
            raise Unfit(f"gives numbers that are not finite after step {number + 1} on tensors of about 1")
        for part, loss in zip(parts, losses[1:], strict=True):
            for parameter, gradient in zip(part.parts.values(), gradients, strict=True):
                parameter.grad = part.of(gradient).clone()
            with self.told("cannot be stepped with parts of tensors"):
                part.step(_closure(loss))
            self.compare(whole, part, f"after step {number + 1}")

    def draw(self, shape: tuple[int, ...], spread: int = 0) -> Tensor:
        """Returns random numbers over `spread` orders of magnitude, which grow along each dimension, so that parts
        differ in size."""
        values = torch.randn(shape, generator=self.random, dtype=torch.float64, device="cpu")
        values *= 10.0 ** -torch.randint(spread + 1, shape, generator=self.random, device="cpu")
        for dim, extent in enumerate(shape):
            ramp = torch.linspace(0.2, 1.0, extent, dtype=torch.float64, device="cpu")
            values *= ramp.view(-1, *[1] * (len(shape) - dim - 1))
        return values.to(self.device, self.dtype)

    def built(self, values: Sequence[Tensor]) -> tuple[Optimizer, list[Tensor]]:
        parameters: list[Tensor] = [nn.Parameter(value.clone()) for value in values]
        left, each = iter(parameters), len(parameters) // len(self.groups)
        given = [{**_copied(group), "params": [next(left) for _ in range(each)]} for group in self.groups]
        return self.cls(given, **_copied(self.options)), parameters

    def part(self, values: Sequence[Tensor], cut: int, index: int) -> _Part:
        own = [_part(value, cut, index).clone() for value in values]
        optimizer, parameters = self.built(own)
        parts = dict(zip(parameters, own, strict=True))
        return _Part(cut, index, optimizer, parameters, parts, self.findings.numbers)

    @contextlib.contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Raises Unfit for an error, or where random numbers of torch were drawn."""
        before = _drawn(self.device)
        try:
            yield
        except Unfit:
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0][:200]
            raise Fails(f"{what}: {type(error).__name__}: {text}") from error
        if not all(map(torch.equal, before, _drawn(self.device))):
            raise Unfit("draws random numbers, which are others for a part than for the whole")

    def compare(self, whole: _Whole, part: _Part, when: str) -> None:
        tolerance = max(1e-6, 8 * torch.finfo(self.dtype).eps)
        for group, other in zip(whole.optimizer.param_groups, part.optimizer.param_groups, strict=True):
            expected, found = _options(group), _options(other)
            for key in expected.keys() | found.keys():
                if not _same(expected.get(key), found.get(key), tolerance):
                    raise Unfit(f"computes the option {key!r} of a group from more than single numbers ({when})")
        expected, found = _shared(whole.optimizer), _shared(part.optimizer)
        if not _same(expected, found, tolerance):
            names = ", ".join(map(repr, expected))
            raise Unfit(f"computes the state {names} of all parameters from more than single numbers ({when})")
        for number, (parameter, known) in enumerate(zip(part.parameters, whole.parameters, strict=True)):
            dim = min(part.cut, known.dim() - 1)
            where = f"of a parameter {list(known.shape)} in {PARTS} parts along dimension {dim} {when}"
            _expect_equal("numbers", part.parts[parameter], part.of(known), self.scale(known, number), tolerance, where)
            expected, found = whole.optimizer.state.get(known, {}), part.optimizer.state.get(parameter, {})
            if expected.keys() != found.keys():
                differ = sorted(map(str, expected.keys() ^ found.keys()))
                raise Unfit(f"keeps state {', '.join(differ)} for parts or for the whole only")
            for key, value in expected.items():
                if self.is_cut(key, value, found[key], known, part, where):
                    _expect_equal(f"state {key!r}", found[key], part.of(value), _largest(value), tolerance, where)
                elif not _same(value, found[key], tolerance):
                    raise Unfit(f"computes state {key!r} from more than single numbers ({where})")

    def scale(self, parameter: Tensor, number: int) -> float:
        """Returns the size of a parameter's numbers; in float64 of the way that they went, if any."""
        way = _largest(parameter - self.values[number])
        return way if way and torch.finfo(self.dtype).eps < 1e-12 else _largest(parameter)

    def is_cut(self, key: str, value: Any, own: Any, whole: Tensor, part: _Part, where: str) -> bool:
        """Returns whether state is cut as its parameter, or else is no more than one number. Raises Unfit for other
        state."""
        if not isinstance(value, Tensor):
            if not _plain(value):
                raise Unfit(f"keeps tensors in a {type(value).__name__}, state {key!r}, which no checkpoint could cut")
            return False
        if value.shape == whole.shape and own.shape == part.of(whole).shape:
            self.findings.cut.add(key)
        elif value.numel() == 1 == own.numel():
            self.findings.numbers.add(key)
        else:
            raise Unfit(f"keeps state {key!r} of shape {list(value.shape)} {where}")
        if key in self.findings.cut & self.findings.numbers:
            raise Unfit(f"keeps state {key!r} of the parameter's shape and of one number")
        return key in self.findings.cut


def _copied(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else copy.copy(value) for key, value in options.items()}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _copied(group).items() if key != "params"}


def _closure(loss: Tensor | None) -> Callable[[], Any] | None:
    return None if loss is None else lambda: loss


def _drawn(device: torch.device) -> list[Tensor]:
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


def _expect_equal(what: str, found: Tensor, expected: Tensor, scale: float, tolerance: float, where: str) -> None:
    off = _difference(found, expected, scale)
    if not off <= tolerance:
        raise Unfit(f"does not act on each number by itself: {what} {where} differ by {100 * off:.2g} %")


def _shared(optimizer: Optimizer) -> dict[Any, Any]:
    """Returns the state that belongs to no parameter."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    return (
        value is None
        or isinstance(value, (bool, int, float, complex, str))
        or (isinstance(value, (list, tuple)) and all(map(_plain, value)))
    )


def _same(expected: Any, found: Any, tolerance: float) -> bool:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return expected.shape == found.shape and _difference(found, expected, _largest(expected)) <= tolerance
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(expected, found, rel_tol=tolerance) or (math.isnan(expected) and math.isnan(found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(_same(expected[k], found[k], tolerance) for k in expected)
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        pairs = zip(expected, found, strict=False)
        return len(expected) == len(found) and all(_same(*pair, tolerance) for pair in pairs)
    return type(expected) is type(found) and bool(expected == found)


def _largest(values: Tensor) -> float:
    return _wide(values).abs().max().item() if values.numel() else 0.0


def _wide(values: Tensor) -> Tensor:
    return values.detach().to(torch.complex128 if values.is_complex() else torch.float64)


def _difference(found: Tensor, expected: Tensor, scale: float) -> float:
    """Returns the largest difference relative to `scale`."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    if torch.equal(found, expected):
        return 0.0
    return _largest(_wide(found) - _wide(expected)) / (scale or 1.0)
