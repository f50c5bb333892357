"""Rotated layers that are also cut by tensor parallelism: they take and return DTensors on its mesh.

`torch.distributed.tensor.parallel` cuts a layer into parts, one for each rank of its mesh, and hooks into its forward:
inputs and outputs are DTensors on that mesh. Each part rotates over a separate ring. A rank computes the local tensor
of a DTensor whose placement follows from the cut of the weight:

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
    """Mixin of layers that tensor parallelism cuts; the rotated class is the second base."""

    NAME_PREFIX = "TensorParallel"

    ring: Ring
    qualified_name: str
    style: str  # COLWISE or ROWWISE

    @property
    def tensor_mesh(self) -> DeviceMesh:
        assert self.ring.tensor_mesh is not None, "a layer that tensor parallelism has cut has its mesh"
        return self.ring.tensor_mesh

    def _entering(self, x: Any, wanted: Placement, gradient: Placement | None = None) -> torch.Tensor:
        """Returns the local part of an input with the placement `wanted`. Raises TypeError or ValueError unless the
        input is a DTensor on the mesh of tensor parallelism."""
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
        """Returns `y` as this rank's part of an output DTensor [..., features]."""
        mesh, y = self.tensor_mesh, _Waited.apply(y)
        if self.style == ROWWISE:
            return DTensor.from_local(y, mesh, [Partial()], run_check=False)
        shape = torch.Size((*y.shape[:-1], features))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride)


class TensorParallelLinear(TensorParallel):
    """Mixin of RotatedLinear: the weight [O, I] is cut along its outputs (colwise) or inputs (rowwise)."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if self.style == COLWISE:
            x, bias = self._entering(input, Replicate(), Partial()), self.bias
        else:
            x, bias = self._entering(input, Shard(input.dim() - 1)), self._bias_once()
        shard_dim = self.shard_dims["weight"]
        y = rotated_linear(self._cast(x), self.weight, bias, shard_dim=shard_dim, **self._rotation())
        return self._leaving(y, self.weight.shape[0])

    def _bias_once(self: Any) -> torch.Tensor | None:
        """Returns the bias on the first rank of tensor parallelism and zeros on the others, because outputs are summed.
        The zeros pass their gradient, which is the whole one on every rank, to the bias."""
        bias = self.bias
        if bias is None or self.tensor_mesh.get_local_rank() == 0:
            return bias
        self._prepared.sharded = False  # the zeros are a plain tensor
        local, zeros = held(bias), self.__dict__.get(_ZEROS)
        if zeros is None or (zeros.shape, zeros.dtype, zeros.device) != (local.shape, local.dtype, local.device):
            with torch.inference_mode(False):  # the zeros outlive a first forward in inference mode
                zeros = self.__dict__[_ZEROS] = torch.zeros(local.shape, dtype=local.dtype, device=local.device)
        return _InPlaceOf.apply(local_shard(bias), zeros)


_ZEROS = "_rtp_zeros"  # attribute of a layer: zeros in place of its bias; one tensor for all calls, for prefetching


class TensorParallelEmbedding(TensorParallel):
    """Mixin of RotatedEmbedding: the table [V, E] is cut along its features (colwise) or the vocabulary (rowwise)."""

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
        """Returns ids relative to this rank's rows, a mask of ids whose rows other ranks hold, and the relative padding
        index if this rank holds it. Invalid ids stay out of range."""
        mesh = self.tensor_mesh
        sizes, place = shard_sizes(rows, mesh.size()), mesh.get_local_rank()
        start, size = sum(sizes[:place]), sizes[place]
        foreign = (ids >= 0) & (ids < rows) & ((ids < start) | (ids >= start + size))
        here = None
        if padding is not None and start <= padding % rows < start + size:
            here = padding % rows - start
        return (ids - start).masked_fill(foreign, 0), foreign, here


class _Waited(torch.autograd.Function):
    """Waits for pending DTensor collectives of the tensor, and of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _wait(x).detach()  # not a view of it: those may not be written to

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _wait(gradient)


def _wait(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


class _InPlaceOf(torch.autograd.Function):
    """Returns `stand_in`, and passes its gradient to `x`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
        return stand_in.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None
