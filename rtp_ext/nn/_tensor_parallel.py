"""Rotated layers that tensor parallelism has cut before: they take and return DTensors on its mesh.

`torch.distributed.tensor.parallel` cuts a layer into parts, one for each rank of its mesh, and hooks into its forward:
what goes in and comes out are DTensors on that mesh. Each part rotates over a ring of its own. What a rank computes of
its part is the local tensor of a DTensor that follows from how the weight was cut:

    colwise (linear)      x Replicate, its gradient Partial     y Shard(-1)
    rowwise (linear)      x Shard(-1), its gradient as well     y Partial, its gradient Replicate
    colwise (embedding)   ids Replicate                         y Shard(-1)
    rowwise (embedding)   ids Replicate                         y Partial: zeros for rows of other ranks

Gradients of parameters are averaged over the ring, and never over tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from rtp_ext._native import shard_sizes
from rtp_ext.functional import rotated_embedding, rotated_linear
from rtp_ext.parameters.sharding import held, local_shard
from rtp_ext.ring import Ring

COLWISE, ROWWISE = "colwise", "rowwise"


class TensorParallel:
    """Mixin of layers that tensor parallelism has cut; the rotated class comes second."""

    NAME_PREFIX = "TensorParallel"

    ring: Ring
    qualified_name: str
    style: str  # COLWISE or ROWWISE

    @property
    def tensor_mesh(self) -> DeviceMesh:
        assert self.ring.tensor_mesh is not None, "a layer that tensor parallelism has cut has its mesh"
        return self.ring.tensor_mesh

    def _entering(self, x: Any, wanted: Placement, gradient: Placement | None = None) -> torch.Tensor:
        """The local part of an input, laid out as `wanted`. Raises where it is none of tensor parallelism."""
        mesh = self.tensor_mesh
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{self.qualified_name}: expected a DTensor on {mesh}, as the hooks of parallelize_module make of an "
                f"input, got a {type(x).__name__}: call the module, and not its forward"
            )
        if x.device_mesh != mesh:
            raise ValueError(f"{self.qualified_name}: expected an input on {mesh}, got one on {x.device_mesh}")
        if tuple(x.placements) != (wanted,):
            x = x.redistribute(placements=[wanted])
        return _Waited.apply(x.to_local(grad_placements=None if gradient is None else [gradient]))

    def _leaving(self, y: torch.Tensor, features: int) -> DTensor:
        """What this rank has computed, as its part of an output [..., features]."""
        mesh, y = self.tensor_mesh, _Waited.apply(y)
        if self.style == ROWWISE:
            return DTensor.from_local(y, mesh, [Partial()], run_check=False)
        shape = torch.Size((*y.shape[:-1], features))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride)


class TensorParallelLinear(TensorParallel):
    """Of RotatedLinear: the weight [O, I] is cut along its outputs (colwise) or inputs (rowwise)."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if self.style == COLWISE:
            x, bias = self._entering(input, Replicate(), Partial()), self.bias
        else:
            x, bias = self._entering(input, Shard(input.dim() - 1)), self._bias_once()
        shard_dim = self.shard_dims["weight"]
        y = rotated_linear(self._cast(x), self.weight, bias, shard_dim=shard_dim, **self._rotation())
        return self._leaving(y, self.weight.shape[0])

    def _bias_once(self: Any) -> torch.Tensor | None:
        """The bias on the first rank of tensor parallelism, zeros that get its gradient on the others: outputs are
        summed, and what comes back is the whole gradient on each of them."""
        bias = self.bias
        if bias is None or self.tensor_mesh.get_local_rank() == 0:
            return bias
        self._prepared.sharded = False  # the zeros are a plain tensor
        local, zeros = held(bias), self.__dict__.get(_ZEROS)
        if zeros is None or (zeros.shape, zeros.dtype, zeros.device) != (local.shape, local.dtype, local.device):
            with torch.inference_mode(False):  # they outlive a first forward in inference mode
                zeros = self.__dict__[_ZEROS] = torch.zeros(local.shape, dtype=local.dtype, device=local.device)
        return _InPlaceOf.apply(local_shard(bias), zeros)


_ZEROS = "_rtp_zeros"  # attribute of a layer: what it adds instead of its bias, the same in all calls for prefetching


class TensorParallelEmbedding(TensorParallel):
    """Of RotatedEmbedding: the table [V, E] is cut along its features (colwise) or the vocabulary (rowwise)."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        ids, padding = self._entering(input, Replicate()), self.padding_idx
        foreign = None
        rows, features = self.weight.shape
        if self.style == ROWWISE:
            ids, foreign, padding = self._own_rows(ids, padding, rows)
        shard_dim = self.shard_dims["weight"]
        y = rotated_embedding(ids, self.weight, shard_dim=shard_dim, padding_idx=padding, **self._rotation())
        if foreign is not None:
            y = y.masked_fill(foreign.unsqueeze(-1), 0.0)
        return self._leaving(y, features)

    def _own_rows(self: Any, ids: torch.Tensor, padding: int | None, rows: int) -> tuple[Any, torch.Tensor, int | None]:
        """Ids within this rank's rows, which of them stand for rows of others, and the padding if it is here. Ids that
        no rank has stay out of range."""
        mesh = self.tensor_mesh
        sizes, place = shard_sizes(rows, mesh.size()), mesh.get_local_rank()
        start, size = sum(sizes[:place]), sizes[place]
        foreign = (ids >= 0) & (ids < rows) & ((ids < start) | (ids >= start + size))
        here = None
        if padding is not None and start <= padding % rows < start + size:
            here = padding % rows - start
        return (ids - start).masked_fill(foreign, 0), foreign, here


class _Waited(torch.autograd.Function):
    """The tensor itself, and the gradient itself, once the collectives that DTensor left running have ended."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _wait(x).detach()  # not a view of it: those may not be written to

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _wait(gradient)


def _wait(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


class _InPlaceOf(torch.autograd.Function):
    """`stand_in`, whose gradient is that of `x`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
        return stand_in.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None
