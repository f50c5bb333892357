"""Reads the plan of a conversion from the converted modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rtp_ext.convert.modules.bundled import BundledMLP
from rtp_ext.convert.modules.gathered import GatheredModule
from rtp_ext.convert.modules.head import FusedHead, FusedLossModel
from rtp_ext.convert.modules.whole_embedding import WholeEmbedding
from rtp_ext.convert.plan.layers import DROP_INS, layer_of, own_parameters
from rtp_ext.convert.plan.request import state_in
from rtp_ext.convert.plan.rotation_plan import (
    GATHERED,
    IGNORED,
    REPLICATED,
    ROTATED,
    BundlePlan,
    ModulePlan,
    Owned,
)
from rtp_ext.convert.plan.traffic import RingFacts
from rtp_ext.convert.scopes import state_of
from rtp_ext.nn import Flyweight, RotatedExperts, RotatedLinearCrossEntropy, RotatedMLP, RotatedMultiheadAttention
from rtp_ext.nn._base import RotatedModule
from rtp_ext.nn._tensor_parallel import TensorParallel
from rtp_ext.nn.linear import RotatedTransposedLinear
from rtp_ext.parameters.sharded_module import mixin_of, plain_class
from rtp_ext.parameters.sharding import frozen_of, held
from rtp_ext.ring.mesh import ring_dim, ring_shape

WIDE = "_rtp_wide"  # attribute of a module with a frozen weight that is not in blocks, although requested: the reason
REASON = "_rtp_reason"  # attribute of a module that does not rotate: the reason at its conversion

SCALAR = "a scalar has no dimension to cut"
EMULATED = "an emulated ring has no other ranks to shard it over"
IN_IGNORED = "in ignored_params"
BESIDE_IGNORED = "its module has another parameter in ignored_params"
ADDED = "added after fully_rotate"
WHOLE = "rotate_for_inference keeps it whole on every rank"
PLAIN = "it belongs to no converted module"
APPENDED = "attention gathers the rows that it appends"
DIVIDED = "attention gathers it, and it rotates in three parts, since query, key and value have weights of their own"


def dtypes_of(policy: MixedPrecisionPolicy, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Returns, for a parameter of `dtype` under a policy, the compute dtype and that in which its gradient travels."""
    compute = policy.param_dtype or dtype
    return compute, policy.reduce_dtype or (torch.float64 if compute == torch.float64 else torch.float32)


def attention_reason(module: nn.MultiheadAttention, key: str) -> str | None:
    """Returns why a parameter of attention itself does not rotate; None if it does."""
    if key in ("bias_k", "bias_v"):
        return APPENDED
    return DIVIDED if key == "in_proj_bias" and not module._qkv_same_embed_dim else None


class Reader:
    """A reader of a model, or of the parts of one, that rotates on a ring.

    Attributes:
        ignored: ids of the parameters that are the caller's.
        first, names: the first name of each parameter, and of each module, by id.
    """

    def __init__(self, root: nn.Module, facts: RingFacts, ignored: Iterable[int] = ()) -> None:
        self.root, self.facts = root, facts
        self.whole = ADDED if facts.pulls is None else WHOLE
        self.ignored = set(ignored)
        self.by_name = dict(root.named_modules())
        self.names = {id(part): name for name, part in self.by_name.items()}
        self.first: dict[int, str] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            self.first.setdefault(id(parameter), name)
        for part in root.modules():
            if state_of(part) is not None:
                names = dict(part.named_parameters(remove_duplicate=False))
                self.ignored.update(id(names[name]) for name in state_in(part).ignored if name in names)
        self.inside = {id(m) for f in root.modules() if isinstance(f, Flyweight) for m in f.module.modules()}

    # -- modules -----------------------------------------------------------------------------------------------------

    def module(self, name: str, part: nn.Module) -> ModulePlan | None:
        """Returns the plan of a converted module, or of one in a converted model; None where it owns no parameters."""
        if id(part) in self.inside:
            return None
        if isinstance(part, Flyweight):
            return self._flyweight(name, part)
        if not own_parameters(part):
            return None
        if isinstance(part, GatheredModule):
            return self._gathered(name, part)
        if isinstance(part, WholeEmbedding):
            return self._whole(name, part)
        if isinstance(part, RotatedModule):
            return self._rotated(name, part)
        return self._plain(name, part)

    def _rotated(self, name: str, part: Any) -> ModulePlan:
        rows = []
        for key, parameter in own_parameters(part).items():
            reason = attention_reason(part, key) if isinstance(part, RotatedMultiheadAttention) else None
            dim: int | None = part.shard_dims[key]
            if reason is None:
                rows.append(self._owned(name, key, parameter, ROTATED, dim, None))
            elif self.facts.emulated:
                rows.append(self._owned(name, key, parameter, REPLICATED, None, EMULATED))
            else:
                rows.append(self._owned(name, key, parameter, GATHERED, dim, reason))
        mixin = mixin_of(part)
        if isinstance(part, RotatedExperts):
            layer = "experts"
        elif isinstance(part, RotatedTransposedLinear):
            layer = "linear"
        elif isinstance(part, RotatedLinearCrossEntropy) or (mixin is FusedHead and self._fuses(part)):
            layer = "head"
        else:
            layer = next((layer_of(cls) for cls in DROP_INS.values() if isinstance(part, cls)), "convolution")
        compute, reduce = dtypes_of(part.mp_policy, rows[0].dtype)
        return ModulePlan(
            name=name,
            kind=plain_class(part).__name__,
            moved=ROTATED,
            layer=layer,
            parameters=tuple(rows),
            compute_dtype=compute,
            reduce_dtype=reduce,
            in_place=part.in_place,
            transposed=isinstance(part, RotatedTransposedLinear),
            style=part.style if isinstance(part, TensorParallel) else None,
        )

    def _fuses(self, head: nn.Module) -> bool:
        models = (part for part in self.root.modules() if isinstance(part, FusedLossModel))
        return any(model.lm_head is head and model.fuses() for model in models)

    def _gathered(self, name: str, part: GatheredModule) -> ModulePlan:
        reason = part.__dict__.get(REASON)
        rows = [
            self._owned(
                name,
                key,
                parameter,
                GATHERED if ring_dim(parameter) is not None else REPLICATED,
                ring_dim(parameter),
                reason if parameter.dim() else SCALAR,
            )
            for key, parameter in own_parameters(part).items()
        ]
        style = "replicated" if part._rtp_replicated else None
        return self._still(name, part, GATHERED, rows, part._rtp_scope.mp_policy, style)

    def _whole(self, name: str, part: Any) -> ModulePlan:
        weight, reason = part._parameters["weight"], part.__dict__.get(REASON)
        rows = [self._owned(name, "weight", weight, REPLICATED, None, reason, part.sparse)]
        return self._still(name, part, REPLICATED, rows, part.mp_policy, layer="whole embedding")

    def _plain(self, name: str, part: nn.Module) -> ModulePlan:
        """Returns the plan of a module that no conversion has changed: its parameters are ignored, or whole on every
        rank."""
        several = part.modules() if isinstance(part, nn.MultiheadAttention) else [part]
        beside = any(id(p) in self.ignored for each in several for p in own_parameters(each).values())
        rows = []
        for key, parameter in own_parameters(part).items():
            foreign = isinstance(parameter, DTensor)
            if id(parameter) in self.ignored or foreign:
                rows.append(self._owned(name, key, parameter, IGNORED, None, IN_IGNORED))
            elif beside:
                rows.append(self._owned(name, key, parameter, REPLICATED, None, BESIDE_IGNORED))
            else:
                reason = EMULATED if self.facts.emulated else self.whole
                rows.append(self._owned(name, key, parameter, REPLICATED, None, reason))
        moved = IGNORED if beside or rows[0].moved == IGNORED else REPLICATED
        return self._still(name, part, moved, rows, None)

    def _flyweight(self, name: str, part: Flyweight) -> ModulePlan:
        rows = []
        prefix = f"{name}.module" if name else "module"
        for key, parameter in part.module.named_parameters():
            dim = part.shard_dims[key]
            moved = REPLICATED if dim is None else ROTATED
            reason = "Flyweight keeps it whole, as its shard_dims say" if dim is None else None
            cut = None if dim is None else dim % parameter.dim()
            row = self._owned(prefix, key, parameter, moved, cut, reason)
            rows.append(Owned(**{**vars(row), "key": f"module.{key}"}))
        compute, reduce = dtypes_of(part.mp_policy, rows[0].dtype if rows else torch.float32)
        return ModulePlan(
            name=name,
            kind=type(part).__name__,
            moved=ROTATED,
            layer="flyweight",
            parameters=tuple(rows),
            compute_dtype=compute,
            reduce_dtype=reduce,
            in_place=part.in_place,
        )

    def _still(
        self,
        name: str,
        part: Any,
        moved: str,
        rows: list[Owned],
        policy: MixedPrecisionPolicy | None,
        style: str | None = None,
        layer: str | None = None,
    ) -> ModulePlan:
        """`policy`: None for a plain module; its parameters keep their dtypes."""
        dtype = rows[0].dtype
        compute, reduce = (dtype, dtype) if policy is None else dtypes_of(policy, dtype)
        return ModulePlan(
            name=name,
            kind=plain_class(part).__name__,
            moved=moved,
            layer=layer,
            parameters=tuple(rows),
            compute_dtype=compute,
            reduce_dtype=reduce,
            style=style,
        )

    def _owned(
        self,
        name: str,
        key: str,
        parameter: Any,
        moved: str,
        dim: int | None,
        reason: str | None,
        sparse: bool = False,
    ) -> Owned:
        full = f"{name}.{key}" if name else key
        first = self.first.get(id(parameter), full)
        placed = isinstance(parameter, DTensor)
        shape = whole = tuple(parameter.shape)
        frozen = frozen_of(parameter)
        if placed and moved != IGNORED:
            whole = ring_shape(parameter)
        elif dim is not None:  # on an emulated ring, where every owner's shard is this rank's own
            shape = whole = (*shape[:dim], shape[dim] * self.facts.ranks, *shape[dim + 1 :])
        local = held(parameter)
        owner = self.by_name.get(name)
        return Owned(
            key=key,
            shape=shape if frozen is None else frozen.shape,
            ring_shape=whole,
            dtype=parameter.dtype if frozen is None else frozen.dtype,
            trained=parameter.requires_grad,
            moved=moved,
            dim=dim,
            placements=tuple(map(repr, parameter.placements)) if placed else (),
            held=local.numel() * local.element_size(),
            tied_to=None if first == full else first,
            reason=reason,
            sparse=sparse,
            frozen=frozen,
            wide=owner.__dict__.get(WIDE, {}).get(key) if owner is not None else None,
        )

    # -- bundles -----------------------------------------------------------------------------------------------------

    def bundles(self) -> list[BundlePlan]:
        """The bundles of all converted modules."""
        found = []
        for name, part in self.root.named_modules():
            label = name or plain_class(part).__name__
            if isinstance(part, BundledMLP) and part.intact and part.mlp_spec is not None:
                paths = tuple(part.mlp_spec.paths)
                layers = self._layers(part, paths)
                found.append(BundlePlan("mlp", name, part.qualified_name, paths, layers, part.mlp_recompute))
            elif isinstance(part, RotatedMLP):
                paths = tuple(part.spec.paths)
                found.append(BundlePlan("mlp", name, label, paths, self._layers(part, paths), part.recompute))
            groups: dict[int, tuple[Any, list[str]]] = {}
            for path, child in part.named_children():
                group = child.__dict__.get("together")
                if group is not None and group.shared:
                    groups.setdefault(id(group), (group, []))[1].append(path)
            for group, names in groups.values():
                if len(names) == len(group.layers):
                    paths = tuple(names)
                    found.append(BundlePlan("shared input", name, label, paths, self._layers(part, paths)))
        return found

    def _layers(self, part: Any, paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(self.names[id(part.get_submodule(path))] for path in paths)

    def fused(self) -> list[str]:
        """Names of models that compute vocabulary head and loss as one operation."""
        named = self.root.named_modules()
        return [name for name, part in named if isinstance(part, FusedLossModel) and part.fuses()]
