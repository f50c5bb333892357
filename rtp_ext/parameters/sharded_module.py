"""Modules that hold parameters of a live ring: copying, loading, tied parameters, and their classes."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from rtp_ext.parameters.sharding import frozen_of, placed_as
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import FROZEN, GRADIENT_HANDLER, OFFLOADED
from rtp_ext.ring.registry import register


def end_left_forwards(module: nn.Module) -> None:
    """Ends the forward that KeyboardInterrupt may have left in this thread, before new values are loaded into a module:
    other ranks of the host would copy old shards from the slots of this one. Does nothing to a model that trains."""
    found = (part.__dict__.get("ring") for part in module.modules())
    for ring in {each for each in found if isinstance(each, Ring)}:
        ring.agreement.end_left_forward()


class Tie:
    """The modules of one model that share a parameter, and its name in each."""

    def __init__(self) -> None:
        self.owners: list[tuple[weakref.ref[Any], str]] = []

    def __deepcopy__(self, memo: dict) -> Tie:
        memo[id(self)] = twin = Tie()  # ShardedModule.__deepcopy__ adds the copied modules
        return twin

    def replace(self, old: Any, new: Any) -> None:
        """Replaces `old` by `new` in all modules that hold it; modules that no longer hold `old` do not change."""
        for reference, name in self.owners:
            owner = reference()
            if owner is not None and owner._parameters.get(name) is old:
                setattr(owner, name, new)


class ShardedModule:
    """A module that holds a live ring: it can be deep-copied, but not pickled.

    `load_state_dict` accepts shards, and whole tensors, which it cuts like the parameters. With `assign=True` it
    replaces the registered parameters. Tied parameters stay tied; if the state dict has several of their names, the
    last one counts, as in a load that copies. The marks of parameters (GRADIENT_HANDLER, OFFLOADED, FROZEN) survive
    this, and also `to`, `double` and similar methods, which replace the tensors. A whole floating-point tensor becomes
    the blocks of a frozen weight.
    """

    _rtp_ties: Mapping[str, Tie] = MappingProxyType({})

    def join_tie(self, name: str, tie: Tie) -> None:
        """Adds the parameter `name` to a tie, so that later replacements apply to all its modules."""
        tie.owners.append((weakref.ref(self), name))
        self.__dict__.setdefault("_rtp_ties", {})[name] = tie

    def _apply(self: Any, *arguments: Any, **keywords: Any) -> Any:
        marks = {name: _marks(parameter) for name, parameter in self._parameters.items()}
        function = arguments[0] if arguments else keywords["fn"]
        result = super()._apply(*arguments, **keywords)  # type: ignore[misc]
        for name, known in marks.items():
            if FROZEN in known:  # bytes stay; `to` changes the dtype of the weight that they stand for
                known[FROZEN] = known[FROZEN].converted_by(function)
            if known:
                self._parameters[name].__dict__.update(known)
        return result

    @torch.inference_mode(False)
    @torch.no_grad()
    def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *arguments: Any) -> None:
        end_left_forwards(self)  # and in inference mode new parameters would be tensors without a version
        parameters: dict[str, Any] = self._parameters
        before = {
            name: (old, getattr(old, "_spec", None), _marks(old)) for name, old in parameters.items() if old is not None
        }
        assign = arguments[0].get("assign_to_params_buffers", False)
        for name, (old, spec, _) in before.items():
            given = state_dict.get(prefix + name)
            frozen = frozen_of(old)
            if frozen is not None and isinstance(given, DTensor) and given.shape == frozen.shape:
                given = given.full_tensor()  # cut by set_model_state_dict with full_state_dict=True
            if frozen is not None and spec is not None and _is_plain(given, frozen.shape):
                try:
                    given = frozen.encode(given.detach().to(old.device), frozen.packed_shape[frozen.dim])
                except ValueError as error:
                    raise ValueError(f"load_state_dict: {prefix}{name}: {error}") from error
                state_dict[prefix + name] = placed_as(given, spec)
            elif spec is None or not _is_whole(given) or given.shape != old.shape:
                continue
            elif not assign or given.is_inference():
                state_dict[prefix + name] = placed_as(given, spec)
        super()._load_from_state_dict(state_dict, prefix, *arguments)  # type: ignore[misc]
        errors: list[str] = arguments[-1]
        replaced: dict[int, str] = {}  # by id of the old parameter: the last of its names here
        for name, (old, spec, marks) in before.items():
            if spec is not None and not isinstance(parameters[name], DTensor):
                setattr(self, name, placed_as(parameters[name], spec))
            new = parameters[name]
            if spec is not None and not _fits(new, spec):
                setattr(self, name, old)
                errors.append(
                    f"{prefix}{name}: expected a DTensor {spec.placements} over {spec.mesh} or a whole tensor, got a "
                    f"DTensor {new.placements} over {new.device_mesh}"
                )
                continue
            new.__dict__.update(marks)
            if new is not old and name in self._rtp_ties:
                self._rtp_ties[name].replace(old, new)
                if id(old) in replaced:  # another parameter of this module, which has been loaded as well
                    self._rtp_ties[name].replace(parameters[replaced[id(old)]], new)
                replaced[id(old)] = name

    def __deepcopy__(self, memo: dict) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for name, tie in twin._rtp_ties.items():
            tie.owners.append((weakref.ref(twin), name))
        if "_rtp_number" in twin.__dict__:  # a copy needs a separate number
            twin.__dict__["_rtp_number"] = register(twin)
        return twin

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: it holds a live ring. On every rank call "
            "torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=...), or get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), whose result one rank saves by torch.save; load either "
            "into a new model that fully_rotate has converted"
        )


def _marks(parameter: Any) -> dict[str, Any]:
    """Returns the attributes by which an outer policy and offloading identify a sharded parameter, and the description
    of a frozen weight in blocks."""
    known = parameter.__dict__ if isinstance(parameter, DTensor) else {}
    return {mark: known[mark] for mark in (GRADIENT_HANDLER, OFFLOADED, FROZEN) if mark in known}


def _is_whole(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and not isinstance(given, DTensor)


def _is_plain(given: Any, shape: tuple[int, ...]) -> bool:
    return _is_whole(given) and given.shape == shape and given.is_floating_point()


def _fits(tensor: DTensor, spec: DTensorSpec) -> bool:
    return tensor.placements == spec.placements and torch.equal(tensor.device_mesh.mesh, spec.mesh.mesh)


_MIXED: dict[tuple[type, type], type] = {}


def _calling(mixin: Any) -> Callable[..., Any]:
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return mixin.forward(self, *arguments, **keywords)

    return forward


def mixed_class(mixin: type, base: type[nn.Module]) -> Any:
    """Returns the class, a subclass of `mixin` and `base`, of a converted module of class `base`."""
    if (mixin, base) not in _MIXED:
        members: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
        if "forward" in mixin.__dict__ and base.forward is not nn.Module.forward:
            # keeps the signature of base.forward for code that inspects it
            members["forward"] = functools.wraps(base.forward)(_calling(mixin))
        members[_MADE_OF] = mixin
        prefix = getattr(mixin, "NAME_PREFIX", "Rotated")
        _MIXED[mixin, base] = type(f"{prefix}{base.__name__}", (mixin, base), members)
    return _MIXED[mixin, base]


def class_above(mixin: Any, base: type[nn.Module]) -> Any:
    """Returns the class of a converted module of class `base`, whose own forward runs, and gets that of `mixin` as the
    forward of its base class."""
    if (mixin, base) not in _MIXED:

        @functools.wraps(base.forward)
        def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
            self._rtp_within = True
            try:
                return base.forward(self, *arguments, **keywords)
            finally:
                self._rtp_within = False

        members: dict[str, Any] = {
            "__module__": base.__module__,
            "__doc__": base.__doc__,
            "_rtp_within": False,
            "forward": forward,
        }
        members |= {_MADE_OF: mixin, _ABOVE: base}
        _MIXED[mixin, base] = type(f"Rotated{base.__name__}", (base, mixin), members)
    return _MIXED[mixin, base]


_EXTENDED: dict[type, Any] = {}


def extended_class(base: type[nn.Module], members: Mapping[str, Any]) -> Any:
    """Returns a subclass of `base` with `members` and the name of `base`, cached by `base`: members must be the same
    in every call. Its instances copy as those of `base`, and cannot be pickled."""
    if base not in _EXTENDED:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        stock = (base.__reduce_ex__, base.__reduce__) == (object.__reduce_ex__, object.__reduce__)
        copying = {"__copy__": _shallow, "__deepcopy__": _copied, "__reduce_ex__": ShardedModule.__reduce_ex__}
        own = {name: each for name, each in copying.items() if name != "__copy__" or not hasattr(base, name)}
        own = own if stock and not hasattr(base, "__deepcopy__") else {}
        _EXTENDED[base] = type(base.__name__, (base,), {**names, **own, **members, _MADE_OF: _made_of(base)})
    return _EXTENDED[base]


def _empty_twin(module: Any) -> tuple[Any, Any]:
    """Returns a new object of a module's class, without state, and the module's state."""
    reduced: Any = object.__reduce_ex__(module, 4)
    make, arguments, state, *_ = reduced
    return make(*arguments), state


def _shallow(self: Any) -> Any:
    twin, state = _empty_twin(self)
    twin.__setstate__(state)
    return twin


def _copied(self: Any, memo: dict) -> Any:
    twin, state = _empty_twin(self)
    memo[id(self)] = twin
    twin.__setstate__(copy.deepcopy(state, memo))
    return twin


_MADE_OF = "_rtp_made_of"  # attribute of a mixed class: its mixin
_ABOVE = "_rtp_above"  # attribute of a class that `class_above` made: the class that it was made of


def mixin_of(module: Any) -> type:
    """Returns the mixin of a module whose class `mixed_class` made; the class of any other object."""
    return _made_of(type(module))


def _made_of(cls: type) -> type:
    return cls.__dict__.get(_MADE_OF, cls)


def plain_class(module: nn.Module) -> type:
    """The class that a module had before it was converted."""
    cls = type(module)
    while issubclass(cls, ShardedModule):
        cls = cls.__dict__.get(_ABOVE) or cls.__bases__[-1]
    return cls
