"""Which linear layers and experts a conversion computes in 8 bits."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from rtp_ext._native import shard_sizes
from rtp_ext.convert.plan.layers import drop_in, own_parameters, stray_parameters
from rtp_ext.convert.plan.request import Request
from rtp_ext.families.float8_layers import NONE, is_in_8_bits, recipe_name
from rtp_ext.families.recognised import grouped_experts, is_experts
from rtp_ext.nn import RotatedExperts, RotatedLinear
from rtp_ext.outer import ZeroOuter
from rtp_ext.parameters.coded import CodedWeight
from rtp_ext.recipes import Recipe
from rtp_ext.recipes import recipe as recipe_of


class ScaledProducts:
    """The decisions of one conversion.

    Args:
        tied: ids of parameters that several modules share.
        wide: reasons why modules stay wide, by id. read: ids of layers whose parameters another module reads.
        ranks: of the ring, and those of tensor parallelism. gpu: products run on a GPU.
    """

    def __init__(self, request: Request, tied: Collection[int], wide: dict[int, str], read: Collection[int]) -> None:
        facts, name = request.place.facts, request.options.recipe
        self.recipe: Recipe | None = None if name is None else recipe_of(name)
        self.recomputes = request.options.bundle == "recompute"
        self.tied, self._wide, self._read, self._other = tied, wide, read, conflict(request)
        self.ranks, self.gpu, self.parallel = facts.ranks, facts.device == "cuda", facts.tensor_ranks > 1

    def of(self, part: nn.Module) -> Recipe | None:
        """Returns the recipe of a module's products; None: they are wide, or those of the module itself."""
        if is_in_8_bits(part):
            return None if self.refusal(part) is not None else self._of_torchao(recipe_name(part) or "")
        takes = drop_in(part) is RotatedLinear or is_experts(part)
        return self.recipe if takes and self.wide(part) is None else None

    def _of_torchao(self, name: str) -> Recipe:
        """Returns the recipe of a layer that torchao has converted by one of this name; it may be asked for with one
        scale of all shards, which is torchao's."""
        if self.recipe is not None and self.recipe.forward.whole and name == "float8_tensorwise":
            return self.recipe
        return recipe_of(name)

    def stored(self, recipe: str, weight: Any, inputs_first: bool) -> CodedWeight:
        """Returns how a weight is stored that is multiplied in 8 bits in forwards only."""
        return CodedWeight(
            recipe, tuple(weight.shape), weight.dtype, ranks=self.ranks, gpu=self.gpu, inputs_first=inputs_first
        )

    def refusal(self, part: nn.Module) -> str | None:
        """Returns why a module that torchao computes in 8 bits does not rotate; None for any other one."""
        if not is_in_8_bits(part):
            return None
        name = recipe_name(part)
        if name is None:
            return NONE
        if self._other is not None:
            return f"products in 8 bits cannot be combined with {self._other}"
        if id(part) in self._read:
            return self._wide[id(part)]
        if is_experts(part):
            return RotatedExperts.refusal(part) or self._wide_experts(part, recipe_of(name))
        return stray_parameters(part) or self._unfit(part, recipe_of(name))

    def wide(self, part: nn.Module) -> str | None:
        """Returns why the products of a module that multiplies by a matrix stay wide although a recipe is given."""
        own = own_parameters(part).values()
        if self.recipe is not None and not self.parallel and any(isinstance(each, DTensor) for each in own):
            return "other code has divided it among ranks"
        if self.recipe is not None and is_experts(part):
            return self._wide_experts(part, self.recipe)
        weight: Any = own_parameters(part).get("weight")
        if self.recipe is None or weight is None or weight.dim() != 2 or isinstance(part, nn.Embedding):
            return None
        if id(part) in self._wide:
            return self._wide[id(part)]
        if drop_in(part) is not RotatedLinear:
            return "it is not a linear layer [out_features, in_features]"
        return self._unfit(part, self.recipe)

    def _wide_experts(self, part: nn.Module, recipe: Recipe) -> str | None:
        own = own_parameters(part)
        if id(part) in self._wide:
            return self._wide[id(part)]
        if self.recomputes:
            return "bundle='recompute' computes hidden values of experts again, for which other codes travel"
        if (reason := self._cut_or_shared(own.values())) is not None:
            return reason
        matrices = (weight.shape[1:] for weight in own.values() if weight.dim() == 3)
        if inputs_first(part):
            matrices = (matrix[::-1] for matrix in matrices)
        refusals = (recipe.refusal(*matrix, gpu=self.gpu) for matrix in matrices)
        return next((reason for reason in refusals if reason is not None), None)

    def _unfit(self, part: nn.Module, recipe: Recipe) -> str | None:
        weight: Any = part._parameters["weight"]
        if (reason := self._cut_or_shared([weight])) is not None:
            return reason
        outputs, inputs = weight.shape
        return recipe.refusal(outputs, inputs, tuple(shard_sizes(outputs, self.ranks)), gpu=self.gpu)

    def _cut_or_shared(self, weights: Iterable[Any]) -> str | None:
        if self.parallel:
            return "tensor parallelism has cut the model"
        return "it is shared with another module" if any(id(each) in self.tied for each in weights) else None


def inputs_first(experts: nn.Module) -> bool:
    """Returns whether weights of experts are stored [experts, inputs, outputs]."""
    return bool(getattr(experts, "is_transposed", False))


def conflict(request: Request) -> str | None:
    """Returns the option with which products in 8 bits cannot be combined; else None."""
    place = request.place
    if place.in_place:
        return "in_place=True"
    if request.keeps_on_host and request.trains:
        return "offload_policy=CPUOffloadPolicy()"
    if isinstance(request.outer, ZeroOuter):
        return "outer.ZeroOuter(): the shard of a ring is not whole on a rank between two passes"
    return f"graphs={place.ring.options.graphs!r}" if place.ring is not None and place.ring.graphs.on else None


def routers(modules: Iterable[tuple[str, nn.Module]]) -> set[int]:
    """Returns the ids of linear layers that choose experts: those beside experts, or in a module beside them, with an
    output for each."""
    found: set[int] = set()
    for _, part in modules:
        stacks = (child for child in part.children() if is_experts(child) or grouped_experts(child) is not None)
        counts = {next(child.parameters()).shape[0] for child in stacks}
        beside = (each for child in part.children() for each in (child, *child.children()))
        layers = (each for each in beside if isinstance(each, nn.Linear))
        found.update(id(layer) for layer in layers if layer.out_features in counts)
    return found
