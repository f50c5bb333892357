"""The third phase of a conversion: it applies a validated plan to the modules."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from rtp_ext.convert.fast_path import keep_from_fast_path
from rtp_ext.convert.modules.bundled import MIXINS
from rtp_ext.convert.modules.gathered import ForwardScope, make_gathered
from rtp_ext.convert.modules.head import FusedHead, FusedLossModel
from rtp_ext.convert.modules.linear_4bit import RotatedLinear4bit
from rtp_ext.convert.modules.refused import guard_parametrizations
from rtp_ext.convert.modules.shared_input import join
from rtp_ext.convert.modules.whole_embedding import WholeEmbedding
from rtp_ext.convert.plan.frozen_blocks import is_taken
from rtp_ext.convert.plan.kept import keep
from rtp_ext.convert.plan.layers import DROP_INS, drop_in, extended_parameters
from rtp_ext.convert.plan.request import Request
from rtp_ext.convert.plan.rotation_plan import (
    GATHERED,
    IGNORED,
    REPLICATED,
    ROTATED,
    BundlePlan,
    ModulePlan,
    RotationPlan,
)
from rtp_ext.convert.tensor_parallel import parallel_class
from rtp_ext.families.float8_layers import unwrap
from rtp_ext.families.recognised import is_experts
from rtp_ext.nn import Flyweight, RotatedExperts
from rtp_ext.nn._base import RotatedModule
from rtp_ext.nn.embedding import RotatedRows
from rtp_ext.nn.grouped import RotatedGroupedExperts
from rtp_ext.nn.linear import RotatedTransposedLinear
from rtp_ext.parameters.initial import draw_as_whole
from rtp_ext.parameters.sharded_module import ShardedModule, Tie, class_above, mixed_class
from rtp_ext.recipes import recipe as recipe_of
from rtp_ext.ring import Ring

logger = logging.getLogger("rtp_ext")


def apply_plan(plan: RotationPlan, request: Request, ring: Ring, scopes: Mapping[int, ForwardScope]) -> None:
    """Converts the modules of a model in place, according to a validated plan.

    `scopes`: the scope that each module's forwards open, by id of the module.
    """
    Application(plan, request, ring, scopes).run()


class Application:
    """One application of a plan, without decisions of its own."""

    def __init__(self, plan: RotationPlan, request: Request, ring: Ring, scopes: Mapping[int, ForwardScope]) -> None:
        self.plan, self.request, self.ring, self.scopes = plan, request, ring, scopes
        self.modules = list(request.modules())
        self.by_name: dict[str, Any] = dict(self.modules)
        self.recompute = request.options.bundle == "recompute"
        self.memo: dict[int, nn.Parameter] = {}  # new parameters, by id of the replaced one
        self.new = [module for module in plan.modules if module.is_new]
        attention = (self.by_name[module.name] for module in self.new if module.layer == "attention")
        self.projections = {id(part.out_proj) for part in attention}  # attention converts them itself
        self.counts: Counter[str] = Counter(plan.notes)

    def run(self) -> None:
        guard_parametrizations()
        draw_as_whole()
        for module in self.new:
            if module.recipe is not None:
                unwrap(self.by_name[module.name])
        if extended_parameters(self.modules, self.request.ignored):  # a compiler would look into their classes
            self.ring.traceable = False
        inside = {id(part) for _, f in self.modules if isinstance(f, Flyweight) for part in f.modules()}
        for _, part in self.modules:
            if id(part) not in inside:
                keep_from_fast_path(part)
            if isinstance(part, RotatedModule):
                self.counts[f"{type(part).__name__}: already sharded, left alone"] += 1
        for module in self.new:
            keep(self.by_name[module.name], module)
            if module.moved == ROTATED:
                self._rotate(module, self.by_name[module.name])
            elif module.layer == "whole embedding":
                self._keep_whole(module, self.by_name[module.name])
            elif module.moved == IGNORED:
                self.counts[f"{module.kind}: ignored"] += 1
        for bundle in self._bundles("mlp"):
            part, block = self.by_name[bundle.name], bundle.block
            assert block is not None, "it is new"
            kind = type(part).__name__
            part.__class__ = mixed_class(MIXINS[block.kind], type(part))
            part.bundle(block.spec, recompute=bundle.recompute, name=bundle.label)
            self.counts[f"{kind}: MLP bundled"] += 1
        for bundle in self._bundles("shared input"):
            part = self.by_name[bundle.name]
            join(part, bundle.paths, bundle.label)
            self.counts[f"{type(part).__name__}: {', '.join(bundle.paths)} travel together"] += 1
        for name in self.plan.fused:
            if name in self.by_name and not isinstance(self.by_name[name], FusedLossModel):
                part = self.by_name[name]
                self.counts[f"{type(part).__name__}: no logits where labels are given"] += 1
                part.__class__ = mixed_class(FusedLossModel, type(part))
        for module in self.new:
            if module.layer is None and module.moved in (GATHERED, REPLICATED):
                self._gather(module, self.by_name[module.name])
        self._remember_ties()
        self._log()

    def _bundles(self, kind: str) -> list[BundlePlan]:
        """Returns the new bundles of a kind."""
        new = {module.name for module in self.new}
        return [bundle for bundle in self.plan.bundles if bundle.kind == kind and new.issuperset(bundle.layers)]

    # -- one module --------------------------------------------------------------------------------------------------

    def _rotate(self, module: ModulePlan, part: Any) -> None:
        for key, reason in ((owned.key, owned.wide) for owned in module.parameters if owned.wide is not None):
            self.counts[f"{key} of {module.kind}: wide: {reason}"] += 1
        if id(part) in self.projections:
            return
        options: dict[str, Any] = {}
        mixed: Any
        if module.layer == "head":
            mixed = FusedHead
            self.counts["vocabulary head: fused with the loss"] += 1
        elif module.layer == "experts":
            mixed = RotatedExperts if is_experts(part) else RotatedGroupedExperts
            options = {"recompute": True} if self.recompute else {}
        elif module.transposed:
            mixed, options = RotatedTransposedLinear, {"shard_dim": 1 - (module.cuts["weight"] or 0)}
        else:
            mixed = RotatedLinear4bit if is_taken(part) else drop_in(part)
            if module.layer in ("linear", "embedding"):
                options = {"shard_dim": module.cuts["weight"]}
        if module.recipe is not None:
            options["recipe"] = recipe_of(module.recipe)
            what = ", experts" if module.layer == "experts" else ""
            self.counts[f"products in 8 bits{what}: {module.recipe}"] += 1
        if module.in_blocks or module.in_codes:
            options["frozen"] = {each.key: each.frozen for each in module.parameters if each.frozen is not None}
            self.ring.traceable = False  # a compiler would look into the parameter
        if module.in_blocks:
            for frozen in options["frozen"].values():
                self.counts[f"weights in blocks of {frozen.format}"] += 1
        make = class_above if mixed is RotatedRows else mixed_class
        part.__class__ = mixed if type(part) in DROP_INS else make(mixed, type(part))
        part._rotate(
            self.ring,
            name=module.label,
            memo=self.memo,
            mp_policy=self.request.mp_policy,
            **options,
        )
        for owned in module.parameters:
            planned = owned.moved != ROTATED or part.shard_dims[owned.key] == owned.dim
            assert planned, f"{module.name}.{owned.key}: planned along {owned.dim}, cut along {part.shard_dims}"
        if module.style is not None:
            part.__class__ = mixed_class(parallel_class(part), type(part))
            part.style = module.style
            self.counts[f"{module.kind}: rotated, {module.style} tensor parallel"] += 1
        elif module.layer != "head":
            self.counts[f"{module.kind}: rotated"] += 1

    def _keep_whole(self, module: ModulePlan, part: Any) -> None:
        part.__class__ = mixed_class(WholeEmbedding, type(part))
        part.keep_whole(self.ring, module.label, self.request.mp_policy, self.memo)
        logger.warning(
            "fully_rotate: %s stays whole on every rank: %s; its gradient is averaged", module.name, module.reason
        )

    def _gather(self, module: ModulePlan, part: Any) -> None:
        if self.ring.mesh is None:
            self.counts[f"{module.kind}: left whole (emulated ring)"] += 1
            return
        make_gathered(part, self.ring, self.scopes[id(part)], self.memo, module.label)
        self.counts[f"{module.kind}: sharded, gathered while in use"] += 1

    def _remember_ties(self) -> None:
        """Keeps tied parameters tied after a module has received a new one."""
        owners = Counter(id(p) for _, part in self.modules for p in part._parameters.values() if p is not None)
        ties: dict[int, Tie] = {}
        for _, part in self.modules:
            for name, parameter in part._parameters.items():
                if isinstance(part, ShardedModule) and owners[id(parameter)] > 1:
                    part.join_tie(name, ties.setdefault(id(parameter), Tie()))

    def _log(self) -> None:
        for line, count in self.counts.items():
            logger.info("fully_rotate: %d x %s", count, line)
        grouped: Counter[tuple[str, str, str | None]] = Counter()
        for module in self.new:
            if module.notice == "refused":
                logger.warning("fully_rotate: %s is gathered while in use: %s", module.name, module.reason)
            elif module.notice in ("kept", "unlike") and self.ring.mesh is not None:
                grouped[module.notice, module.kind, module.reason] += 1
        for (notice, kind, reason), count in grouped.items():
            level = logging.WARNING if notice == "unlike" else logging.INFO
            logger.log(
                level,
                "fully_rotate: %d x %s: gathered whole while in use, and not rotated, since %s",
                count,
                kind,
                reason,
            )
        if self.request.trains:
            log_shares("fully_rotate", self.plan, self.plan, "gathered while in use")


_LARGE = 256 << 20  # bytes of a parameter that no rank should hold whole without a word


def log_shares(call: str, plan: RotationPlan, applied: RotationPlan, others: str) -> None:
    """Logs which part of a model's parameters rotates, and warns of large ones that do not. `applied`: the modules of
    the plan that it is applied to; `others`: what happens to other parameters."""
    names = {module.name for module in applied.modules}
    sizes: Counter[bool] = Counter()
    largest = (0, "")
    for module in plan.modules:
        for owned in module.parameters:
            if owned.tied_to is None and owned.moved != IGNORED:
                count, rotates = math.prod(owned.shape), owned.moved == ROTATED and module.name in names
                sizes[rotates] += count
                if not rotates:
                    name = f"{module.name}.{owned.key}" if module.name else owned.key
                    largest = max(largest, (count * owned.dtype.itemsize, name))
    if not sizes:
        return
    share = 100.0 * sizes[True] / max(sizes.total(), 1)
    text = f"{call}: {share:.1f} % of the parameters rotate, {100.0 - share:.1f} % are {others}"
    if largest[1]:
        text += f", the largest {largest[1]}, {largest[0] / 2**20:.1f} MiB"
    if largest[0] > _LARGE:
        logger.warning("%s: every rank holds all of it at once; rtp_ext.explain says why", text)
    else:
        logger.info("%s", text)
