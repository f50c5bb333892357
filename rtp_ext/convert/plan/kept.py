"""The plans that converted modules keep, with what has changed since the conversion."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from rtp_ext.convert.modules.bundled import BundledMLP
from rtp_ext.convert.modules.head import FusedLossModel
from rtp_ext.convert.plan.layers import layer_of, own_parameters
from rtp_ext.convert.plan.rotation_plan import GATHERED, IGNORED, REPLICATED, ROTATED, BundlePlan, ModulePlan, Owned
from rtp_ext.convert.plan.scaled_products import inputs_first
from rtp_ext.convert.plan.traffic import RingFacts
from rtp_ext.nn import Flyweight, RotatedMLP
from rtp_ext.nn._base import RotatedModule
from rtp_ext.parameters.sharded_module import plain_class
from rtp_ext.parameters.sharding import frozen_of, held
from rtp_ext.recipes import Recipe
from rtp_ext.ring.mesh import ring_shape

_PLAN = "_rtp_plan"  # attribute of a module: its ModulePlan, of the conversion that changed it

EMULATED = "an emulated ring has no other ranks to shard it over"
ADDED = "added after fully_rotate"
WHOLE = "rotate_for_inference keeps it whole on every rank"
APPENDED = "attention gathers the rows that it appends"
DIVIDED = "attention gathers it, and it rotates in three parts, since query, key and value have weights of their own"
SMALL = "Flyweight keeps it whole, as its shard_dims say"


def keep(part: nn.Module, plan: ModulePlan) -> None:
    """Keeps the plan of a module on it."""
    part.__dict__[_PLAN] = plan


class Kept:
    """The plans of a model, or of the parts of one, that rotates on a ring.

    Attributes:
        first, names: the first name of each parameter, and of each module, by id.
        inside: ids of the modules in a Flyweight, whose parameters are its own.
    """

    def __init__(self, root: nn.Module, facts: RingFacts) -> None:
        self.root, self.facts = root, facts
        self.names = {id(part): name for name, part in root.named_modules()}
        self.first: dict[int, str] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            self.first.setdefault(id(parameter), name)
        self.inside = {id(m) for f in root.modules() if isinstance(f, Flyweight) for m in f.module.modules()}

    def module(self, name: str, part: nn.Module) -> ModulePlan | None:
        """Returns the plan of a module of a converted model, or of one that was constructed with a ring; None where it
        owns no parameters."""
        if id(part) in self.inside:
            return None
        if isinstance(part, Flyweight):
            return self._flyweight(name, part)
        own = own_parameters(part)
        if not own:
            return None
        kept = part.__dict__.get(_PLAN)
        if kept is not None:
            return self._refreshed(name, part, kept)
        if isinstance(part, RotatedModule):
            return self._rotated(name, part)
        rows = [self._added(name, key, parameter) for key, parameter in own.items()]
        return ModulePlan(name, plain_class(part).__name__, REPLICATED, None, tuple(rows))

    def moved(self, part: nn.Module, key: str, dim: int) -> tuple[str, int | None, str | None]:
        """Returns how a parameter of a module that rotates moves, the dimension that the ring shards, and why it does
        not rotate itself."""
        reason = None
        if isinstance(part, nn.MultiheadAttention):
            divided = key == "in_proj_bias" and not part._qkv_same_embed_dim
            reason = APPENDED if key in ("bias_k", "bias_v") else DIVIDED if divided else None
        if reason is None:
            return ROTATED, dim, None
        return (REPLICATED, None, EMULATED) if self.facts.emulated else (GATHERED, dim, reason)

    def _refreshed(self, name: str, part: nn.Module, kept: ModulePlan) -> ModulePlan:
        """Returns the plan of a module with its present name, and its parameters as they are now."""
        rows = []
        before = {owned.key: owned for owned in kept.parameters}
        for key, parameter in own_parameters(part).items():
            old = before.get(key)
            replaced = old is not None and old.moved == GATHERED and not isinstance(parameter, DTensor)
            if old is None or (replaced and not self.facts.emulated):
                rows.append(self._added(name, key, parameter))
            else:
                row = self._owned(name, key, parameter, old.moved, old.dim, old.reason)
                rows.append(dataclasses.replace(row, sparse=old.sparse, wide=old.wide))
        fuses = kept.layer != "head" or any(m.lm_head is part for m in self._fused().values())
        return dataclasses.replace(
            kept,
            name=name,
            layer=kept.layer if fuses else "linear",
            parameters=tuple(rows),
            policy=part.mp_policy if isinstance(part, RotatedModule) else kept.policy,
            is_new=False,
        )

    def _rotated(self, name: str, part: Any) -> ModulePlan:
        rows = [
            self._owned(name, key, parameter, *self.moved(part, key, part.shard_dims[key]))
            for key, parameter in own_parameters(part).items()
        ]
        kind, layer = plain_class(part).__name__, layer_of(type(part))
        recipe = getattr(part, "recipe", None)
        named = recipe.name if isinstance(recipe, Recipe) else None
        made: dict[str, Any] = {"transposed": inputs_first(part), "recipe": named}
        return ModulePlan(name, kind, ROTATED, layer, tuple(rows), part.mp_policy, **made)

    def _flyweight(self, name: str, part: Flyweight) -> ModulePlan:
        rows = []
        for key, parameter in part.module.named_parameters():
            key, dim = f"module.{key}", part.shard_dims[key]
            if dim is None:
                rows.append(self._owned(name, key, parameter, REPLICATED, None, SMALL))
            else:
                rows.append(self._owned(name, key, parameter, ROTATED, dim % parameter.dim()))
        return ModulePlan(name, type(part).__name__, ROTATED, "flyweight", tuple(rows), part.mp_policy)

    def _added(self, name: str, key: str, parameter: Any) -> Owned:
        """Returns the row of a parameter that no conversion has planned."""
        reason = EMULATED if self.facts.emulated else ADDED if self.facts.pulls is None else WHOLE
        return self._owned(name, key, parameter, REPLICATED, None, reason)

    def _owned(
        self, name: str, key: str, parameter: Any, moved: str, dim: int | None, reason: str | None = None
    ) -> Owned:
        full = f"{name}.{key}" if name else key
        first = self.first.get(id(parameter), full)
        placements = tuple(parameter.placements) if isinstance(parameter, DTensor) else ()
        shape = whole = tuple(parameter.shape)
        frozen = frozen_of(parameter)
        if placements and moved != IGNORED:
            whole = ring_shape(parameter)
        elif dim is not None:  # on an emulated ring, where every owner's shard is this rank's own
            shape = whole = (*shape[:dim], shape[dim] * self.facts.ranks, *shape[dim + 1 :])
        local = held(parameter)
        return Owned(
            key=key,
            shape=shape if frozen is None else frozen.shape,
            ring_shape=whole,
            dtype=parameter.dtype if frozen is None else frozen.dtype,
            trained=parameter.requires_grad,
            moved=moved,
            dim=dim,
            placements=tuple(map(repr, placements)),
            held=local.numel() * local.element_size(),
            tied_to=None if first == full else first,
            reason=reason,
            frozen=frozen,
        )

    # -- bundles -----------------------------------------------------------------------------------------------------

    def bundles(self) -> list[BundlePlan]:
        """The bundles of all converted modules that are still in force."""
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

    def _fused(self) -> dict[str, Any]:
        named = self.root.named_modules()
        return {name: part for name, part in named if isinstance(part, FusedLossModel) and part.fuses()}

    def fused(self) -> list[str]:
        """Names of models that compute vocabulary head and loss as one operation."""
        return [*self._fused()]
