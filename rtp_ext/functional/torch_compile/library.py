"""Registers the operators for graphs of torch.compile: those of operators.py, and `gather`, `reduce` and `scope`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtp_ext.compilers import keep_order
from rtp_ext.functional._selective import NAMESPACE
from rtp_ext.functional.torch_compile.operators import (
    VERSION,
    Backward,
    Forward,
    backward,
    backward_fake,
    differentiate,
    forward,
    forward_fake,
    keep_for_backward,
    operator,
)
from rtp_ext.ring.registry import owner_of

# -- whole parameters of modules that do not rotate --------------------------------------------------------------------


def _gather(number: Tensor, ring: str, shards: list[Tensor], shapes: Sequence[int], dtypes: Any) -> list[Tensor]:
    return owner_of(number)._gather_plan().gather(shards)


def _gather_fake(number: Tensor, ring: str, shards: list[Tensor], shapes: Sequence[int], dtypes: Any) -> list[Tensor]:
    wholes, place = [], 0
    for shard, dtype in zip(shards, dtypes, strict=True):
        dims = shapes[place]
        wholes.append(shard.new_empty(tuple(shapes[place + 1 : place + 1 + dims]), dtype=dtype))
        place += 1 + dims
    return wholes


def _reduce(
    number: Tensor,
    ring: str,
    gradients: list[Tensor],
    places: Sequence[int],
    shards: list[Tensor],
    wanted: Sequence[int],
) -> list[Tensor]:
    """Reduces gradients to this rank's shards.

    places: indices of the parameters that `gradients` belong to; this rank did not use the others. shards, wanted: the
    shards and the indices of the parameters that require gradients.
    """
    return owner_of(number)._gather_plan().reduce(gradients, places, wanted)


def _reduce_fake(
    number: Tensor,
    ring: str,
    gradients: list[Tensor],
    places: Sequence[int],
    shards: list[Tensor],
    wanted: Sequence[int],
) -> list[Tensor]:
    return [shard.new_empty(shard.shape) for shard in shards]


def _keep_for_reduction(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    number, ring, shards, *_ = inputs
    ctx.ring = ring
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(number, *shards)


def _reduced(ctx: Any, gradients: list[Tensor | None]) -> tuple:
    number, *shards = ctx.saved_tensors
    wanted = [place for place, want in enumerate(ctx.needs_input_grad[2]) if want]
    places = [place for place in wanted if gradients[place] is not None]
    used = [gradients[place] for place in places]
    each: list[Tensor | None] = [None] * len(shards)
    found = operator("reduce")(number, ctx.ring, used, places, [shards[place] for place in wanted], wanted)
    for place, gradient in zip(wanted, found, strict=True):
        each[place] = gradient
    return None, None, each, None, None


# -- forwards of models ------------------------------------------------------------------------------------------------


def _scope(number: Tensor, ring: str, event: str, split: bool, autocast: torch.dtype | None) -> None:
    owner_of(number).in_graph_event(event, split, autocast)


def _scope_fake(number: Tensor, ring: str, event: str, split: bool, autocast: torch.dtype | None) -> None:
    return None


# -- registration ------------------------------------------------------------------------------------------------------


def _as_one(kind: Callable[..., Any], function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns `function` with its arguments packed into one `kind`."""
    return lambda *arguments: function(kind(*arguments))


_SCHEMAS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "forward": (
        "(Tensor number, str ring, str operation, Tensor[] inputs, Tensor[] homes, SymInt[] sizes, bool[] needs, "
        "ScalarType dtype) -> Tensor[]",
        _as_one(Forward, forward),
        _as_one(Forward, forward_fake),
    ),
    "backward": (
        "(Tensor number, str ring, str operation, Tensor[] gradients, Tensor[] inputs, Tensor[] homes, Tensor[] kept, "
        "SymInt[] sizes, bool[] needs, bool[] wanted, ScalarType dtype) -> Tensor[]",
        _as_one(Backward, backward),
        _as_one(Backward, backward_fake),
    ),
    "gather": (
        "(Tensor number, str ring, Tensor[] shards, int[] shapes, ScalarType[] dtypes) -> Tensor[]",
        _gather,
        _gather_fake,
    ),
    "reduce": (
        "(Tensor number, str ring, Tensor[] gradients, int[] places, Tensor[] shards, int[] wanted) -> Tensor[]",
        _reduce,
        _reduce_fake,
    ),
    "scope": (
        "(Tensor number, str ring, str event, bool split, ScalarType? autocast) -> ()",
        _scope,
        _scope_fake,
    ),
}


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, (schema, kernel, fake) in _SCHEMAS.items():
        qualified = f"{NAMESPACE}::{name}_{VERSION}"
        library.define(f"{name}_{VERSION}{schema}")
        library.impl(f"{name}_{VERSION}", kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(qualified, fake, lib=library)
    for name, formula, setup in (
        ("forward", differentiate, keep_for_backward),
        ("gather", _reduced, _keep_for_reduction),
    ):
        qualified = f"{NAMESPACE}::{name}_{VERSION}"
        torch.library.register_autograd(qualified, formula, setup_context=setup, lib=library)
    return library


_LIBRARY = _register()
keep_order(map(operator, _SCHEMAS))
