"""Flyweight."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rtp_ext.functional import rotated_flyweight
from rtp_ext.functional.flyweight import check_copies
from rtp_ext.parameters.sharded_module import ShardedModule
from rtp_ext.parameters.sharding import replicate_parameter, shard_parameter
from rtp_ext.ring import Prepared, Ring
from rtp_ext.words import Combine


class Flyweight(ShardedModule, nn.Module):
    """R virtual copies of one small module share the storage of one shard of its parameters.

        Flyweight(MLP(64, 256), ring, shard_dims={"up.weight": 0, "up.bias": 0, "down.weight": 1}, combine="sum")

    Copy j is `module` with shard j of its parameters; copies run one after the other while the shards rotate, and
    their outputs are concatenated or summed. Examples: an MLP cut along its hidden features (sum), a convolution cut
    along its output channels (cat), attention cut along its heads (sum).

    Args:
        module: a whole, plain module (meta device included), the same on every rank. Its parameters are replaced by
            shards. Its forward

            - takes its sizes from its parameters, since those of a shard are smaller: a module with an attribute such
              as nn.MultiheadAttention.num_heads does not adapt;
            - allows the cut: the chunk rule gives ceil(n / R) slices to each rank, so that rows that must stay together
              (those of a head) must be one slice of a separate dimension, or R must divide n accordingly;
            - returns one tensor, and only reads its buffers. Hooks run once for each copy;
            - takes all tensors that require gradients from its arguments (tensors, also in lists, tuples and dicts) and
              parameters: a tensor in an attribute or in another object gets no gradient.
        ring: the ranks to shard the parameters over. Collective.
        shard_dims: for every parameter of the module, by name, the dimension to cut; None: the parameter stays whole on
            every rank and its gradient is averaged.
        combine: "cat" along `dim` of the outputs, or "sum".
        added_once: parameters that the module adds to its output, as a bias, and that a sum would add R times, such as
            "down.bias" above with 0 in shard_dims: copy j gets zeros outside shard j.
        mp_policy: param_dtype is the dtype of travel and compute of shards, reduce_dtype that of travelling gradients.

    The parameters keep the names of the module: `state_dict` has "module.up.weight", and so on. Random numbers in
    backward are those of the forward. A parameter that no copy uses gets a gradient of zeros. See
    functional.rotated_flyweight.

    Raises ValueError if shard_dims does not name every parameter or names a dimension that a parameter does not have,
    or if `combine` and `added_once` cannot be combined.
    """

    def __init__(
        self,
        module: nn.Module,
        ring: Ring,
        *,
        shard_dims: Mapping[str, int | None],
        combine: Combine = "cat",
        dim: int = -1,
        added_once: Collection[str] = (),
        mp_policy: MixedPrecisionPolicy | None = None,
    ) -> None:
        super().__init__()
        self.ring = ring
        self.qualified_name = f"Flyweight({type(module).__name__})"
        self.mp_policy = mp_policy or MixedPrecisionPolicy()
        self.shard_dims = dict(shard_dims)
        self.combine = combine
        self.dim = dim
        self.added_once = tuple(added_once)
        self.module = module
        self._prepared = Prepared(sharded=True)
        self._shard()

    def _shard(self) -> None:
        named = dict(self.module.named_parameters())
        check_copies(self.qualified_name, set(named), self.shard_dims, self.combine, self.added_once)
        for key, parameter in named.items():
            dim = self.shard_dims[key]
            if isinstance(parameter, DTensor):
                raise ValueError(f"{self.qualified_name}: expected a plain parameter {key}, got a DTensor")
            if dim is not None and not -parameter.dim() <= dim < parameter.dim():
                raise ValueError(
                    f"{self.qualified_name}: expected a dimension of {key} {tuple(parameter.shape)} to cut, got {dim}"
                )
        sharded = {}
        for key, parameter in named.items():
            dim = self.shard_dims[key]
            if dim is None:
                sharded[id(parameter)] = replicate_parameter(parameter, self.ring)
            else:
                sharded[id(parameter)] = shard_parameter(parameter, self.ring, dim % parameter.dim())
        for part in self.module.modules():
            part._parameters.update({key: sharded[id(p)] for key, p in part._parameters.items() if p is not None})

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return rotated_flyweight(
            self.module,
            dict(self.module.named_parameters()),
            args,
            kwargs,
            ring=self.ring,
            shard_dims=self.shard_dims,
            combine=self.combine,
            dim=self.dim,
            added_once=self.added_once,
            prepared=self._prepared,
            compute_dtype=self.mp_policy.param_dtype,
            reduce_dtype=self.mp_policy.reduce_dtype,
            name=self.qualified_name,
        )

    def extra_repr(self) -> str:
        combined = f"cat along {self.dim}" if self.combine == "cat" else "sum"
        return f"ring={self.ring.size}, shard_dims={self.shard_dims}, combine={combined}"
