"""RotationPlan: the conversion of every module and parameter of a model, as data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from rtp_ext._native import ParameterFacts, shard_sizes
from rtp_ext.convert.plan.format_table import table
from rtp_ext.convert.plan.traffic import (
    Passes,
    RingFacts,
    Traffic,
    by_collectives,
    gathered_traffic,
    rotation_slots,
    rotation_traffic,
    slot_bytes,
    traffic_of_rows,
)
from rtp_ext.families.blocks import MLPBlock
from rtp_ext.functional._operation import OPERATIONS, Operation
from rtp_ext.functional.convolution import Convolution
from rtp_ext.functional.cross_entropy import LinearCrossEntropy
from rtp_ext.functional.linear import Linears, PartialLinear
from rtp_ext.functional.mlp import MLP
from rtp_ext.nn.experts import sliced_parameters
from rtp_ext.parameters.coded import CodedWeight
from rtp_ext.parameters.frozen import FrozenWeight
from rtp_ext.recipes import Recipe
from rtp_ext.recipes import recipe as recipe_of

ROTATED, GATHERED, REPLICATED, IGNORED = "rotated", "gathered", "replicated", "ignored"


@dataclass(frozen=True)
class Owned:
    """A parameter with one module that owns it.

    Attributes:
        key: its name in the module.
        shape: the shape of the whole parameter.
        ring_shape: the shape that the ring shards; smaller than `shape` where tensor parallelism shards the parameter.
        moved: `rotated`, `gathered` (sharded, and gathered while its module uses it), `replicated` (whole on every
            rank, its gradient averaged) or `ignored` (plain, left to the caller).
        dim: the dimension that the ring shards; None: the ring does not shard it.
        placements: placements over the dimensions of the mesh of parameters; empty for plain tensors.
        held: bytes on this rank.
        tied_to: the first name of the parameter, if this is another one.
        reason: why it does not rotate.
        sparse: whether its gradient has only the rows of the ids that were looked up.
        frozen: its blocks, or its codes of 8 bits where they are stored; `ring_shape` is then that of the bytes. None:
            it is stored in its dtype.
        wide: why a frozen weight is not stored in blocks, or one is not multiplied in 8 bits, if that was requested.
    """

    key: str
    shape: tuple[int, ...]
    ring_shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    moved: str
    dim: int | None
    placements: tuple[str, ...]
    held: int
    tied_to: str | None = None
    reason: str | None = None
    sparse: bool = False
    frozen: FrozenWeight | None = None
    wide: str | None = None


@dataclass(frozen=True)
class ModulePlan:
    """The conversion of one module that owns parameters.

    Attributes:
        name: its name in the model, the first of `named_modules`.
        kind: the name of its plain class.
        moved: as in `Owned`, for most of its parameters.
        layer: the kind of rotation: `linear`, `embedding`, `convolution`, `attention`, `experts`, `head`; None for
            modules that do not rotate, but `whole embedding` for tables that stay whole.
        transposed: whether a linear layer's weight is stored as [in_features, out_features], or those of experts so.
        style: the style of tensor parallelism: `colwise`, `rowwise`, `replicated`; None: without.
        policy: the dtypes of its computes and gradients; None: a module that is left as it is.
        recipe: of its products in 8 bits; None: they are wide.
        reason: why it does not rotate.
        notice: what to log: `refused`, `unlike` its base class, a layer of torch (warnings), or `kept` from rotating,
            which it could; None: nothing.
        is_new: whether this conversion changes it.
    """

    name: str
    kind: str
    moved: str
    layer: str | None
    parameters: tuple[Owned, ...]
    policy: MixedPrecisionPolicy | None = None
    transposed: bool = False
    style: str | None = None
    recipe: str | None = None
    reason: str | None = field(default=None, compare=False)
    notice: str | None = field(default=None, compare=False)
    is_new: bool = field(default=False, compare=False)

    @property
    def label(self) -> str:
        return self.name or self.kind

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of computes with shards."""
        dtype = self.parameters[0].dtype if self.parameters else torch.float32
        return dtype if self.policy is None else self.policy.param_dtype or dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients travel."""
        compute = self.compute_dtype
        if self.policy is None:
            return compute
        return self.policy.reduce_dtype or (torch.float64 if compute == torch.float64 else torch.float32)

    @property
    def in_blocks(self) -> bool:
        """Whether its weight is stored in blocks."""
        return any(each.frozen is not None for each in self.parameters) and not self.in_codes

    @property
    def in_codes(self) -> bool:
        """Whether its weight is stored as codes of 8 bits."""
        return any(isinstance(each.frozen, CodedWeight) for each in self.parameters)

    def recipe_of(self, owned: Owned) -> Recipe | None:
        """Returns the recipe of the products with a parameter; None: they are wide."""
        multiplied = len(owned.shape) == 3 if self.layer == "experts" else owned.key == "weight"
        return recipe_of(self.recipe) if self.recipe is not None and multiplied else None

    @property
    def cuts(self) -> dict[str, int | None]:
        return {each.key: each.dim for each in self.parameters}


@dataclass(frozen=True)
class BundlePlan:
    """Linear layers of one module that rotate together.

    kind: `mlp` or `shared input`. name: the module's name. paths: the layers' names in the module. layers: their names
    in the model. recompute: an MLP keeps no hidden value for backward. block: the kind of a new MLP's block.
    """

    kind: str
    name: str
    label: str
    paths: tuple[str, ...]
    layers: tuple[str, ...]
    recompute: bool = False
    block: MLPBlock | None = field(default=None, compare=False)

    @property
    def title(self) -> str:
        return f"{self.label} ({', '.join(self.paths)})"


@dataclass(frozen=True)
class ParameterPlan:
    """One row of a plan: a parameter under one of its names.

    Attributes:
        name: its name in the model.
        shape, dtype, trained: shape and dtype of the whole parameter; whether it requires a gradient.
        tied_to: its first name, if this is another one.
        module, module_class: the owner under this name.
        moved: `rotated`, `gathered`, `replicated` or `ignored`.
        bundle: the operation that moves it, with the layers that travel together; None if it does not rotate.
        placements: its placements over the mesh of parameters.
        cut: the dimension that the ring shards, and the sizes of all ranks' shards along it; None, ().
        route, gradient_route: the routes of weights (`ring`, `direct`, `two-level`, `gather`; in a model for forwards
            only `pull` or `read`) and of gradients (`chain`, `direct`); `rows` for both of an embedding that sends rows
            instead of its table; `all-gather` and `all-reduce` for parameters that do not rotate. None: not sent.
        travel, reduce: dtypes in which weights and gradients travel.
        held_bytes: bytes on this rank, with the codes of a weight that is multiplied in 8 bits.
        forward_bytes, backward_bytes, gradient_bytes: bytes that hops of this rank send in a step: weights in forward,
            weights in backward, gradients. `Ring.bytes_sent` counts them. In a model for forwards only: the bytes that
            a forward pulls from other ranks, all experts included; over `shm+tcp` a rank of its host may have them.
        collective_bytes: bytes that ring collectives of this rank send in a step; None: not known in advance.
        reason: why it does not rotate.
        wide: why a frozen weight is not stored in blocks, if `frozen` was given, or one is not multiplied in 8 bits, if
            `recipe` was.
        group: shards in a product, at most. None where it does not rotate, or sends rows.
        apart: passes whose products have one shard although `group` is larger, and why: those of a recipe.
        slots_bytes: of the slots that its operation takes, which all operations of the ring share. None: as of group.
        predicted_seconds: of one forward and backward of its operation, by the route planner's model, for the largest
            number of tokens on any rank. None where that decides nothing: on CPUs, and before the first forward.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    tied_to: str | None
    module: str
    module_class: str
    moved: str
    bundle: str | None
    placements: tuple[str, ...]
    cut: int | None
    shard_sizes: tuple[int, ...]
    route: str | None
    gradient_route: str | None
    travel: str | None
    reduce: str | None
    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    gradient_bytes: int
    collective_bytes: int | None
    reason: str | None
    wide: str | None = None
    group: int | None = None
    apart: str | None = None
    slots_bytes: int | None = None
    predicted_seconds: float | None = None

    @property
    def sent_bytes(self) -> int:
        """Bytes that hops send."""
        return self.forward_bytes + self.backward_bytes + self.gradient_bytes


@dataclass(frozen=True)
class RotationPlan:
    """The conversion of a model, before or after it; see `rtp_ext.explain`.

    Bytes are those of one rank, `ring.rank`, in a step of one forward and one backward, in which every module is called
    once and every input but ids requires a gradient. A first layer whose input requires none sends no weights in
    backward; activation checkpointing sends weights again for every recomputation. Traffic between replicas is not
    counted: see `OuterPolicy.bytes_sent`.

    Attributes:
        ring: the properties that decide routes and bytes.
        modules: the modules that own parameters, in the order of `named_modules`.
        bundles: the layers that rotate together.
        fused: names of models that compute vocabulary head and loss as one operation.
        kind: the class of the model.
        notes: further lines for the log, one for each module.
        parameters: one row for each name of each parameter.
    """

    ring: RingFacts
    modules: tuple[ModulePlan, ...]
    bundles: tuple[BundlePlan, ...] = ()
    fused: tuple[str, ...] = ()
    kind: str = "Module"
    notes: tuple[str, ...] = field(default=(), compare=False)

    @functools.cached_property
    def parameters(self) -> tuple[ParameterPlan, ...]:
        found: dict[str, list[ParameterPlan]] = {}
        for title, passes, members in self._operations():
            facts, ring = [each for _, _, each in members], self.ring.of_operation(passes.operation)
            traffic, slots = rotation_traffic(passes, facts, ring), rotation_slots(passes, facts, ring)
            at_once = by_collectives(passes, facts, ring)
            for (module, owned, _), each in zip(members, traffic, strict=True):
                row = self._row(module, owned, title, passes, each, slots)
                if at_once:
                    gradients = "reduce-scatter" if row.gradient_route else None
                    row = dataclasses.replace(row, route="all-gather", gradient_route=gradients)
                known = found.setdefault(row.name, [])
                if known:  # a bias that rotates in several parts
                    known[0] = _added(known[0], each)
                else:
                    known.append(row)
        rows = []
        for module in self.modules:
            for owned in module.parameters:
                name = f"{module.name}.{owned.key}" if module.name else owned.key
                rows += found.get(name) or [self._row(module, owned, None, None, Traffic())]
        return tuple(rows)

    @functools.cached_property
    def totals(self) -> dict[str, int]:
        """Sums over all parameters, in bytes of this rank. In a model for forwards only also `slot_bytes`, those of the
        two slots that pulled shards arrive in, on the device."""
        rows = self.parameters
        slots = {}
        if self.ring.pulls is not None:
            sizes = (slot_bytes(p, [each for _, _, each in members], self.ring) for _, p, members in self._operations())
            slots["slot_bytes"] = 2 * max(sizes, default=0)
        return slots | {
            "held_bytes": sum(row.held_bytes for row in rows),
            "forward_bytes": sum(row.forward_bytes for row in rows),
            "backward_bytes": sum(row.backward_bytes for row in rows),
            "gradient_bytes": sum(row.gradient_bytes for row in rows),
            "collective_bytes": sum(row.collective_bytes or 0 for row in rows),
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan in values for JSON."""
        facts = {key: value for key, value in dataclasses.asdict(self.ring).items() if key != "gradients"}
        facts |= {"gradient_route": self.ring.gradients.route, "gradient_travel": self.ring.gradients.travel}
        return {
            "model": self.kind,
            "ring": facts,
            "parameters": [dataclasses.asdict(row) for row in self.parameters],
            "totals": self.totals,
        }

    def __str__(self) -> str:
        return table(self.kind, self.ring, self.parameters, self.totals)

    # -- operations --------------------------------------------------------------------------------------------------

    def _operations(self) -> Iterator[tuple[str, Passes, list[tuple[ModulePlan, Owned, Any]]]]:
        """Yields all rotated operations: title, kind of rotation, and the parameters that travel together."""
        together = {layer: bundle for bundle in self.bundles for layer in bundle.layers}
        modules = {module.name: module for module in self.modules}
        gpu = self.ring.device == "cuda"
        for bundle in self.bundles:
            layers = [modules[name] for name in bundle.layers]
            name = bundle.label if bundle.kind == "mlp" else f"{bundle.label}.({', '.join(bundle.paths)})"
            operation = MLP if bundle.kind == MLP.key else Linears
            members = [member for layer in layers for member in _members(layer, gpu)]
            in_blocks = any(layer.in_blocks for layer in layers)
            yield bundle.title, _passes(layers[0], operation, name, in_blocks), members
        for module in self.modules:
            if module.moved == ROTATED and module.name not in together:
                alone = _operation_of(module)
                divides = None if self.ring.of_operation(alone) is self.ring else self.ring
                members = _members(module, gpu, divides)
                if members:
                    passes = _passes(module, alone, module.label, module.in_blocks)
                    yield module.label, passes, members

    def _row(
        self,
        module: ModulePlan,
        owned: Owned,
        title: str | None,
        passes: Passes | None,
        sent: Traffic,
        slots: int | None = None,
    ) -> ParameterPlan:
        facts = self.ring if passes is None else self.ring.of_operation(passes.operation)
        ranks = facts.ranks
        route = gradient_route = travel = reduce = group = seconds = None
        collective: int | None = 0
        if passes is not None and owned.moved == ROTATED:
            route, _ = facts.route_of(passes)
            gradient_route = "direct" if facts.gradients.direct(route, passes.reduce_dtype) else "chain"
            bias = len(owned.shape) < passes.operation.kind.dims
            narrow = facts.travel == "int8" or (facts.travel == "bfloat16" and passes.compute_dtype.itemsize > 2)
            travel = facts.travel if narrow and not bias and ranks > 1 else _name(passes.compute_dtype)
            if owned.frozen is not None:
                travel = owned.frozen.format
            elif (recipe := module.recipe_of(owned)) is not None:
                travel = recipe.name
            if facts.pulls is not None:
                route, gradient_route = "pull" if facts.pulls else "read", None
            if facts.by_rows(passes):
                route = gradient_route = "rows"
                travel = _name(passes.compute_dtype)
                collective = traffic_of_rows(passes, owned.ring_shape, owned.dim or 0, owned.trained, facts)
            if slots:
                group, seconds = facts.group_of(passes)
                group = ranks if route == "gather" else group
            quantized = gradient_route == "direct" and facts.gradients.travel is not None
            reduce = facts.gradients.travel if quantized else _name(passes.reduce_dtype)
            if route == "rows" and passes.compute_dtype.itemsize < passes.reduce_dtype.itemsize:
                reduce = travel
        elif owned.moved in (GATHERED, REPLICATED) and not facts.emulated and facts.pulls is None:
            route = "all-gather" if owned.dim is not None else None
            gradient_route = "all-reduce"
            travel = None if owned.dim is None else _name(module.compute_dtype)
            reduce = _name(module.reduce_dtype)
            dtypes = module.compute_dtype, module.reduce_dtype
            collective = gathered_traffic(owned.ring_shape, owned.dim, *dtypes, owned.trained, ranks).total
            if owned.sparse:
                collective = None  # depends on the ids of all ranks
        if not owned.trained or facts.pulls is not None:
            gradient_route = reduce = None
        name = f"{module.name}.{owned.key}" if module.name else owned.key
        sizes = () if owned.dim is None else tuple(shard_sizes(owned.ring_shape[owned.dim], self.ring.ranks))
        if owned.frozen is not None:
            sizes = tuple(owned.frozen.shard_rows(self.ring.ranks))
        if facts is not self.ring:
            collective = None  # rows of tokens, which depend on the router
        return ParameterPlan(
            name=name,
            shape=owned.shape,
            dtype=_name(owned.dtype),
            trained=owned.trained,
            tied_to=owned.tied_to,
            module=module.name,
            module_class=module.kind,
            moved=owned.moved,
            bundle=title if owned.moved == ROTATED else None,
            placements=owned.placements,
            cut=owned.dim,
            shard_sizes=sizes,
            route=route,
            gradient_route=gradient_route,
            travel=travel,
            reduce=reduce,
            held_bytes=0 if owned.tied_to else owned.held + _codes_bytes(module, owned, self.ring),
            forward_bytes=sent.forward,
            backward_bytes=sent.backward,
            gradient_bytes=sent.gradients,
            collective_bytes=collective,
            reason=owned.reason,
            wide=owned.wide,
            group=group,
            apart=_apart(module, owned, facts) if group and group > 1 else None,
            slots_bytes=slots or None,
            predicted_seconds=seconds,
        )


def _operation_of(module: ModulePlan) -> type[Operation]:
    """Returns the operation of a single layer."""
    if module.layer == "attention":
        return Linears
    if module.layer == "linear":
        by_outputs = module.cuts["weight"] == (1 if module.transposed else 0)
        return Linears if by_outputs else PartialLinear
    return LinearCrossEntropy if module.layer == "head" else OPERATIONS[module.layer or Convolution.key]


def _passes(module: ModulePlan, operation: type[Operation], name: str, in_blocks: bool) -> Passes:
    return Passes(
        operation=operation,
        name=name,
        weight_dtype=module.parameters[0].dtype,
        compute_dtype=module.compute_dtype,
        reduce_dtype=module.reduce_dtype,
        transposed=module.transposed,
        in_blocks=in_blocks,
    )


def _members(module: ModulePlan, gpu: bool, divides: RingFacts | None = None) -> list[tuple[ModulePlan, Owned, Any]]:
    """Returns the parameters of a module that travel with its rotation, each with its ParameterFacts. divides: the
    ring, if each rank rotates a part of the experts."""
    found = []
    for owned in module.parameters:
        if module.layer == "attention" and owned.moved != ROTATED:
            if owned.key == "in_proj_bias":  # gathered, then split like the three weights that it belongs to
                part = ParameterFacts((owned.shape[0] // 3,), trained=owned.trained)
                found += [(module, owned, part)] * 3
            continue
        if owned.moved == ROTATED and owned.dim is not None:
            shape, frozen, recipe, dim = owned.ring_shape, owned.frozen, module.recipe_of(owned), owned.dim
            if divides is not None and dim == 0:
                shape = (divides.part(owned.shape[0]), *shape[1:])
                frozen = frozen and frozen.with_rows(shape[0])
            elif divides is not None:
                cut = sliced_parameters([owned.key], module.transposed)[owned.key]
                shape, dim = divides.slices(shape, cut), 0
            codes = recipe and recipe.shard_planes(gpu=gpu)
            facts = frozen and frozen.facts
            stored = {"codes": codes, "inputs_first": module.transposed} if codes else {}
            facts = facts or ParameterFacts(shape, dim, trained=owned.trained, **stored)
            found.append((module, owned, facts))
    return found


def _codes_bytes(module: ModulePlan, owned: Owned, facts: RingFacts) -> int:
    """Returns the bytes of the codes that this rank keeps of its shard of a weight."""
    recipe = module.recipe_of(owned)
    if recipe is None or owned.frozen is not None:  # stored codes are the shard
        return 0
    *stack, rows, columns = ParameterFacts(owned.ring_shape, owned.dim).shard(facts.ranks, facts.rank)
    matrix = (columns, rows) if module.transposed else (rows, columns)
    return recipe.memory(*stack, *matrix, gpu=facts.device == "cuda")


def _apart(module: ModulePlan, owned: Owned, facts: RingFacts) -> str | None:
    """Returns in which passes products have one shard each, and why; None: in none."""
    recipe = module.recipe_of(owned)
    if recipe is None or module.layer == "experts":  # those of a group are multiplied one by one
        return None
    whys = {late: recipe.apart(backward=late, gpu=facts.device == "cuda") for late in (False, True)}
    return ", ".join(f"1 in {'backward' if late else 'forward'}: {why}" for late, why in whys.items() if why) or None


def _added(row: ParameterPlan, sent: Traffic) -> ParameterPlan:
    return dataclasses.replace(
        row,
        forward_bytes=row.forward_bytes + sent.forward,
        backward_bytes=row.backward_bytes + sent.backward,
        gradient_bytes=row.gradient_bytes + sent.gradients,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
