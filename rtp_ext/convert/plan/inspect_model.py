"""The first phase of a conversion: it plans every module, changes nothing and sends nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from rtp_ext._native import shard_sizes
from rtp_ext.convert.adapters import adapted_modules, adapter_modules
from rtp_ext.convert.plan.frozen_blocks import FrozenBlocks, is_taken, taken_parameters
from rtp_ext.convert.plan.kept import EMULATED, Kept
from rtp_ext.convert.plan.layers import (
    drop_in,
    extended_parameters,
    layer_of,
    own_parameters,
    stray_parameters,
    table_problem,
    tied_parameters,
    unlike,
)
from rtp_ext.convert.plan.request import Request
from rtp_ext.convert.plan.rotation_plan import (
    GATHERED,
    IGNORED,
    REPLICATED,
    ROTATED,
    BundlePlan,
    ModulePlan,
    Owned,
    RotationPlan,
)
from rtp_ext.convert.plan.scaled_products import ScaledProducts, inputs_first, routers
from rtp_ext.convert.scopes import is_inside
from rtp_ext.convert.tensor_parallel import GATHERED as REPLICATED_STYLE
from rtp_ext.convert.tensor_parallel import is_divided, on_tensor_mesh, style_of
from rtp_ext.families import blocks
from rtp_ext.families.float8_layers import is_in_8_bits
from rtp_ext.families.recognised import is_experts
from rtp_ext.families.same_forward import has_same_forward
from rtp_ext.families.sources import modules_read_by
from rtp_ext.nn import RotatedEmbedding, RotatedExperts
from rtp_ext.nn.attention import SHARD_DIMS as ATTENTION_DIMS
from rtp_ext.nn.grouped import RotatedGroupedExperts
from rtp_ext.parameters.frozen import FrozenWeight
from rtp_ext.parameters.sharded_module import ShardedModule
from rtp_ext.parameters.sharding import type_name

SCALAR = "a scalar has no dimension to cut"
IN_IGNORED = "in ignored_params"
SLICED = "its experts are cut along their hidden features"
BESIDE_IGNORED = "its module has another parameter in ignored_params"


def inspect_model(request: Request) -> RotationPlan:
    """Plans the conversion of a model. Changes nothing, and takes parameters on the meta device."""
    return Inspection(request).plan()


class Inspection:
    """The planning of one model. Unknown modules are gathered; `validate` refuses those that cannot be converted."""

    def __init__(self, request: Request) -> None:
        self.request, self.facts = request, request.place.facts
        self.named = list(request.root.named_modules())
        self.modules = [(name, part) for name, part in self.named if not is_inside(part)]
        self.tied = tied_parameters(self.modules)
        mesh = request.place.tensor_mesh
        self.styles = {id(part): style_of(part, mesh, request.ignored) for _, part in self.modules}
        attention = (part for _, part in self.modules if has_same_forward(part, nn.MultiheadAttention))
        heads = set(map(id, blocks.vocabulary_heads(part for _, part in self.modules)))
        self.projections = {id(part.out_proj) for part in attention}  # type: ignore[union-attr]
        adapters = adapter_modules(request.root)
        self.in_blocks = FrozenBlocks(request, self.tied, heads, self.projections, adapters)
        wide = dict.fromkeys(self.projections, "attention of torch calls it")
        wide |= dict.fromkeys(heads, "it is the vocabulary head") | dict.fromkeys(adapters, "it belongs to an adapter")
        wide |= dict.fromkeys(routers(self.modules), "it chooses experts")
        wide |= {id(part): "an adapter changes its parameters" for part in adapted_modules(request.root)}
        self.scaled = ScaledProducts(request, self.tied, wide, self.projections)
        self.extended = extended_parameters(self.modules, request.ignored) - taken_parameters(self.modules)
        for part in (part for _, part in self.modules if is_in_8_bits(part) and self.scaled.of(part)):
            self.extended -= set(map(id, own_parameters(part).values()))
        self.cut: dict[int, tuple[int, str]] = {}  # by id of a tied parameter: dimension and first layer that rotates
        self.kept = Kept(request.root, self.facts)
        self.first, self.names = self.kept.first, self.kept.names
        self.unrotated = self._kept_from_rotating()
        self.notes: list[str] = []

    def plan(self) -> RotationPlan:
        bundles = self._bundles() if self.request.options.bundle else []
        heads = self._heads()
        down = {layer for bundle in bundles if bundle.kind == "mlp" for layer in bundle.layers[-1:]}
        found: dict[str, ModulePlan] = {}
        for name, part in self.named:
            module = self._module(name, part, down, {name for _, name in heads})
            if module is not None and name not in found:
                found[name] = module
                if module.layer == "attention" and not is_inside(part) and not isinstance(part, ShardedModule):
                    out = self.names[id(part.out_proj)]
                    found[out] = self._rotated(out, part.out_proj, "linear", {"weight": 0, "bias": 0})
        order = {name: place for place, (name, _) in enumerate(self.named)}
        return RotationPlan(
            ring=self.facts,
            modules=tuple(sorted(found.values(), key=lambda module: order[module.name])),
            bundles=tuple(
                sorted([*self.kept.bundles(), *bundles], key=lambda bundle: (order[bundle.name], bundle.kind))
            ),
            fused=tuple(sorted([*self.kept.fused(), *(name for name, _ in heads)], key=order.__getitem__)),
            kind=type(self.request.root).__name__,
            notes=tuple(self.notes),
        )

    def _kept_from_rotating(self) -> dict[int, str]:
        """Returns why modules are gathered that could rotate, by id: the caller asks for it, or another module reads
        their parameters itself, which needs whole ones. Weights in 4 bits and those cut by tensor parallelism have no
        whole values to gather."""
        found = dict.fromkeys(self.request.gathered, "the option gather names it")
        if not self.request.trains:  # other ranks read the shards
            found |= {id(part): "an adapter changes its parameters" for part in adapted_modules(self.request.root)}
        for _, part in self.modules:
            for read in modules_read_by(part):
                if not is_taken(read) and self.styles.get(id(read)) is None:
                    found.setdefault(id(read), f"{type(part).__name__} reads its parameters without calling it")
        return found

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _is_free(self, block: nn.Module, layers: list[nn.Module], what: str) -> bool:
        """Returns whether layers can be sharded as their block requires: no other module shares their parameters, and
        none is ignored, a tensor subclass with its own rules, or sharded by tensor parallelism."""
        own = [id(parameter) for layer in layers for parameter in layer.parameters()]
        taken = any(others.intersection(own) for others in (self.request.ignored, self.tied, self.extended))
        gathered = (id(layer) in self.unrotated or self.scaled.refusal(layer) is not None for layer in layers)
        if taken or any(gathered):
            return False
        parallel = any(self.styles.get(id(layer)) for layer in layers)
        if parallel:
            kind = type(block).__name__
            self.notes.append(f"{kind}: {what} rotate one by one: tensor parallelism has cut them")
        return not parallel

    def _bundles(self) -> list[BundlePlan]:
        found = []
        recompute = self.request.options.bundle == "recompute"
        for name, part in self.modules:
            label = name or type(part).__name__
            block = blocks.mlp_block(part)
            if block is not None:
                layers = [part.get_submodule(path) for path in block.spec.paths]
                if not self._is_free(part, layers, "layers of its MLP"):
                    continue
                if any(map(self._recipe_name, layers)):
                    self.notes.append(f"{type(part).__name__}: layers of its MLP rotate one by one: products in 8 bits")
                    if block.spec.gate is not None:
                        found += self._joined(name, part, label, (block.spec.gate, block.spec.up))
                elif (problem := self.in_blocks.bundle(layers)) is not None:
                    self.notes.append(f"{type(part).__name__}: layers of its MLP rotate one by one: {problem}")
                else:
                    names = tuple(self.names[id(layer)] for layer in layers)
                    found.append(BundlePlan("mlp", name, label, tuple(block.spec.paths), names, recompute, block))
            for paths in blocks.shared_inputs(part) if block is None else ():
                if self._is_free(part, [part.get_submodule(path) for path in paths], ", ".join(paths)):
                    found += self._joined(name, part, label, paths)
        return found

    def _joined(self, name: str, part: nn.Module, label: str, paths: tuple[str, ...]) -> list[BundlePlan]:
        """Returns the bundle of layers with one input; none where their weights do not travel alike."""
        layers = [part.get_submodule(path) for path in paths]
        if any(map(is_taken, layers)) or len({self._recipe_name(layer) for layer in layers}) > 1:
            return []
        names = tuple(self.names[id(layer)] for layer in layers)
        return [BundlePlan("shared input", name, label, paths, names)]

    def _recipe_name(self, part: nn.Module) -> str | None:
        keys, layer = (own_parameters(part), "experts") if is_experts(part) else (["weight"], "linear")
        recipe = None if any(self.in_blocks.weight(part, key, layer) for key in keys) else self.scaled.of(part)
        return None if recipe is None else recipe.name

    def _heads(self) -> list[tuple[str, str]]:
        """Returns the names of models that will compute head and loss as one operation, and of their heads."""
        if self.request.options.loss_head is None:
            return []
        models: list[tuple[str, Any]] = [(name, part) for name, part in self.modules if blocks.causal_model(part)]
        heads = [(name, id(model.lm_head)) for name, model in models]
        return [(name, self.names[head]) for name, head in heads if head in self.names and head not in self.unrotated]

    # -- one module --------------------------------------------------------------------------------------------------

    def _module(self, name: str, part: Any, down: set[str], heads: set[str]) -> ModulePlan | None:
        if is_inside(part) or isinstance(part, ShardedModule) or id(part) in self.kept.inside:
            return self.kept.module(name, part)
        own = own_parameters(part)
        if not own:
            return None
        style = self.styles[id(part)]
        several = part.modules() if has_same_forward(part, nn.MultiheadAttention) else [part]
        ids = {id(p) for each in several for p in own_parameters(each).values()}
        if style == REPLICATED_STYLE:
            return self._gathered(name, part, "tensor parallelism has replicated it", style)
        if style is not None:
            return self._parallel(name, part, style)
        if is_divided(part, self.request.place.column) and not ids & self.request.ignored:
            problem = self.unrotated.get(id(part)) or RotatedGroupedExperts.refusal(part)
            if problem is not None:  # refused
                return self._gathered(name, part, problem, notice="refused")
            return self._rotated(name, part, "experts", {})
        if all(isinstance(parameter, DTensor) for parameter in own.values()):
            return self._ignored(name, part)
        if ids & self.request.ignored:
            return self._ignored(name, part)
        if (problem := table_problem(part)) is not None:
            return self._whole(name, part, problem)
        if (special := next((p for p in own.values() if id(p) in self.extended), None)) is not None:
            return self._gathered(name, part, f"a {type_name(special)} says itself how its shards travel")
        if id(part) in self.unrotated:
            return self._gathered(name, part, self.unrotated[id(part)], notice="kept")
        if name in heads:
            transposed = blocks.is_transposed_linear(part)
            return self._rotated(name, part, "head", {"weight": int(transposed), "bias": 0}, transposed=transposed)
        if is_experts(part):
            problem = RotatedExperts.refusal(part)
            if problem is not None:
                return self._gathered(name, part, problem, notice="refused")
            cuts = RotatedExperts.cuts(part, self.facts.places)
            return self._rotated(name, part, "experts", cuts, transposed=inputs_first(part))
        if is_taken(part):
            return self._rotated(name, part, "linear", {})
        if (problem := self.scaled.refusal(part)) is not None:
            return self._gathered(name, part, problem, notice="unlike")
        by_inputs = name in down
        if blocks.is_transposed_linear(part):
            problem = stray_parameters(part)
            if problem is not None:
                return self._gathered(name, part, problem, notice="refused")
            cuts = {"weight": 0 if by_inputs else 1, "bias": 0}
            return self._rotated(name, part, "linear", cuts, transposed=True)
        cls: Any = drop_in(part)
        if cls is None:
            base = unlike(part)
            if base is None:
                return self._gathered(name, part, "it is not a layer that rotates")
            why = f"it does not compute as nn.{base.__name__}, of which it is a subclass, does"
            if type(part) is base:
                why = f"its forward is not that of nn.{base.__name__}: it was replaced on the instance"
            return self._gathered(name, part, why, notice="unlike")
        problem = getattr(cls, "refusal", stray_parameters)(part)
        if problem is not None:
            return self._gathered(name, part, problem, notice="refused")
        return self._rotated(name, part, layer_of(cls), self._cuts(part, cls, by_inputs))

    def _cuts(self, part: Any, cls: type, by_inputs: bool) -> dict[str, int]:
        """Returns the dimension along which each parameter is sharded, where it is not the first."""
        if issubclass(cls, RotatedEmbedding):
            # a tied table is also the weight [vocabulary, features] of a head, cut along its outputs
            return {"weight": 0 if id(part.weight) in self.tied else 1}
        if layer_of(cls) == "attention":
            return ATTENTION_DIMS
        return {"weight": 1} if by_inputs else {}

    def _rotated(
        self,
        name: str,
        part: Any,
        layer: str,
        cuts: dict[str, int],
        *,
        transposed: bool = False,
        style: str | None = None,
    ) -> ModulePlan:
        may_gather = style is None and layer != "head" and not is_taken(part) and id(part) not in self.projections
        if may_gather and not self.facts.emulated and (reason := self._cut_otherwise(name, part, cuts)) is not None:
            return self._gathered(name, part, reason, notice="kept")
        rows = []
        sliced = layer == "experts" and any(cuts.values())
        takes = layer == "linear" and not transposed and not cuts.get("weight")
        takes = takes or (layer == "experts" and not sliced)
        recipe = self._recipe_name(part) if takes and not is_divided(part, self.request.place.column) else None
        for key, parameter in own_parameters(part).items():
            moved, dim, reason = self.kept.moved(part, key, cuts.get(key, 0))
            wide = frozen = None
            if moved == ROTATED:
                wide, frozen = self.in_blocks.wide(part, key, layer), self.in_blocks.weight(part, key, layer)
                if sliced and frozen is not None:
                    wide, frozen = SLICED, None
                multiplied = parameter.dim() == 3 if layer == "experts" else key == "weight"
                if frozen is None and recipe is None and multiplied:
                    wide = wide or self.scaled.wide(part)
                    if wide is None and layer == "experts" and self.scaled.recipe is not None:
                        wide = SLICED if sliced else "the other weight of its experts is in blocks"
                elif recipe is not None and multiplied and not self.request.trains:
                    frozen = self.scaled.stored(recipe, parameter, transposed)
            rows.append(self._owned(name, key, parameter, moved, dim, reason, wide=wide, frozen=frozen))
        return self._made(name, part, ROTATED, rows, layer=layer, transposed=transposed, style=style, recipe=recipe)

    def _cut_otherwise(self, name: str, part: Any, cuts: dict[str, int]) -> str | None:
        """Returns why a layer cannot rotate with the shards that another one has of a parameter; None if it can."""
        tied = {key: parameter for key, parameter in own_parameters(part).items() if id(parameter) in self.tied}
        for key, parameter in tied.items():
            dim, other = self.cut.get(id(parameter), (cuts.get(key, 0), name))
            if dim != cuts.get(key, 0):
                return f"{other}, with which it shares its {key}, cuts it along dimension {dim}"
        for key, parameter in tied.items():
            self.cut.setdefault(id(parameter), (cuts.get(key, 0), name))
        return None

    def _parallel(self, name: str, part: Any, style: str) -> ModulePlan:
        cls = drop_in(part)
        if cls is None:  # refused
            return self._gathered(name, part, "tensor parallelism has cut it", style)
        return self._rotated(name, part, layer_of(cls), self._cuts(part, cls, False), style=style)

    def _gathered(
        self, name: str, part: nn.Module, reason: str, style: str | None = None, *, notice: str | None = None
    ) -> ModulePlan:
        rows = []
        for key, parameter in own_parameters(part).items():
            if self.facts.emulated:
                rows.append(self._owned(name, key, parameter, REPLICATED, None, EMULATED))
            elif parameter.dim() == 0:
                rows.append(self._owned(name, key, parameter, REPLICATED, None, SCALAR))
            else:
                dim = self.cut.get(id(parameter), (0, ""))[0]
                rows.append(self._owned(name, key, parameter, GATHERED, dim, reason))
        moved = REPLICATED if self.facts.emulated else GATHERED
        return self._made(name, part, moved, rows, style=style, reason=reason, notice=notice)

    def _whole(self, name: str, part: Any, problem: str) -> ModulePlan:
        rows = [
            self._owned(name, key, parameter, REPLICATED, None, problem, sparse=part.sparse)
            for key, parameter in own_parameters(part).items()
        ]
        return self._made(name, part, REPLICATED, rows, layer="whole embedding", reason=problem)

    def _ignored(self, name: str, part: nn.Module) -> ModulePlan:
        rows = []
        for key, parameter in own_parameters(part).items():
            if id(parameter) in self.request.not_ours or isinstance(parameter, DTensor):
                rows.append(self._owned(name, key, parameter, IGNORED, None, IN_IGNORED))
            else:
                rows.append(self._owned(name, key, parameter, REPLICATED, None, BESIDE_IGNORED, placed=False))
        return self._made(name, part, IGNORED, rows)

    def _made(
        self,
        name: str,
        part: nn.Module,
        moved: str,
        rows: list[Owned],
        *,
        layer: str | None = None,
        transposed: bool = False,
        style: str | None = None,
        reason: str | None = None,
        notice: str | None = None,
        recipe: str | None = None,
    ) -> ModulePlan:
        plain = moved == IGNORED or (self.facts.emulated and moved == REPLICATED)
        return ModulePlan(
            name=name,
            kind=type(part).__name__,
            moved=moved,
            layer=layer,
            parameters=tuple(rows),
            policy=None if plain else self.request.mp_policy,
            transposed=transposed,
            style=style,
            recipe=recipe,
            reason=reason,
            notice=notice,
            is_new=True,
        )

    def _owned(
        self,
        name: str,
        key: str,
        parameter: Any,
        moved: str,
        dim: int | None,
        reason: str | None,
        *,
        sparse: bool = False,
        placed: bool = True,
        wide: str | None = None,
        frozen: FrozenWeight | None = None,
    ) -> Owned:
        full = f"{name}.{key}" if name else key
        first = self.first.get(id(parameter), full)
        shape = whole = () if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
        over_tensor = None
        if on_tensor_mesh(parameter, self.request.place.tensor_mesh):
            over_tensor, whole = parameter.placements[0], tuple(parameter._local_tensor.shape)
        placements: tuple[Placement, ...] = ()
        if frozen is not None:
            shape, whole = frozen.shape, frozen.packed_shape
        if moved == IGNORED:
            placements = tuple(parameter.placements) if isinstance(parameter, DTensor) else ()
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            held = 0 if nn.parameter.is_lazy(local) else local.numel() * local.element_size()
        else:
            stored = parameter.dtype if frozen is None else torch.uint8
            placements, held = self._laid_out(shape, whole, dim, stored, over_tensor)
            placements = placements if placed and not sparse else ()
        return Owned(
            key=key,
            shape=shape,
            ring_shape=whole,
            dtype=parameter.dtype if frozen is None else frozen.dtype,
            trained=parameter.requires_grad,
            moved=moved,
            dim=dim,
            placements=tuple(map(repr, placements)),
            held=held,
            tied_to=None if first == full else first,
            reason=reason,
            sparse=sparse,
            frozen=frozen,
            wide=wide,
        )

    def _laid_out(
        self,
        shape: tuple[int, ...],
        whole: tuple[int, ...],
        dim: int | None,
        dtype: torch.dtype,
        over_tensor: Placement | None,
    ) -> tuple[tuple[Placement, ...], int]:
        """Returns the placements of a parameter on the mesh of parameters, and this rank's bytes of it."""
        facts, own = self.facts, list(whole)
        if dim is not None:
            own[dim] = shard_sizes(whole[dim], facts.ranks)[facts.rank]
        if facts.emulated:
            return (), _bytes(own, dtype)
        over_ring: Placement = Replicate() if dim is None else Shard(dim)
        over_replicas: tuple[Placement, ...] = (Replicate(),) if self.request.place.has_replicas else ()
        if over_replicas:
            found = self.request.outer.placement_over(facts.replicas, shape, dim, facts.ranks)
            over_replicas = () if found is None else (found,)
            cut = getattr(found, "dim", None)
            if cut is not None:
                own[cut] = shard_sizes(own[cut], facts.replicas)[facts.replica]
        over_tensors = () if self.request.place.tensor_mesh is None else (over_tensor or Replicate(),)
        return (*over_replicas, *over_tensors, over_ring), _bytes(own, dtype)


def _bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    return count
