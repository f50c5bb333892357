"""Comparison of the models on the ranks of a ring, in all properties that decide hops, shapes and results."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rtp_ext._native import RotationError
from rtp_ext.convert.containers import leaves_of
from rtp_ext.convert.modules.bundled import BundledMLP
from rtp_ext.nn import RotatedEmbedding
from rtp_ext.parameters.sharded_module import ShardedModule
from rtp_ext.parameters.sharding import frozen_of, held, over_ranks
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.autograd import FROZEN, computes_plainly
from rtp_ext.ring.links.agree import differing, expect_same
from rtp_ext.ring.routes.route_planner import LayerSize, TableSize

logger = logging.getLogger("rtp_ext")

_TORCH = "torch.nn.modules."
# Parts of an `extra_repr` that may differ from rank to rank: places and addresses.
_PER_RANK = re.compile(
    r"\b(\w+_)?rank(_id)?\b|\b(device|gpu|host|hostname|pid|port|path|dir)\w*\b|cuda:\d|\b0x[0-9a-f]+", re.I
)


class ConversionError(RotationError, ValueError):  # type: ignore[misc, valid-type]
    """A model that cannot be converted, or called, in its present state: a RuntimeError, as fully_shard raises, and a
    ValueError."""


Named = Iterable[tuple[str, nn.Parameter]]


def walk(root: nn.Module) -> tuple[list[nn.Module], list[tuple[str, nn.Parameter]]]:
    """Returns what `modules()` and `named_parameters()` of a model yield, which take ten times as long."""
    modules: list[nn.Module] = []
    named: list[tuple[str, nn.Parameter]] = []
    known: set[int] = set()
    left: list[tuple[str, nn.Module]] = [("", root)]
    while left:
        prefix, module = left.pop()
        if id(module) in known:
            continue
        known.add(id(module))
        modules.append(module)
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in known:
                known.add(id(parameter))
                named.append((prefix + key, parameter))
        for key, child in reversed([*module._modules.items()]):
            if child is not None:
                left.append((f"{prefix}{key}.", child))
    return modules, named


@dataclass(frozen=True)
class Mode:
    """The state besides the model that decides the hops of a forward."""

    autocast: torch.dtype | None  # None: not enabled

    @classmethod
    def now(cls, ring: Ring) -> Mode:
        kind = ring.device.type
        return cls(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)


def want_gradients(arguments: Any) -> bool | None:
    """Returns whether an input of a model requires a gradient; None where gradients are disabled."""
    if not torch.is_grad_enabled():
        return None
    args, keywords = arguments
    leaves = [*args, *keywords.values()]
    if not all([isinstance(value, (torch.Tensor, NoneType)) for value in leaves]):
        leaves = leaves_of(arguments)
    return any([isinstance(value, torch.Tensor) and value.requires_grad for value in leaves])


def facts_of(modules: Iterable[nn.Module], named: Named) -> tuple[list[tuple], list[Any]]:
    """Returns the properties of a model that may change between two forwards and decide their hops: those of its
    parameters, and how its modules rotate. Cheap: called in every forward."""
    return _parameters(named), _policies(modules)


def agree_on_model(
    root: nn.Module, ring: Ring, mode: Mode, *, allow_meta: bool = False, settings: Sequence[tuple[str, str]] = ()
) -> None:
    """Compares the models of all ranks. Raises ValueError on every rank where they differ, or, a RotationError as well,
    where parameters are still on the meta device, unless `allow_meta`.

    The ranks compare names, shapes, dtypes and requires_grad of parameters; the class name of every module; settings of
    torch's layers (the arguments of their constructors: strides, heads, eps, p, ...); the `extra_repr` of other
    classes, except ranks, devices and the like; names, shapes and dtypes of buffers that are saved (others are caches,
    which may grow with a rank's own batch); which blocks rotate as bundles, in which dtypes; and the
    state of torch.autocast; and `settings`, (name, value) in words. Operations of the model's modules then need no
    comparison before their forwards. Collective.
    """
    modes = [("torch.autocast", str(mode.autocast)), ("offload_policy", repr(ring.offload_policy))]
    modes.append(("in_place", repr(ring.in_place)))
    mine = (_parameters(root.named_parameters()), [*modes, *settings, *_modules(root)])
    answers = differing(ring, mine)
    every = answers or [mine]
    for rank, (parameters, _) in enumerate(every):
        on_meta = [] if allow_meta else [entry[0] for entry in parameters if entry[4]]
        _refuse_meta(root, on_meta, f" on rank {rank}" if answers else "")
    for part in range(2):
        for rank, theirs in enumerate(every):
            if theirs[part] != every[0][part]:
                difference = (_parameters_differ, _modules_differ)[part](every[0][part], theirs[part], rank)
                raise ValueError(f"{type(root).__name__}: {difference}")
    for prepared in _operations(root):
        prepared.covered = True


def _operations(root: nn.Module) -> Iterator[Prepared]:
    """Yields the Prepared of each operation of a model's modules, in the order of the modules."""
    known: set[int] = set()
    for module in root.modules():
        together = module.__dict__.get("together") if isinstance(module, ShardedModule) else None
        for prepared in (module.__dict__.get("_prepared"), together and together.prepared):
            if isinstance(prepared, Prepared) and id(prepared) not in known:
                known.add(id(prepared))
                yield prepared


def plan_anew(root: nn.Module, ring: Ring) -> None:
    """Has the route planner decide anew on every layer of a model, by the layer's largest number of tokens on any rank.
    Does nothing where there is no choice. Raises ValueError on every rank where ranks have called different layers.
    Collective."""
    gate = ring.gate
    tables = (each.weight.numel() for each in root.modules() if isinstance(each, RotatedEmbedding))
    kinds = (LayerSize, TableSize) if gate.models else (TableSize,)
    if not gate.models and not any(map(gate.may_pay, tables)):
        return
    layers = []
    for prepared in _operations(root):
        planned = [ready for ready in prepared.found.values() if isinstance(ready.size, kinds)]
        if planned:
            layers.append((prepared, planned))
    answers = ring.exchange([(planned[0].name, prepared.seen) for prepared, planned in layers])
    names = [[name for name, _ in theirs] for theirs in answers]
    expect_same(f"{type(root).__name__}: the ranks have called different layers", names, show=", ".join)
    for place, (prepared, planned) in enumerate(layers):
        prepared.most = max(theirs[place][1] for theirs in answers)
        for ready in planned:
            ready.plan(ring, prepared.most)


def _refuse_meta(root: nn.Module, names: list[str], where: str) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ConversionError(
            f"{type(root).__name__}: expected parameters with storage, got {', '.join(names[:5])}{more} still on the "
            f"meta device{where}: call to_empty(device=...) first, and then init_weights, load_safetensors or "
            "load_state_dict; or load_state_dict(..., assign=True) alone"
        )


# -- parameters ------------------------------------------------------------------------------------------------------


def _parameters(named: Named) -> list[tuple]:
    found = []
    for name, p in named:
        part = type(p._local_tensor) if isinstance(p, DTensor) else type(p)
        plain = (part is torch.Tensor or part is nn.Parameter) and FROZEN not in p.__dict__
        found.append((name, tuple(p.shape), p.dtype, p.requires_grad, p.is_meta, None if plain else _kind(p)))
    return found


def _kind(parameter: nn.Parameter) -> str | None:
    """Returns the description of a weight in blocks, or the class of this rank's part of a parameter if it overrides
    torch's functions."""
    frozen = frozen_of(parameter)
    if frozen is not None:
        return f"in blocks of {frozen.format} for {frozen.dtype} {list(frozen.shape)}"
    kind = type(held(parameter))
    return None if computes_plainly(kind) else f"{kind.__module__}.{kind.__qualname__}"


def _parameters_differ(expected: list[tuple], actual: list[tuple], rank: int) -> str:
    for left, right in zip(expected, actual, strict=False):
        if left != right:
            return (
                f"the model differs between ranks: expected {_entry(left)} (rank 0), got {_entry(right)} on rank {rank}"
            )
    longer, where = (expected, 0) if len(expected) > len(actual) else (actual, rank)
    extra = longer[min(len(expected), len(actual))]
    return (
        f"ranks have different models: expected {len(expected)} parameters (rank 0), got {len(actual)} on rank "
        f"{rank}; {_entry(extra)} is on rank {where} only"
    )


def _entry(entry: tuple) -> str:
    name, shape, dtype, requires_grad, _, kind = entry
    return f"{name} {list(shape)} {dtype}{'' if requires_grad else ' frozen'}{'' if kind is None else f' {kind}'}"


# -- modules ---------------------------------------------------------------------------------------------------------


def _modules(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the compared properties of each module, as (name, value) in words."""
    for name, module in root.named_modules():
        label = name or "the root"
        yield f"class of {label}", type(module).__qualname__  # its file may be __main__ on one rank only
        for key, value in _settings(module):
            yield f"{key} of {label}", value
        described = _described(module)
        if described:
            yield f"settings of {label}", described
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"buffer {key} of {label}", _shape_of(buffer)
        if isinstance(module, ShardedModule):
            yield f"mp_policy of {label}", repr(*_policies([module]))
            together = module.__dict__.get("together")
            if together is not None:
                yield f"one rotation of {label} with its neighbours", repr(together.shared)
        if isinstance(module, BundledMLP):
            intact = module.intact
            yield f"bundle of {label}", f"{intact}, recompute={module.mlp_recompute}" if intact else "False"


def _policies(modules: Iterable[nn.Module | ShardedModule]) -> list[MixedPrecisionPolicy | None]:
    """Returns for each rotated module the policy of its shards."""
    found = []
    for module in modules:
        if isinstance(module, ShardedModule):
            scope = module.__dict__.get("_rtp_scope", module)  # gathered modules have a scope
            found.append(scope.__dict__.get("mp_policy"))
    return found


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the settings of a layer of torch, or of a subclass, that are plain values or functions."""
    base = next((cls for cls in type(module).__mro__ if cls.__module__.startswith(_TORCH)), nn.Module)
    for key in _setting_names(base):
        value = module.__dict__.get(key, inspect.Parameter.empty)
        if _is_plain(value):
            yield key, repr(value)
        elif inspect.isroutine(value):  # an activation
            yield key, value.__name__


@functools.cache
def _setting_names(base: type[nn.Module]) -> list[str]:
    if base is nn.Module:
        return []
    arguments = inspect.signature(base.__init__).parameters
    return sorted({*arguments, *getattr(base, "__constants__", ())} - {"self", "device", "dtype"})


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _described(module: nn.Module) -> str | None:
    """Returns the `extra_repr` of a module that is not torch's own, without parts that may differ from rank to rank.

    Calls it on a copy without values, since some modules print those of parameters and buffers. Returns None for a
    class with __del__, which would run on the copy and could free resources of the module.
    """
    defining = next(cls for cls in type(module).__mro__ if "extra_repr" in vars(cls))
    if defining.__module__.startswith(_TORCH) or hasattr(type(module), "__del__"):
        return None
    try:
        twin: Any = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        for table in ("_parameters", "_buffers"):
            twin.__dict__[table] = {key: _without_values(value) for key, value in module.__dict__[table].items()}
        text = twin.extra_repr()
    except Exception:  # any error of user code; it occurs on every rank
        return None
    return ", ".join(part.strip() for part in re.split(r"[,\n]", str(text)) if not _PER_RANK.search(part))


def _without_values(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or nn.parameter.is_lazy(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _shape_of(buffer: torch.Tensor) -> str:
    return "not made yet" if nn.parameter.is_lazy(buffer) else f"{list(buffer.shape)} {buffer.dtype}"


def _modules_differ(expected: list[tuple[str, str]], actual: list[tuple[str, str]], rank: int) -> str:
    ours, theirs = dict(expected), dict(actual)
    for what in [*ours, *theirs]:
        left, right = ours.get(what, "nothing"), theirs.get(what, "nothing")
        if left != right:
            return f"the model differs between ranks: {what}: expected {left} (rank 0), got {right} on rank {rank}"
    return f"the model differs between ranks: rank {rank} has its modules in another order than rank 0"


# -- initial values --------------------------------------------------------------------------------------------------

_SAMPLES = 8  # along each dimension


def checksums(module: nn.Module, ignored: Collection[str], ring: Ring) -> dict[str, tuple[str, int]]:
    """Returns shape and dtype of this rank's part of each parameter that has values and is not on the ring yet, and a
    checksum of a few bytes of it. `ignored`: names to leave out. Experts that other code has divided have the names of
    their part."""
    if ring.size == 1 or ring.mesh is None:
        return {}
    sums, kinds = {}, {}
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        if isinstance(parameter, DTensor) and parameter.device_mesh != ring.tensor_mesh:
            if not over_ranks(parameter, ring.expert_ranks):
                continue
            name += f" (of expert rank {0 if ring.experts is None else ring.experts.rank})"
        data = held(parameter).data
        if type(data) is not torch.Tensor or data.is_meta or data.layout != torch.strided:
            continue
        kinds[name] = f"{list(data.shape)} {data.dtype}"
        sample = data[tuple(slice(None, None, -(-extent // _SAMPLES) or 1) for extent in data.shape)]
        values = sample.reshape(-1).contiguous().view(torch.uint8).long()
        sums[name] = (values * torch.arange(1, values.numel() + 1, device=values.device)).sum()
    if not sums:
        return {}
    found = torch.stack([*sums.values()]).tolist()
    return {name: (kinds[name], value) for name, value in zip(sums, found, strict=True)}


def compare_weights(mine: dict[str, tuple[str, int]], ring: Ring) -> None:
    """Logs a warning on rank 0 where the ranks converted different weights of the same shapes and dtypes; others are an
    error of the first forward. `mine`: the checksums of this rank. Collective."""
    if ring.size == 1 or ring.mesh is None:
        return
    answers = ring.exchange(mine)
    if ring.rank:  # one warning for the ring
        return
    firsts: dict[str, tuple[int, tuple[str, int]]] = {}
    for rank, theirs in enumerate(answers):
        for name, value in theirs.items():
            first, other = firsts.setdefault(name, (rank, value))
            if other[0] == value[0] and other != value:
                logger.warning(
                    "fully_rotate: the values of %s on rank %d are not those on rank %d: the ranks were built with "
                    "different seeds or weights, and the model now consists of shards of both. Use the same seed on "
                    "every rank, or load a checkpoint",
                    name,
                    rank,
                    first,
                )
                return
