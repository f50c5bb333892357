"""What every rotated module shares."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from rtp_ext.ring import Ring
from rtp_ext.sharding import init_weights, placed_as, shallow_copy, shard_parameter


class Tie:
    """The modules of one model that share a parameter, and its name in each."""

    def __init__(self) -> None:
        self.owners: list[tuple[weakref.ref[Any], str]] = []

    def __deepcopy__(self, memo: dict) -> Tie:
        memo[id(self)] = twin = Tie()  # copies of modules join it themselves
        return twin

    def replace(self, old: Any, new: Any) -> None:
        """Gives `new` to all who have `old`; those that were untied on purpose keep what they have."""
        for reference, name in self.owners:
            owner = reference()
            if owner is not None and owner._parameters.get(name) is old:
                setattr(owner, name, new)


class LiveModule:
    """A module that holds a live ring: it can be deep-copied, but not pickled.

    `load_state_dict(assign=True)` puts new parameters in the place of the registered ones. Whole tensors are cut as
    those were, and modules that share a parameter go on to share it; where the state dict has several names of it, the
    last one counts, as in a load that copies.
    """

    _rtp_ties: Mapping[str, Tie] = MappingProxyType({})

    def join_tie(self, name: str, tie: Tie) -> None:
        """Shares the parameter `name` with the other modules of the tie for good."""
        tie.owners.append((weakref.ref(self), name))
        self.__dict__.setdefault("_rtp_ties", {})[name] = tie

    def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *arguments: Any) -> None:
        parameters: dict[str, Any] = self._parameters
        before = {name: (old, getattr(old, "_spec", None)) for name, old in parameters.items() if old is not None}
        super()._load_from_state_dict(state_dict, prefix, *arguments)  # type: ignore[misc]
        errors: list[str] = arguments[-1]
        for name, (old, spec) in before.items():
            if spec is not None and not isinstance(parameters[name], DTensor):
                setattr(self, name, placed_as(parameters[name], spec))
            new = parameters[name]
            if spec is not None and not _fits(new, spec):
                setattr(self, name, old)
                errors.append(
                    f"{prefix}{name}: expected a DTensor {spec.placements} over {spec.mesh} or a whole tensor, got a "
                    f"DTensor {new.placements} over {new.device_mesh}"
                )
            elif new is not old and name in self._rtp_ties:
                self._rtp_ties[name].replace(old, new)

    def __deepcopy__(self, memo: dict) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for name, tie in twin._rtp_ties.items():
            tie.owners.append((weakref.ref(twin), name))
        return twin

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: it holds a live ring. Save state_dict() or use "
            "torch.distributed.checkpoint, and convert a new model with fully_rotate"
        )


def _fits(tensor: DTensor, spec: DTensorSpec) -> bool:
    return tensor.placements == spec.placements and torch.equal(tensor.device_mesh.mesh, spec.mesh.mesh)


_MIXED: dict[tuple[type, type], type] = {}


def _calling(mixin: Any) -> Callable[..., Any]:
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return mixin.forward(self, *arguments, **keywords)

    return forward


def mixed_class(mixin: type, base: type[nn.Module]) -> Any:
    """The class of a module of class `base` that became one of `mixin`; isinstance with `base` still holds."""
    if (mixin, base) not in _MIXED:
        members: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
        if "forward" in mixin.__dict__ and base.forward is not nn.Module.forward:
            # code that looks at the arguments of a forward finds the module's own
            members["forward"] = functools.wraps(base.forward)(_calling(mixin))
        members[_MADE_OF] = mixin
        prefix = getattr(mixin, "NAME_PREFIX", "Rotated")
        _MIXED[mixin, base] = type(f"{prefix}{base.__name__}", (mixin, base), members)
    return _MIXED[mixin, base]


_MADE_OF = "_rtp_made_of"  # attribute of a mixed class: its mixin


def mixin_of(module: Any) -> type:
    """The mixin of a module whose class `mixed_class` made; the class of any other object."""
    return type(module).__dict__.get(_MADE_OF, type(module))


# What the forward of a layer of torch is made of, besides its parameters and settings.
_CALLS = {
    "forward",
    "__call__",
    "_call_impl",
    "_wrapped_call_impl",
    "__getattr__",
    "__getattribute__",
    "_conv_forward",
    "merge_masks",
}


def computes_like(module: Any, base: Any) -> bool:
    """Whether a module is a `base`, a layer class of torch, or of a subclass that computes as `base` does.

    A subclass may initialise, print and load in its own way, and hold more; it may redefine nothing that the forward of
    `base` looks at.
    """
    cls = type(module)
    if cls is base:
        return True
    # nn.MultiheadAttention reads the weights of its out_proj itself, which has a class of its own
    if not issubclass(cls, base) or issubclass(cls, (LiveModule, NonDynamicallyQuantizableLinear)):
        return False
    if "forward" in module.__dict__ or is_parametrized(module):
        return False
    settings = {*base.__constants__, *inspect.signature(base.__init__).parameters} - {"device", "dtype"}
    between = cls.__mro__[: cls.__mro__.index(base)]
    return not any((_CALLS | settings | {"weight"}) & vars(each).keys() for each in between)


class RotatedModule(LiveModule):
    """Mixin of rotated modules; the class of the torch module that it replaces comes second.

    Attributes:
        ring: the Ring that the parameters are sharded over.
        in_place: whether the home shards themselves travel.
        qualified_name: the module's name within its model, for messages.
    """

    ring: Ring
    in_place: bool
    qualified_name: str
    mp_policy: MixedPrecisionPolicy

    # The dimension that each parameter is cut along.
    shard_dims: dict[str, int]

    def _adopt(
        self,
        ring: Ring,
        shard_dims: dict[str, int],
        *,
        in_place: bool = False,
        name: str | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        memo: dict[int, nn.Parameter] | None = None,
    ) -> None:
        """Shards the module's whole parameters. `memo` maps parameters that were sharded before (tied weights)."""
        assert isinstance(self, nn.Module)
        self.ring = ring
        self.in_place = in_place
        self.qualified_name = name or type(self).__name__
        self.mp_policy = mp_policy or MixedPrecisionPolicy()
        self.shard_dims = shard_dims
        memo = {} if memo is None else memo
        for key, parameter in self._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in memo:
                memo[id(parameter)] = shard_parameter(parameter, ring, shard_dims[key])
            self._parameters[key] = memo[id(parameter)]

    @classmethod
    def _from(cls, module: nn.Module, base: type[nn.Module]) -> Any:
        """A module of this class with the parameters and buffers of `module`, which is left as it is."""
        if not computes_like(module, base):
            raise TypeError(f"{cls.__name__}.from_module: expected a {base.__name__}, got a {type(module).__name__}")
        twin: Any = shallow_copy(module)
        twin.__class__ = cls if type(module) is base else mixed_class(cls, type(module))
        return twin

    def _rotation(self) -> dict[str, Any]:
        """The keyword arguments of the functional form."""
        return {
            "ring": self.ring,
            "in_place": self.in_place,
            "compute_dtype": self.mp_policy.param_dtype,
            "reduce_dtype": self.mp_policy.reduce_dtype,
            "name": self.qualified_name,
        }

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        """An input in the dtype that the policy computes in, as fully_shard casts the inputs of its modules."""
        policy = self.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs or not isinstance(x, torch.Tensor):
            return x
        return x.to(policy.param_dtype) if x.is_floating_point() else x

    def reset_parameters(self) -> None:
        """The initialisation of the module that this one replaces: the same values under the same seed. Collective."""
        assert isinstance(self, nn.Module)
        if not hasattr(self, "ring"):  # while the plain module is being constructed
            super().reset_parameters()  # type: ignore[misc]
            return
        plain: Any = super(LiveModule, type(self))
        with torch.no_grad():  # a subclass may have modules of its own, which are not this method's to call
            init_weights(self, lambda module: plain.reset_parameters(module) if module is self else None)
