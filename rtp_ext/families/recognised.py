"""Recognises MLPs and experts of the transformers package by what they compute."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rtp_ext.families.same_forward import FUNCTIONS
from rtp_ext.functional.mlp import ACTIVATIONS

# -- comparison of small twins -----------------------------------------------------------------------------------------

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


# -- MLPs --------------------------------------------------------------------------------------------------------------


class _Mark(nn.Module):
    """Stands for a dropout: shows in the values where in the forward it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * x + 1.0


def computes_mlp(
    module: Any,
    kind: str,
    paths: Sequence[str | None],
    activation: str,
    dropouts: Sequence[str],
    transposed: bool,
) -> bool:
    """Returns whether a module computes an MLP and nothing else, or what `kind` (of `MLPBlock`) adds to it.

    paths: of gate (or None), up and down. dropouts: paths of all dropouts, of which none but the one that belongs to
    the kind may be called. transposed: whether weights are stored as [in_features, out_features].
    """
    gate, up, down = paths
    part = module.get_submodule(down)
    outputs, hidden = reversed(part.weight.shape) if transposed else part.weight.shape
    first = module.get_submodule(up).weight.shape
    features = first[0] if transposed else first[1]
    if (first[1] if transposed else first[0]) != hidden:
        return False
    sizes: dict[int, int] = {}
    if part.weight.numel() > TINY:
        for extent, few in ((features, 5), (hidden, 3), (outputs, 7)):
            sizes.setdefault(extent, few)
    function = FUNCTIONS[ACTIVATIONS[activation][0]]

    def linear(parameters: Mapping[str, torch.Tensor], path: str | None, x: torch.Tensor) -> torch.Tensor:
        weight = parameters[f"{path}.weight"]
        return F.linear(x, weight.t() if transposed else weight, parameters.get(f"{path}.bias"))

    def expected(parameters: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if gate is None:
            y = function(linear(parameters, up, x))
        else:
            y = function(linear(parameters, gate, x)) * linear(parameters, up, x)
        y = linear(parameters, down, y)
        if kind != "forward":
            y = 2.0 * y + 1.0
        if kind != "bert":
            return y
        norm = module.output.LayerNorm
        scale, shift = (parameters.get(f"output.LayerNorm.{key}") for key in ("weight", "bias"))
        return F.layer_norm(y + x, y.shape[-1:], scale, shift, norm.eps)

    def inputs() -> Sequence[tuple[tuple[Any, ...], bool]]:
        width = sizes.get(features, features)
        shapes = (((7, width), 0.1), ((2, 3, width), 10.0), ((5, width), 1e3))
        return [
            (((scale * torch.randn(shape, dtype=torch.float64)).requires_grad_(),), False) for shape, scale in shapes
        ]

    return computes(
        module,
        inputs,
        expected,
        sizes,
        (kind, *paths, activation, transposed),
        method="feed_forward_chunk" if kind == "bert" else "forward",
        instead={path: _Mark() for path in dropouts},
        varies=kind != "bert",
    )


# -- stacks of experts -------------------------------------------------------------------------------------------------


def is_experts(module: nn.Module) -> bool:
    """Returns whether a module of the transformers package holds stacked weights of experts, such as MixtralExperts."""
    if not is_of_package(module):
        return False
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "up_proj", "down_proj")]
    return weights[2] is not None and any(weight is not None and weight.dim() == 3 for weight in weights[:2])


def computes_experts(
    module: Any, activation: str, *, transposed: bool, interleaved: bool, clamp: tuple[float, float] | None
) -> bool:
    """Returns whether the forward of an experts module computes what `rotated_experts` does with its parameters.
    `clamp`: alpha and limit of clamped_swiglu; None for other activations, which are named as in `rotated_experts`."""
    gated = clamp is not None or ACTIVATIONS[activation][1]
    experts, *matrix = module.down_proj.shape
    hidden, features = matrix if transposed else reversed(matrix)
    sizes = {} if module.down_proj.numel() < TINY else _small_sizes(experts, features, hidden)

    def act(x: torch.Tensor) -> torch.Tensor:
        if not gated:
            return FUNCTIONS[ACTIVATIONS[activation][0]](x)
        gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        if clamp is None:
            return FUNCTIONS[ACTIVATIONS[activation][0]](gate) * up
        alpha, limit = clamp
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1.0) * gate * torch.sigmoid(alpha * gate)

    def expected(parameters: Mapping[str, torch.Tensor], x: Any, index: Any, weights: Any) -> torch.Tensor:
        up_name = "gate_up_proj" if gated else "up_proj"
        chosen, weights = index.clamp(max=experts - 1), weights * (index < experts)
        x = x.unsqueeze(1).expand(-1, index.shape[1], -1)
        for name, function in ((up_name, act), ("down_proj", None)):
            x = torch.einsum("tki,tkio->tko" if transposed else "tki,tkoi->tko", x, parameters[name][chosen])
            bias = parameters.get(f"{name}_bias")
            x = x if bias is None else x + bias[chosen]
            x = x if function is None else function(x)
        return (x * weights.unsqueeze(-1)).sum(1)

    def inputs() -> Sequence[tuple[tuple[Any, ...], bool]]:
        """Spread over experts, small and large values; all tokens to one expert; some to none, which it may refuse."""
        width, chosen = sizes.get(features, features), min(experts, 3)
        spread = torch.rand(7, experts).topk(chosen).indices
        none = spread.clone()
        none[::2, 0] = experts
        every = [
            (spread, 0.1),
            (spread, 10.0),
            (spread, 1e3),
            (torch.zeros_like(spread[:, :1]).expand(7, 1), 1.0),
            (none, 1.0),
        ]
        return [
            (
                (
                    (scale * torch.randn(7, width, dtype=torch.float64)).requires_grad_(),
                    index,
                    torch.rand(*index.shape, dtype=torch.float64).requires_grad_(),
                ),
                index is none,
            )
            for index, scale in every
        ]

    return computes(module, inputs, expected, sizes, (activation, transposed, interleaved, clamp))


# -- experts of other packages -----------------------------------------------------------------------------------------


def grouped_experts(module: nn.Module) -> tuple[str, str, str] | None:
    """Returns the names of gate, up and down [E, H, D], [E, H, D] and [E, D, H] of a module that stacks experts as
    torchtitan's GroupedExperts; None for any other. They are w1, w3 and w2, or begin so before `_`."""
    own = {name: tuple(each.shape) for name, each in module._parameters.items() if each is not None}
    names = {name.partition("_")[0]: name for name in own}
    if len(own) != 3 or names.keys() != {"w1", "w2", "w3"}:
        return None
    gate, up, down = names["w1"], names["w3"], names["w2"]
    fits = len(own[gate]) == 3 and own[gate] == own[up] == (own[down][0], *own[down][:0:-1])
    return (gate, up, down) if fits else None


def computes_grouped_experts(module: Any, names: tuple[str, str, str]) -> bool:
    """Returns whether the forward of a module with gate, up and down of these names computes, for rows [n, D] in the
    order of experts and their numbers [E], down(silu(gate(x)) * up(x)) by the expert of each. It may refuse rows behind
    those. A module with `use_grouped_mm` is compared without: torch's kernel rounds to bfloat16."""
    experts, features, hidden = module._parameters[names[2]].shape
    sizes = {} if module._parameters[names[2]].numel() < TINY else _small_sizes(experts, features, hidden)
    if "use_grouped_mm" in module.__dict__:
        module = copy.copy(module)
        module.use_grouped_mm = False

    def expected(parameters: Mapping[str, torch.Tensor], x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        rows = int(counts.sum())
        found = [x.new_zeros(len(x) - rows, x.shape[1])]
        for expert, own in reversed([*enumerate(x[:rows].split(counts.tolist()))]):
            gate, up, down = (parameters[name][expert].t() for name in names)
            found.insert(0, (F.silu(own @ gate) * (own @ up)) @ down)
        return torch.cat(found)

    def inputs() -> Sequence[tuple[tuple[Any, ...], bool]]:
        """Spread over experts, small and large values; all to the last one; none; rows behind those of experts."""
        width, spread = sizes.get(features, features), (torch.arange(experts) + 1) % 3
        last, none = torch.zeros_like(spread), torch.zeros_like(spread)
        last[-1] = 5
        every = [(spread, 0.1, 0), (spread, 10.0, 0), (last, 1.0, 0), (none, 1.0, 0), (spread, 1.0, 4)]
        return [
            (
                ((scale * torch.randn(int(each.sum()) + more, width, dtype=torch.float64)).requires_grad_(), each),
                more > 0,
            )
            for each, scale, more in every
        ]

    return computes(module, inputs, expected, sizes, names)


def _small_sizes(experts: int, features: int, hidden: int) -> dict[int, int]:
    """Returns small sizes with the same equalities among them, and with the number of experts, which stays."""
    half = experts % 2 == 0 and 2 * hidden == experts
    few = experts if hidden == experts else experts // 2 if half else 3
    same = {experts: experts, hidden: few, 2 * hidden: 2 * few}
    width = same.get(features) or next(each for each in (5, 7, 11, 13) if each not in same.values())
    return {hidden: few, 2 * hidden: 2 * few, features: width}
