"""Tensor subclasses, as parameters may be: with and without the extensions of fully_shard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only


class Pair(TwoTensor):
    """A tensor subclass of two tensors, both used in computations; without extensions."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Pair:
        return Pair(inner["a"], inner["b"], size, stride)


class SentPair(Pair):
    """The same with extensions in their older form; it sends shards of uneven sizes."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> SentPair:
        return SentPair(inner["a"], inner["b"], size, stride)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        a, b = outputs
        return SentPair(a.to(param_dtype), b.to(param_dtype)), outputs


class Wrapped(torch.Tensor):
    """One tensor, whose class keeps it through all operators."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._data})"

    def __tensor_flatten__(self) -> Any:
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda each: each._data, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


def rounded_to_8_bits(whole: torch.Tensor) -> torch.Tensor:
    """Rounds like a weight that travels in float8 with one scale."""
    scale = whole.abs().amax() / 448
    return (whole / scale).to(torch.float8_e4m3fn).to(whole.dtype) * scale


class Float8(Wrapped):
    """A weight that is rounded to float8 before it travels, like torchao's: the largest number of all ranks sets the
    scale."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: nn.Module, mp_policy: Any) -> Any:
        assert isinstance(module, nn.Module) and stride[-1] == 1
        largest = self._data.abs().amax() if self._data.numel() else self._data.new_zeros(())
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest / 448
        padded = torch.zeros(-(-size[0] // mesh.size()), *size[1:], dtype=torch.float8_e4m3fn)
        padded[: self._data.shape[0]].copy_((self._data / scale).to(torch.float8_e4m3fn))
        return (padded,), scale

    def fsdp_post_all_gather(self, outputs: Any, scale: torch.Tensor, param_dtype: Any, *, out: Any = None) -> Any:
        (padded,) = outputs
        whole = padded.to(param_dtype) * scale.to(param_dtype)
        return whole, (padded, whole)


class LosesItself(Float8):
    """A subclass with the extensions whose slices are plain tensors."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            return func(args[0]._data, *args[1:])
        return super().__torch_dispatch__(func, types, args, kwargs)


class HalfExtended(Wrapped):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._data,), None


class Ruled(torch.Tensor):
    """A subclass with memory that functions of torch compute with differently."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {}) * 2
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(torch.Tensor):
    """A class that only has a name."""


class OwnParameter(nn.Parameter):
    """One of these, too."""
