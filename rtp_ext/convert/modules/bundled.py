"""MLP blocks of other models whose weights rotate as a bundle."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rtp_ext.families.blocks import MLPSpec
from rtp_ext.functional.mlp import MLP
from rtp_ext.nn.linear import RotatedLinear, RotatedTransposedLinear
from rtp_ext.nn.mlp import bundled_mlp, mlp_operation
from rtp_ext.parameters.sharded_module import ShardedModule, mixin_of
from rtp_ext.ring import Prepared
from rtp_ext.ring.registry import register

logger = logging.getLogger("rtp_ext")

OWN_HOOKS = "_rtp_hook"  # attribute of hooks that bundling may skip


def unhooked(module: nn.Module) -> bool:
    """Returns whether a module has neither hooks of other code nor a replaced forward."""
    hooks = (
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
        *module._backward_pre_hooks.values(),
    )
    return "forward" not in module.__dict__ and all(hasattr(hook, OWN_HOOKS) for hook in hooks)


class BundledMLP(ShardedModule):
    """Mixin of MLP blocks of other models; the block's own class comes second.

    Where the block has changed since its conversion (an adapter around a layer, another activation), or a module that
    the bundle does not call has hooks, the block's own forward runs, its layers rotate one by one, and a warning is
    logged: such a change has to happen on every rank.
    """

    mlp_spec: MLPSpec | None = None
    mlp_recompute: bool
    qualified_name: str

    def bundle(self, spec: MLPSpec, *, recompute: bool, name: str) -> None:
        self.mlp_recompute, self.qualified_name = recompute, name
        self.__dict__["mlp_spec"] = spec
        self.__dict__["mlp_seen"] = self._parts(spec)  # not by setattr, which would register modules
        self.__dict__["mlp_intact"] = True
        self.__dict__["_prepared"] = Prepared(sharded=True)
        self.__dict__["_rtp_number"] = register(self)

    def _parts(self, spec: MLPSpec) -> list[Any]:
        """Returns the modules between the layers, and the names of the block's modules."""
        found: list[Any] = [tuple(self._modules)]  # type: ignore[attr-defined]
        for path in spec.between:
            part: Any = self
            for name in path.split("."):
                part = getattr(part, name, None)
            found.append(part)
        return found

    @property
    def intact(self) -> bool:
        spec = self.mlp_spec
        if spec is None:  # a slice of an nn.Sequential
            return False
        block: Any = self
        names, *between = self._parts(spec)
        seen = self.__dict__["mlp_seen"]
        intact = (
            names == seen[0]
            and all(part is before for part, before in zip(between, seen[1:], strict=True))
            and all(_replaceable(block, path) for path in spec.paths)
            and all(unhooked(part) for path in spec.between for part in _along(block, path))
        )
        if intact != self.__dict__["mlp_intact"]:
            self.__dict__["mlp_intact"] = intact
            logger.warning(
                "%s: %s; this has to be so on every rank",
                self.qualified_name,
                "rotates as a bundle again" if intact else "was changed or hooked into, and rotates layer by layer",
            )
        return intact

    def is_intact(self) -> bool:
        return self.intact

    is_intact._dynamo_marked_constant = True  # type: ignore[attr-defined]  # evaluated when a graph is compiled

    def _operation(self, key: str = "") -> MLP:
        assert self.mlp_spec is not None
        block: Any = self
        options: dict[str, Any] = {"name": self.qualified_name, "prepared": self.__dict__["_prepared"]}
        return mlp_operation(block, self.mlp_spec, recompute=self.mlp_recompute, **options)

    def bundled(self, x: torch.Tensor) -> torch.Tensor:
        assert self.mlp_spec is not None
        return bundled_mlp(self, self.mlp_spec, x)


def _along(block: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yields the modules on a path below a block."""
    part: Any = block
    for name in path.split("."):
        part = getattr(part, name, None)
        if isinstance(part, nn.Module):
            yield part


def _replaceable(block: nn.Module, path: str) -> bool:
    """Returns whether a bundle may skip the calls of the layer at `path`, and of the modules above it in the block:
    none of them has hooks."""
    parts = list(_along(block, path))
    layer = parts[-1] if parts else None
    rotated = mixin_of(layer) is RotatedLinear or isinstance(layer, RotatedTransposedLinear)
    return rotated and all(map(unhooked, parts))


class BundledForward(BundledMLP):
    """A block whose forward is the MLP alone."""

    def forward(self, *arguments: torch.Tensor, **keywords: torch.Tensor) -> torch.Tensor:
        (x,) = arguments or keywords.values()  # one, whatever its name
        return self.bundled(x) if self.is_intact() else super().forward(x)  # type: ignore[misc]


class BundledDropoutForward(BundledMLP):
    """A block whose forward ends with `self.dropout`."""

    def forward(self, *arguments: torch.Tensor, **keywords: torch.Tensor) -> torch.Tensor:
        (x,) = arguments or keywords.values()
        if not self.is_intact():
            return super().forward(x)  # type: ignore[misc]
        return self.dropout(self.bundled(x))  # type: ignore[attr-defined]


class BundledBertLayer(BundledMLP):
    """A layer of BERT's family: an MLP spread over `intermediate` and `output`, then a residual and a norm."""

    def feed_forward_chunk(self, attention_output: torch.Tensor) -> torch.Tensor:
        if not self.is_intact():
            return super().feed_forward_chunk(attention_output)  # type: ignore[misc]
        output: Any = self.output  # type: ignore[attr-defined]
        return output.LayerNorm(output.dropout(self.bundled(attention_output)) + attention_output)


class BundledTransformerLayer(BundledMLP):
    """nn.TransformerEncoderLayer and nn.TransformerDecoderLayer: dropout between the layers, and another at the end."""

    def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
        inner: Any = self.dropout  # type: ignore[attr-defined]
        if not self.is_intact() or type(inner) is not nn.Dropout or (inner.training and inner.p > 0):
            return super()._ff_block(x)  # type: ignore[misc]
        last: Any = self.dropout3 if hasattr(self, "dropout3") else self.dropout2  # type: ignore[attr-defined]
        return last(self.bundled(x))


# The class for each kind of `families.blocks.MLPBlock`.
MIXINS: dict[str, type[BundledMLP]] = {
    "forward": BundledForward,
    "dropout": BundledDropoutForward,
    "bert": BundledBertLayer,
    "transformer": BundledTransformerLayer,
}
