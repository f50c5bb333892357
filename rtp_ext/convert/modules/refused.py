"""Parameters that cannot be converted, and what cannot be added to a model that has been."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from rtp_ext.convert.modules.gathered import GatheredModule
from rtp_ext.outer import AllReduce, OuterPolicy
from rtp_ext.parameters.extensions import is_extended, refusal
from rtp_ext.parameters.live import LiveModule
from rtp_ext.parameters.wrappers import type_name
from rtp_ext.ring import Ring
from rtp_ext.ring.patches.dtensor import rotates

_EXPECTED = (
    "expected a plain parameter, or one whose class has fsdp_pre_all_gather and fsdp_post_all_gather, which say how "
    "its shards travel; or pass it in ignored_params"
)


def find_extended(
    modules: Iterable[tuple[str, nn.Module]], ignored: Collection[int], ring: Ring, policy: OuterPolicy | None
) -> set[int]:
    """Ids of the parameters that are gathered through extensions of their class. `ignored`: ids of parameters.

    Raises ValueError for tensor subclasses that can be neither sharded nor gathered, and where what is gathered through
    extensions cannot be combined with the rest.
    """
    found: set[int] = set()
    for name, part in modules:
        if isinstance(part, LiveModule):
            continue
        for key, parameter in part._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            label = f"fully_rotate: {name + '.' if name else ''}{key} of a {type(part).__name__}"
            problem = refusal(parameter)
            if problem is not None:
                raise ValueError(f"{label} is {problem}: {_EXPECTED}")
            if is_extended(parameter):
                other = _cannot_be_combined(ring, policy)
                if other is not None:
                    raise ValueError(
                        f"{label} is a {type_name(parameter)}, gathered through the extensions of its class, which "
                        f"cannot be combined with {other}: expected a plain parameter, or pass it in ignored_params"
                    )
                found.add(id(parameter))
    return found


def _cannot_be_combined(ring: Ring, policy: OuterPolicy | None) -> str | None:
    if ring.mesh is None:
        return None  # on an emulated ring they stay whole
    if ring.tensor_mesh is not None:
        return "tensor parallelism"
    if ring.host_memory is not None:
        return "offload_policy=CPUOffloadPolicy()"
    if policy is not None and type(policy) is not AllReduce:
        return f"{type(policy).__name__}: of the outer policies only outer.AllReduce() takes it"
    return None


# -- what is added to a converted model --------------------------------------------------------------------------------


def refuse_additions(root: nn.Module, ring: Ring, ignored: Collection[str]) -> None:
    """Raises ValueError, on every rank alike, where a converted model has been given what it cannot have: weights that
    are computed from others, and trained parameters that are tensor subclasses. `ignored`: names of parameters."""
    if ring.mesh is None:  # one process, in which all that is not rotated is left as it is
        return
    live: list[tuple[str, Any]] = [(name, part) for name, part in root.named_modules() if isinstance(part, LiveModule)]
    for name, part in live:
        for key in part.__dict__.get("_rtp_gathered", part.__dict__.get("shard_dims", ())):
            computed = isinstance(part.__dict__.get(key), torch.Tensor) or parametrize.is_parametrized(part, key)
            if computed and key not in part._parameters:
                raise ValueError(_too_late(f"{name + '.' if name else ''}{key} of a {type(part).__name__}"))
    for name, part, key, parameter in _own_parameters(root):
        gathered = isinstance(part, GatheredModule) and key in part._rtp_gathered and is_extended(parameter)
        if name in ignored or gathered or not parameter.requires_grad:
            continue
        problem = refusal(parameter)
        if problem is None and is_extended(parameter):
            problem = f"a {type_name(parameter)}"
        if problem is not None:
            raise ValueError(
                f"{name}, which was put into the model after fully_rotate, is {problem}: expected a plain parameter; "
                "tensor subclasses have to be there before conversion"
            )


def _own_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    for prefix, part in root.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{key}" if prefix else key, part, key, parameter


def _too_late(what: str) -> str:
    return (
        f"{what}: fully_rotate has made it shards, which cannot be computed from other parameters (parametrizations, "
        "weight_norm, spectral_norm, pruning): add these to the plain model, before fully_rotate"
    )


def _refuse_original(original: Any) -> None:
    for parameter in original if isinstance(original, (list, tuple)) else (original,):
        if rotates(parameter):
            raise ValueError(_too_late(f"a parameter of shape {tuple(parameter.shape)}"))


def _refuse_named(module: nn.Module, name: str) -> None:
    for key in (name, f"{name}_orig"):  # what was pruned before has the second one
        if rotates(module._parameters.get(key)):
            raise ValueError(_too_late(f"{name} of a {type(module).__name__}"))


def _refuse_several(parameters: Any) -> None:
    for module, name in parameters:
        _refuse_named(module, name)


_GUARDED = "_rtp_guarded"  # attribute of the functions below


def guard_parametrizations() -> None:
    """Has torch's ways to compute a weight from other parameters refuse shards when they are called, before anything is
    changed; where a way has another name, the next forward finds it."""
    old: dict[str, Any] = {name: sys.modules[f"torch.nn.utils.{name}"] for name in ("weight_norm", "spectral_norm")}
    _guard(parametrize.ParametrizationList, "__init__", _refuse_original, "original")
    _guard(getattr(parametrizations, "_SpectralNorm", None), "__init__", _refuse_original, "weight")
    _guard(prune.BasePruningMethod, "apply", _refuse_named, "module", "name")
    _guard(old["weight_norm"].WeightNorm, "apply", _refuse_named, "module", "name")
    _guard(old["spectral_norm"].SpectralNorm, "apply", _refuse_named, "module", "name")
    _guard(prune, "global_unstructured", _refuse_several, "parameters")


def _guard(owner: Any, name: str, refuse: Callable[..., None], *needed: str) -> None:
    """Has a function of `owner` call `refuse` with some of its arguments first."""
    kept = vars(owner).get(name) if owner is not None else None
    stock: Any = getattr(kept, "__func__", kept)
    if stock is None or hasattr(stock, _GUARDED):
        return
    signature = inspect.signature(stock)
    if not set(needed) <= signature.parameters.keys():
        return

    @functools.wraps(stock)
    def guarded(*arguments: Any, **keywords: Any) -> Any:
        try:
            given = signature.bind(*arguments, **keywords).arguments
        except TypeError:
            return stock(*arguments, **keywords)  # which says what is wrong
        refuse(*(given.get(each) for each in needed))
        return stock(*arguments, **keywords)

    setattr(guarded, _GUARDED, True)
    wrapper = type(kept) if isinstance(kept, (staticmethod, classmethod)) else None
    setattr(owner, name, guarded if wrapper is None else wrapper(guarded))
