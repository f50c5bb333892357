"""Adapters of the peft package around rotated layers: they merge into shards, or, in a model for forwards only, not."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from rtp_ext.dtensor_hooks import on_registration
from rtp_ext.nn._base import RotatedModule
from rtp_ext.parameters.sharded_module import mixed_class
from rtp_ext.parameters.sharding import frozen_of, local_shard
from rtp_ext.ring.mesh import own_bounds, own_part


class MergingAdapter:
    """Mixin of peft's layers; the layer's own class comes second.

    An adapter is whole and the same on every rank; its base weight is a shard, to which every rank adds its part of the
    adapter.
    """

    NAME_PREFIX = ""  # peft writes names of classes into its messages

    def merge(self, *arguments: Any, **keywords: Any) -> Any:
        self._refuse_blocks("merge")
        with torch.no_grad(), implicit_replication():
            return super().merge(*arguments, **keywords)  # type: ignore[misc]

    def unmerge(self, *arguments: Any, **keywords: Any) -> Any:
        self._refuse_blocks("unmerge")
        with torch.no_grad(), implicit_replication():
            return super().unmerge(*arguments, **keywords)  # type: ignore[misc]

    def get_delta_weight(self: Any, name: str, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Returns what an adapter adds to the whole weight. Outside of a forward it gathers factors of a ParamWrapper,
        whose experts torch could not take apart in shards."""
        factors = [table[name] for table in (self.lora_A, self.lora_B)] if hasattr(self, "parameter_name") else []
        gathered = [factor for factor in factors if isinstance(factor.weight, DTensor)]
        for factor in gathered:
            factor.__dict__["weight"] = factor.weight.full_tensor()
        try:
            return super().get_delta_weight(name, *arguments, **keywords)  # type: ignore[misc]
        finally:
            for factor in gathered:
                del factor.__dict__["weight"]

    @contextlib.contextmanager
    def _activate_lora(self: Any, active_adapters: Iterable[str]) -> Iterator[None]:
        """Adds a LoRA of a parameter (peft's ParamWrapper) to the whole parameter of a gathered module, or to this
        rank's shard, which then rotates with it: the stacked weights of experts never exist as a whole."""
        base, key = self.get_base_layer(), self.parameter_name
        adapters = [name for name in active_adapters or () if name in self.lora_A]
        parameter = base._parameters.get(key)
        if not adapters or not isinstance(parameter, DTensor):
            with super()._activate_lora(active_adapters):  # type: ignore[misc]
                yield
            return
        self._refuse_blocks("forward", key)
        together = base.__dict__.get("together")
        if together is not None:
            together.separate()  # its other layers compute with their own weights
        rotates = isinstance(base, RotatedModule)  # and looks for its parameters where they are registered
        if rotates:
            base._parameters[key] = _adapted_shard(self, base, parameter, adapters)
        else:
            base.__dict__[key] = _adapted(self, adapters)
        try:
            yield
        finally:
            if rotates:
                base._parameters[key] = parameter
            else:
                del base.__dict__[key]

    def _refuse_blocks(self: Any, what: str, key: str = "weight") -> None:
        frozen = frozen_of(getattr(self.get_base_layer(), key, None))
        if frozen is not None:
            raise ValueError(
                f"{what}: expected a base weight in a floating-point dtype, got blocks of {frozen.format}, whose "
                "codes cannot hold the sum: merge into the plain model, with the values of rtp_ext.frozen_weights"
            )


def _adapted(wrapper: Any, adapters: Sequence[str]) -> torch.Tensor:
    """Returns a whole parameter with the adapters of a ParamWrapper."""
    whole = wrapper.get_param()
    for name in adapters:
        whole = whole + wrapper.get_delta_weight(name)
    return whole


def _adapted_shard(wrapper: Any, base: RotatedModule, parameter: DTensor, adapters: Sequence[str]) -> DTensor:
    """Returns a sharded parameter with the adapters of a ParamWrapper, of which each rank adds its own part."""
    local, spec = local_shard(parameter), parameter._spec
    for name in adapters:
        if wrapper.num_experts > 1:
            left, right, scaling = wrapper.get_delta_factors(name)
            experts, rows, columns = own_bounds(parameter.shape, spec.mesh, spec.placements)
            left, right = left.narrow(0, *experts).narrow(1, *rows), right.narrow(0, *experts).narrow(2, *columns)
            part = scaling * (left @ right)
        else:
            whole = wrapper.get_delta_weight(name).view(parameter.shape)  # peft leaves out the dimension of one expert
            part = own_part(whole, spec.mesh, spec.placements)
        # The shard's gradient is the mean over the ranks, and no other rank has one of this part: the reduction of the
        # adapter's gradient, a mean as well, divides by their number once more.
        if part.requires_grad:
            part.register_hook(lambda gradient: gradient * base.ring.size)
        local = local + part
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class UnmergedAdapter:
    """Mixin of peft's layers in a model for forwards only: a merge would write to shards that other ranks read."""

    NAME_PREFIX = ""

    def merge(self, *arguments: Any, **keywords: Any) -> Any:
        self._refuse("merge")

    def unmerge(self, *arguments: Any, **keywords: Any) -> Any:
        self._refuse("unmerge")

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"{what} of {type(self).__name__}: expected a plain model, got one that rotate_for_inference has "
            "converted, whose shards other ranks may be reading: merge before, or update_weights from the merged model"
        )


def extend_adapters(root: nn.Module, mixin: type = MergingAdapter) -> None:
    """Changes the classes of a model's peft layers around sharded layers: `mixin` says how they merge."""
    for part in _tuners(root):
        _extend(part, part.get_base_layer(), mixin)


@functools.cache
def follow_adapters(is_converted: Callable[[nn.Module], bool], mixin: type = MergingAdapter) -> None:
    """Extends peft's layers, too, that are put around layers of converted models later: `mixin` says how they merge.
    `is_converted`: whether a layer is of such a model."""

    def extend(part: Any, name: str, layer: Any) -> None:
        tuners = sys.modules.get("peft.tuners.tuners_utils")
        if name != "base_layer" or tuners is None or not isinstance(part, tuners.BaseTunerLayer):
            return
        if is_converted(layer):
            _extend(part, layer, mixin)

    on_registration(extend)


def _extend(part: Any, layer: nn.Module, mixin: type) -> None:
    sharded = any(isinstance(parameter, DTensor) for parameter in layer._parameters.values())
    if sharded and not isinstance(part, mixin):
        part.__class__ = mixed_class(mixin, type(part))


def reading_adapter(root: nn.Module) -> nn.Module | None:
    """Returns a layer of peft whose forward reads the whole base weight, as DoRA does for the norms of its rows; None
    if there is none."""
    return next((part for part in _tuners(root) if len(getattr(part, "lora_magnitude_vector", ())) > 0), None)


def adapter_modules(root: nn.Module) -> set[int]:
    """Returns the ids of the modules that peft's layers add to the layers that they wrap."""
    found: set[int] = set()
    for part in _tuners(root):
        found |= {id(each) for each in part.modules()} - {id(each) for each in part.get_base_layer().modules()}
    return found


def adapted_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules of which an adapter changes a parameter itself (peft's ParamWrapper), such as experts."""
    yield from (part.get_base_layer() for part in _tuners(root) if hasattr(part, "parameter_name"))


def _tuners(root: nn.Module) -> Iterator[Any]:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is not None:
        yield from (part for part in root.modules() if isinstance(part, tuners.BaseTunerLayer))
