"""Parameters that are tensor subclasses: sharding them and gathering their shards.

A subclass with special arithmetic (quantized weights, weights that are cast to float8 before they travel) is gathered
through the extensions that `fully_shard` calls: `fsdp_pre_all_gather` of a shard returns the tensors that travel, and
`fsdp_post_all_gather` makes the whole parameter from the received tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from rtp_ext.parameters.sharding import held, inner_tensors, keep_hooks, take_shard, type_name, with_inner
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import as_gradient, as_parameter, computes_plainly, expect_memory
from rtp_ext.ring.links.agree import expect_same

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_AGREED = "_rtp_agreed"  # attribute of a module: by key, the shapes and dtypes that all ranks send


def is_extended(parameter: Any) -> bool:
    """Returns whether a parameter, or its shard, is gathered through the extensions of its class."""
    kind = type(held(parameter))
    return not computes_plainly(kind) and hasattr(kind, _PRE) and hasattr(kind, _POST)


def refusal(parameter: Any) -> str | None:
    """Returns why the class of a parameter prevents sharding and gathering; None if it does not."""
    value = held(parameter)
    if computes_plainly(type(value)) or nn.parameter.is_lazy(value):
        return None
    kind = type_name(value)
    if isinstance(parameter, DTensor):
        return f"a DTensor whose shards are {kind}"
    lacking = [name for name in (_PRE, _POST) if not hasattr(type(value), name)]
    if lacking:
        return f"a {kind}, which computes by rules of its own and has no {' and no '.join(lacking)}"
    if value.is_meta:
        return f"a {kind} on the meta device"
    if value.dim() == 0:
        return f"a scalar {kind}"
    return _cannot_be_cut(value)


def _cannot_be_cut(value: torch.Tensor) -> str | None:
    try:
        part = value.detach()[:1].clone(memory_format=torch.contiguous_format)
    except (NotImplementedError, RuntimeError, TypeError) as error:  # the class may not support the operators
        return f"a {type_name(value)}, which cannot be sliced ({error})"
    return None if type(part) is type(value) else f"a {type_name(value)}, of which a slice is a {type_name(part)}"


# -- shards ------------------------------------------------------------------------------------------------------------


def shard_extended(parameter: Any, ring: Ring) -> nn.Parameter:
    """Returns a parameter sharded along its first dimension for a whole one whose class has the extensions."""
    assert ring.parameter_mesh is not None, "on an emulated ring it stays whole"
    local = take_shard(parameter, ring, 0)
    meta = TensorMeta(parameter.shape, torch.empty(parameter.shape, device="meta").stride(), parameter.dtype)
    spec = DTensorSpec(ring.parameter_mesh, tuple(ring.placements(0)), tensor_meta=meta)
    converted = as_parameter(as_gradient(local, spec), parameter.requires_grad)
    converted.__dict__.update(
        {key: value for key, value in parameter.__dict__.items() if key not in local.__dict__}
    )  # attributes of the parameter, not the inner tensors
    keep_hooks(converted, parameter)
    return converted


def summed_inside(shard: torch.Tensor, whole: torch.Tensor) -> bool:
    """Returns whether gradients of a whole parameter are averaged by averaging their inner tensors: they have the class
    of the shard, whose sums and multiples are those of its inner tensors."""
    return type(whole) is type(shard) and inner_tensors(whole) is not None and _adds_up(whole)


_known: dict[type, bool] = {}


def _adds_up(whole: Any) -> bool:
    kind = type(whole)
    if kind not in _known:
        try:
            _known[kind] = _adds_up_made_up(whole)
        except (NotImplementedError, RuntimeError, TypeError):  # the class may not support the operators
            _known[kind] = False
    return _known[kind]


def _adds_up_made_up(whole: Any) -> bool:
    """Returns whether the class of `whole` is linear in its inner tensors; tests constants, so that all ranks agree."""
    row = inner_tensors(whole[:1]) or []
    numbers = [torch.full_like(each, 1.0 + place) for place, each in enumerate(row)]
    made = with_inner(whole, numbers)
    total = made + made * 2
    found = inner_tensors(total) if type(total) is type(whole) else None
    return found is not None and all(torch.equal(three, one * 3) for one, three in zip(numbers, found, strict=True))


# -- what travels ------------------------------------------------------------------------------------------------------


class Extended:
    """One gather of a parameter through the extensions of its class.

    Attributes:
        inputs: the plain tensors that this rank sends.
        shapes: for each of `inputs`, the shapes that the ranks send, by rank; `agree` sets it.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameter: torch.Tensor,
        shard: torch.Tensor,
        ring: Ring,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        self.name, self.shard, self.ring = f"{type(module).__name__}.{name}", shard, ring
        self.shape = parameter.shape
        self.key = (ring.serial, name, type_name(shard), tuple(self.shape), shard.dtype, mp_policy.param_dtype)
        casts = mp_policy.param_dtype is not None and shard.dtype.is_floating_point
        self.dtype = mp_policy.param_dtype if casts else shard.dtype
        self.known: dict[Any, Any] = module.__dict__.setdefault(_AGREED, {})
        self.shapes: list[list[tuple[int, ...]]] = []
        pre = getattr(shard, _PRE)
        arguments = (ring.mesh, self.shape, parameter.stride(), module, mp_policy)
        # as in fully_shard: an older form of the extension takes the mesh alone
        inputs, self.metadata = pre(*arguments[: 1 if len(inspect.signature(pre).parameters) == 1 else None])
        inputs = expect_memory(f"{name}: {_PRE} of {type_name(shard)}", inputs)
        self.inputs = [tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous() for tensor in inputs]

    def answers(self) -> list[tuple[tuple[int, ...], str]]:
        return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in self.inputs]

    def whole(self, arrived: list[torch.Tensor]) -> torch.Tensor:
        """Returns the whole parameter from `arrived`, the inputs of all ranks concatenated in rank order."""
        whole, _ = getattr(self.shard, _POST)(tuple(arrived), self.metadata, self.dtype)
        rows = self.shape[0]
        if tuple(whole.shape[1:]) != tuple(self.shape[1:]) or whole.shape[0] < rows:
            raise ValueError(
                f"{self.name}: expected {_POST} of {type_name(self.shard)} to make a tensor of shape "
                f"{tuple(self.shape)}, or of more rows, got {tuple(whole.shape)}"
            )
        if whole.shape[0] != rows:  # the last ranks sent padding
            whole = whole.narrow(0, 0, rows)
        return whole.data if whole._is_view() else whole  # autograd refuses views from a Function


def agree(extended: Sequence[Extended]) -> None:
    """Exchanges once the shapes and dtypes that each rank sends.

    Raises ValueError on every rank if they differ in more than rows. If a rank later sends other tensors, it ends the
    ring and raises RuntimeError, because the other ranks wait for the agreed ones. Collective if a key is new.
    """
    if not extended:
        return
    ring = extended[0].ring
    new = [each for each in extended if each.key not in each.known]
    if new:
        answers = ring.exchange([each.answers() for each in new])
        for place, each in enumerate(new):
            sent = [theirs[place] for theirs in answers]
            expect_same(
                f"{each.name}: the tensors of {_PRE}, all but their rows",
                sent,
                key=lambda kinds: [(len(shape), shape[1:], dtype) for shape, dtype in kinds],
            )
            each.known[each.key] = sent
    for each in extended:
        every = each.known[each.key]
        if every[ring.rank] != each.answers():
            error = RuntimeError(
                f"{each.name}: expected {_PRE} to give the same tensors every time, {every[ring.rank]}, got "
                f"{each.answers()}"
            )
            ring.end(error)
            raise error
        each.shapes = [[theirs[number][0] for theirs in every] for number in range(len(each.inputs))]


# -- gradients ---------------------------------------------------------------------------------------------------------


def parts_of_gradient(gradient: torch.Tensor, like: torch.Tensor | None) -> list[torch.Tensor]:
    """Returns a gradient as plain tensors that are averaged separately. `like`: the shard, if the gradients of the
    parameter are `summed_inside`; else None."""
    inside = None if like is None else inner_tensors(like)
    if computes_plainly(type(gradient)):
        return [gradient] * (1 if inside is None else len(inside))
    inner = inner_tensors(gradient) if like is not None and type(gradient) is type(like) else None
    if inner is None:
        raise TypeError(
            f"a gradient of shape {tuple(gradient.shape)}: expected a plain tensor, got a {type_name(gradient)}, which "
            "cannot be averaged over ranks"
        )
    return inner
