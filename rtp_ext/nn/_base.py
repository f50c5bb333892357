"""Base class of rotated modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from rtp_ext.families.same_forward import has_same_forward
from rtp_ext.functional._operation import Options
from rtp_ext.functional.torch_compile import library as _library  # noqa: F401  registers operators
from rtp_ext.parameters import bitsandbytes, torchao
from rtp_ext.parameters.frozen import FrozenWeight, freeze, keep
from rtp_ext.parameters.initial import draw_as_whole
from rtp_ext.parameters.sharded_module import ShardedModule, mixed_class
from rtp_ext.parameters.sharding import init_weights, shallow_copy, shard_parameter
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.registry import register


class RotatedModule(ShardedModule):
    """Mixin of rotated modules; the class of the torch module that it replaces comes second.

    Attributes:
        ring: the Ring that the parameters are sharded over.
        qualified_name: the module's name within its model, for messages.
    """

    ring: Ring
    qualified_name: str
    mp_policy: MixedPrecisionPolicy
    _prepared: Prepared  # plans of its operation
    _rtp_number: torch.Tensor  # key in the registry, for compiled graphs

    shard_dims: dict[str, int]  # by parameter name: the dimension that is cut

    def _adopt(
        self,
        ring: Ring,
        shard_dims: dict[str, int],
        *,
        name: str | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        memo: dict[int, nn.Parameter] | None = None,
        frozen: Mapping[str, FrozenWeight] | None = None,
    ) -> None:
        """Shards the module's whole parameters. `memo` maps ids of whole parameters to shards (for tied weights).
        `frozen`: by name, the weights that are stored in blocks; one that is in blocks already, of another package,
        keeps its bits."""
        assert isinstance(self, nn.Module)
        draw_as_whole()
        self.ring = ring
        self.qualified_name = name or type(self).__name__
        self.mp_policy = mp_policy or MixedPrecisionPolicy()
        self.shard_dims = shard_dims
        self._prepared = Prepared(sharded=True)
        self._rtp_number = register(self)
        memo = {} if memo is None else memo
        for key, parameter in self._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in memo:
                weight = None if frozen is None else frozen.get(key)
                memo[id(parameter)] = (
                    shard_parameter(parameter, ring, shard_dims[key])
                    if weight is None
                    else _in_blocks(parameter, ring, weight)
                )
            self._parameters[key] = memo[id(parameter)]

    @classmethod
    def _from(cls, module: nn.Module, base: type[nn.Module]) -> Any:
        """Returns a module of this class with the parameters and buffers of `module`, which does not change."""
        if not has_same_forward(module, base):
            raise TypeError(f"{cls.__name__}.from_module: expected a {base.__name__}, got a {type(module).__name__}")
        twin: Any = shallow_copy(module)
        twin.__class__ = cls if type(module) is base else mixed_class(cls, type(module))
        return twin

    def _options(self, name: str | None = None, prepared: Prepared | None = None) -> Options:
        """Returns the options of the module's operation, or of that of a bundle with its own name and plans."""
        policy = self.mp_policy
        return Options(
            self.ring,
            prepared or self._prepared,
            policy.param_dtype,
            policy.reduce_dtype,
            name or self.qualified_name,
        )

    def _rotation(self) -> dict[str, Any]:
        """Returns the keyword arguments of the functional form."""
        return self._options()._asdict()

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        """Returns an input in the policy's compute dtype, as fully_shard casts the inputs of its modules."""
        policy = self.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs or not isinstance(x, torch.Tensor):
            return x
        return x.to(policy.param_dtype) if x.is_floating_point() else x

    def reset_parameters(self) -> None:
        """Initialises like the replaced module, with the same values under the same seed. Collective."""
        assert isinstance(self, nn.Module)
        if not hasattr(self, "ring"):  # while the plain module is being constructed
            super().reset_parameters()  # type: ignore[misc]
            return
        plain: Any = super(ShardedModule, type(self))
        with torch.no_grad():  # only this module: a subclass may have child modules
            init_weights(self, lambda module: plain.reset_parameters(module) if module is self else None)


def _in_blocks(parameter: nn.Parameter, ring: Ring, weight: FrozenWeight) -> nn.Parameter:
    """Returns the sharded parameter of a weight that is stored in blocks."""
    for package in (bitsandbytes, torchao):
        if package.weight_of(parameter) is not None:
            return keep(weight, package.blocks_of(parameter, weight), ring)
    return freeze(parameter, ring, weight)
