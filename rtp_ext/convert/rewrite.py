"""Which module of a model becomes what: the walk of `fully_rotate`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rtp_ext.convert.fast_path import keep_from_fast_path
from rtp_ext.convert.modules.bundled import MIXINS
from rtp_ext.convert.modules.gathered import ForwardScope, make_gathered
from rtp_ext.convert.modules.head import FusedHead, FusedLossModel
from rtp_ext.convert.modules.refused import find_extended, guard_parametrizations
from rtp_ext.convert.modules.shared_input import join
from rtp_ext.convert.modules.whole_embedding import WholeEmbedding
from rtp_ext.convert.scopes import is_inside
from rtp_ext.convert.tensor_parallel import GATHERED, parallel_class, style_of
from rtp_ext.families import blocks
from rtp_ext.families.layers import computes_like
from rtp_ext.nn import (
    Flyweight,
    RotatedConv1d,
    RotatedConv2d,
    RotatedConv3d,
    RotatedEmbedding,
    RotatedExperts,
    RotatedLinear,
    RotatedMultiheadAttention,
)
from rtp_ext.nn._base import RotatedModule
from rtp_ext.nn.linear import RotatedTransposedLinear
from rtp_ext.parameters.live import LiveModule, Tie, mixed_class
from rtp_ext.parameters.wrappers import type_name
from rtp_ext.ring import Ring

logger = logging.getLogger("rtp_ext")

# layer of torch: what it becomes
_DROP_INS: dict[type[nn.Module], type] = {
    nn.Linear: RotatedLinear,
    nn.Embedding: RotatedEmbedding,
    nn.Conv1d: RotatedConv1d,
    nn.Conv2d: RotatedConv2d,
    nn.Conv3d: RotatedConv3d,
    nn.MultiheadAttention: RotatedMultiheadAttention,
}


def _drop_in(part: nn.Module) -> type | None:
    """The rotated class of a layer of torch, or of a subclass that computes like one; None for any other module."""
    return next((rotated for base, rotated in _DROP_INS.items() if computes_like(part, base)), None)


class Rewriter:
    """Converts the modules of one model in place. Refuses, when it is made, what it cannot convert."""

    def __init__(
        self,
        root: nn.Module,
        ring: Ring,
        scopes: Mapping[int, ForwardScope],
        mp_policy: MixedPrecisionPolicy,
        *,
        ignored: set[int],
        in_place: bool,
        bundle: bool | str,
        loss_head: str | None,
    ) -> None:
        """`scopes`: of each module that is to be converted, by id."""
        self.root, self.ring, self.scopes, self.mp_policy = root, ring, scopes, mp_policy
        self.ignored = ignored
        self.bundle, self.loss_head = bundle, loss_head
        self.options: dict[str, Any] = {"in_place": in_place, "mp_policy": mp_policy}
        self.memo: dict[int, nn.Parameter] = {}
        self.counts: Counter[str] = Counter()
        self.unlike: Counter[tuple[str, str]] = Counter()  # subclasses of layers that rotate, which do not
        self.modules = [(name, part) for name, part in root.named_modules() if not is_inside(part)]
        self.tied = _tied_parameters(self.modules)
        # on an emulated ring their shards are plain parameters
        self.inside = {id(part) for _, f in self.modules if isinstance(f, Flyweight) for part in f.modules()}
        self.leftovers: list[nn.Module] = []
        outer = getattr(next(iter(scopes.values()), None), "outer_policy", None)
        self.extended = find_extended(self.modules, ignored, ring, outer)  # ids of parameters
        self.styles = {id(part): style_of(name, part, ring, ignored) for name, part in self.modules}
        self._check_tables()
        _check_ties(self.modules, self.ignored)
        self.fused = self._fused_heads()

    def run(self) -> None:
        guard_parametrizations()
        bundles, shared = self._bundles() if self.bundle else ({}, {})
        if self.extended:  # a compiler would look into their classes
            self.ring.traceable = False
        by_inputs = {id(part.get_submodule(block.spec.down)) for part, block, _ in bundles.values()}
        heads = {id(part.lm_head) for part, _ in self.fused}
        for name, part in self.modules:
            if id(part) in heads:
                self._rotate(part, FusedHead, name)
                self.counts["vocabulary head: fused with the loss"] += 1
            else:
                self._convert(name, part, by_inputs)
        for part, block, label in bundles.values():
            kind = type(part).__name__
            part.__class__ = mixed_class(MIXINS[block.kind], type(part))
            part.bundle(block.spec, recompute=self.bundle == "recompute", name=label)  # type: ignore[operator]
            self.counts[f"{kind}: MLP bundled"] += 1
        for part, names, label in shared.values():
            join(part, names, label)
            self.counts[f"{type(part).__name__}: {', '.join(names)} travel together"] += 1
        for part, kind in self.fused:
            part.__class__ = mixed_class(FusedLossModel, type(part))
            self.counts[f"{kind}: no logits where labels are given"] += 1
        self._gather_leftovers()
        _remember_ties(self.modules)
        for line, count in self.counts.items():
            logger.info("fully_rotate: %d x %s", count, line)
        for (kind, base), count in self.unlike.items():
            logger.warning(
                "fully_rotate: %d x %s: gathered whole while in use, and not rotated, since it does not compute as "
                "%s, of which it is a subclass, does",
                count,
                kind,
                base,
            )

    # -- what is recognised ------------------------------------------------------------------------------------------

    def _own(self, part: nn.Module) -> list[nn.Parameter]:
        """The parameters that are converted along with a module."""
        parts = part.modules() if computes_like(part, nn.MultiheadAttention) else [part]
        return [p for each in parts for p in each._parameters.values() if p is not None]

    def _free(self, layers: list[nn.Module]) -> bool:
        """Whether layers may be cut as their block likes: nobody ignores their parameters or shares them, and none has
        rules of its own."""
        own = [id(parameter) for layer in layers for parameter in layer.parameters()]
        return not any(others.intersection(own) for others in (self.ignored, self.tied, self.extended))

    def _parallel(self, block: nn.Module, paths: Iterable[str], what: str) -> bool:
        """Whether tensor parallelism has cut a layer of a block; its layers rotate one by one then."""
        if not any(self.styles.get(id(block.get_submodule(path))) for path in paths):
            return False
        self.counts[f"{type(block).__name__}: {what} rotate one by one: tensor parallelism has cut them"] += 1
        return True

    def _bundles(self) -> tuple[dict, dict]:
        """MLP blocks, and attention blocks with a shared input, by id."""
        bundles, shared = {}, {}
        for name, part in self.modules:
            label = name or type(part).__name__
            block = blocks.mlp_block(part)
            if (
                block is not None
                and self._free([part.get_submodule(path) for path in block.spec.paths])
                and not self._parallel(part, block.spec.paths, "layers of its MLP")
            ):
                bundles[id(part)] = (part, block, label)
            names = blocks.shared_inputs(part)
            if (
                names is not None
                and self._free([part.get_submodule(path) for path in names])
                and not self._parallel(part, names, ", ".join(names))
            ):
                shared[id(part)] = (part, names, label)
        return bundles, shared

    def _fused_heads(self) -> list[tuple[Any, str]]:
        if self.loss_head is None:
            return []
        found: list[tuple[Any, str]] = []
        for _, part in self.modules:
            if not blocks.causal_model(part):
                continue
            head: Any = part.lm_head
            if not blocks.is_linear(head) or blocks.is_transposed_linear(head):
                raise ValueError(
                    f"fully_rotate: loss_head='fused' expected {type(part).__name__}.lm_head to be a linear layer that "
                    f"has not been converted, got a {type(head).__name__}"
                )
            if self.styles.get(id(head)) is not None:
                raise ValueError(
                    f"fully_rotate: loss_head='fused' expected {type(part).__name__}.lm_head to be a layer that tensor "
                    "parallelism has not cut, got DTensors: leave out loss_head, or the head from the plan of "
                    "parallelize_module"
                )
            if self.ignored.intersection(map(id, head.parameters())):
                raise ValueError(
                    f"fully_rotate: loss_head='fused' expected the parameters of {type(part).__name__}.lm_head to "
                    "rotate, got some of them in ignored_params"
                )
            if self.extended.intersection(map(id, head.parameters())):
                raise ValueError(
                    f"fully_rotate: loss_head='fused' expected plain parameters of {type(part).__name__}.lm_head, got "
                    f"a {type_name(head.weight)}: leave out loss_head"
                )
            found.append((part, type(part).__name__))
        if not found:
            raise ValueError(
                f"fully_rotate: loss_head='fused' expected one of {', '.join(blocks.CAUSAL_MODELS)} of the "
                f"transformers package with its own loss, got a {type(self.root).__name__}; other models can use "
                "nn.RotatedLinearCrossEntropy"
            )
        return found

    # -- one module --------------------------------------------------------------------------------------------------

    def _rotate(self, part: nn.Module, cls: type, name: str, **options: Any) -> None:
        part.__class__ = cls if type(part) in _DROP_INS else mixed_class(cls, type(part))
        self._adopt(part, name, **options)

    def _adopt(self, part: Any, name: str, **options: Any) -> None:
        part._rotate(self.ring, name=name or type(part).__name__, memo=self.memo, **options, **self.options)

    def _convert(self, name: str, part: nn.Module, by_inputs: set[int]) -> None:
        if id(part) in self.inside:
            return
        keep_from_fast_path(part)
        own = self._own(part)
        kind = type(part).__name__
        if not own:
            return
        if isinstance(part, RotatedModule) and part.ring is self.ring:
            return  # converted along with the module around it
        style = self.styles.get(id(part))
        if style == GATHERED:
            self.leftovers.append(part)
        elif style is not None:
            self._replace_parallel(name, part, style)
        elif isinstance(part, RotatedModule) or all(isinstance(parameter, DTensor) for parameter in own):
            self.counts[f"{kind}: already sharded, left alone"] += 1
        elif any(id(parameter) in self.ignored for parameter in own):
            self.counts[f"{kind}: ignored"] += 1
        elif (problem := _table_problem(part)) is not None:
            self._keep_whole(name, part, problem)
        elif any(id(parameter) in self.extended for parameter in own):
            self.leftovers.append(part)
        elif _drop_in(part) is not None or blocks.is_transposed_linear(part) or blocks.is_experts(part):
            self._replace(name, part, by_inputs)
        else:
            self.leftovers.append(part)
            base = next((base for base in _DROP_INS if isinstance(part, base)), None)
            if base is not None and self.ring.mesh is not None:
                self.unlike[kind, f"nn.{base.__name__}"] += 1

    def _replace(self, name: str, part: nn.Module, by_inputs: set[int]) -> None:
        kind = type(part).__name__
        cls: Any = RotatedExperts if blocks.is_experts(part) else _drop_in(part)
        refusal: Callable[[Any], str | None] = getattr(cls, "refusal", _stray_parameters)
        problem = refusal(part)
        options: dict[str, Any] = {}
        if problem is not None:
            logger.warning("fully_rotate: %s is gathered while in use: %s", name, problem)
            self.leftovers.append(part)
            return
        if cls is RotatedEmbedding:
            # a tied table is also somebody's weight [vocabulary, features], cut along its outputs
            options["shard_dim"] = 0 if id(part.weight) in self.tied else 1
        if id(part) in by_inputs:
            options["shard_dim"] = 1
        if cls is None:
            part.__class__ = mixed_class(RotatedTransposedLinear, type(part))
            self._adopt(part, name, **options)
        elif blocks.is_experts(part):
            part.__class__ = mixed_class(RotatedExperts, type(part))
            if self.bundle == "recompute":
                options["recompute"] = True
            self._adopt(part, name, **options)
        else:
            self._rotate(part, cls, name, **options)
        self.counts[f"{kind}: rotated"] += 1

    def _replace_parallel(self, name: str, part: Any, style: str) -> None:
        kind, cls = type(part).__name__, _drop_in(part)
        assert cls is not None, "style_of has looked"
        # of a tied table both owners cut the rows
        options = {"shard_dim": 0 if id(part.weight) in self.tied else 1} if cls is RotatedEmbedding else {}
        self._rotate(part, cls, name, **options)
        part.__class__ = mixed_class(parallel_class(part), type(part))
        part.style = style
        self.counts[f"{kind}: rotated, {style} tensor parallel"] += 1

    def _keep_whole(self, name: str, part: Any, problem: str) -> None:
        part.__class__ = mixed_class(WholeEmbedding, type(part))
        part.keep_whole(self.ring, name or type(part).__name__, self.mp_policy, self.memo)
        logger.warning("fully_rotate: %s stays whole on every rank: %s; its gradient is averaged", name, problem)

    def _check_tables(self) -> None:
        """Before anything is converted: what embeddings write in forward, or count, gathered copies cannot show."""
        for name, part in self.modules:
            own = self._own(part)
            if id(part) in self.inside or all(id(p) in self.ignored or isinstance(p, DTensor) for p in own):
                continue
            problem = _table_problem(part)
            special = any(id(parameter) in self.extended for parameter in own)
            if problem is not None and (special or not WholeEmbedding.fits(part)):
                raise ValueError(
                    f"fully_rotate: {name or 'the model'} ({type(part).__name__}): {problem}: expected an nn.Embedding "
                    "with the forward of torch and no parameters but a plain weight, or these in ignored_params"
                )

    def _gather_leftovers(self) -> None:
        for part in self.leftovers:
            kind = type(part).__name__
            if self.ring.mesh is None:
                self.counts[f"{kind}: left whole (emulated ring)"] += 1
            else:
                make_gathered(part, self.ring, self.scopes[id(part)], self.memo)
                self.counts[f"{kind}: sharded, gathered while in use"] += 1


def _stray_parameters(layer: nn.Module) -> str | None:
    """Why a layer of weight and bias cannot rotate, such as one with weight_norm or pruning; None if it can."""
    stray = layer._parameters.keys() - {"weight", "bias"}
    return f"it has parameters of its own: {', '.join(sorted(stray))}" if stray else None


def _table_problem(part: nn.Module) -> str | None:
    """Why the table of an embedding can be neither rotated nor gathered; None if it can, and for other modules."""
    return RotatedEmbedding.refusal(part) if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) else None


def _tied_parameters(modules: list[tuple[str, nn.Module]]) -> set[int]:
    """Ids of parameters that more than one module owns."""
    owners = Counter(
        id(parameter) for _, part in modules for parameter in part._parameters.values() if parameter is not None
    )
    return {parameter for parameter, count in owners.items() if count > 1}


def _check_ties(modules: list[tuple[str, Any]], ignored: set[int]) -> None:
    """A parameter cannot stay whole for one of its owners and be sharded for another."""
    whole: dict[int, str] = {}
    sharded: dict[int, str] = {}
    for name, part in modules:
        own = [id(parameter) for parameter in part._parameters.values() if parameter is not None]
        (whole if _table_problem(part) is not None or ignored.intersection(own) else sharded).update(
            dict.fromkeys(own, name)
        )
    for parameter in whole.keys() & sharded.keys():
        raise ValueError(
            f"fully_rotate: {sharded[parameter]} shares a parameter with {whole[parameter]}, whose parameters stay "
            "whole: expected all modules that share it to be rotated, or the parameter in ignored_params"
        )


def _remember_ties(modules: list[tuple[str, nn.Module]]) -> None:
    """Lets modules that share a parameter share it still after one of them has been given another."""
    ties: dict[int, Tie] = {}
    tied = _tied_parameters(modules)
    for _, part in modules:
        for name, parameter in part._parameters.items():
            if isinstance(part, LiveModule) and id(parameter) in tied:
                part.join_tie(name, ties.setdefault(id(parameter), Tie()))
