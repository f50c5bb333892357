"""What autograd has to know of a ring: who wrote a parameter, what has no second derivative, who gathered a weight."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import nn
from torch._C import _TorchDispatchModeKey as _Mode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from rtp_ext._native import RotationError
from rtp_ext.ring.mesh import followed
from rtp_ext.ring.replicated_gradients import check_replicated_gradient

if TYPE_CHECKING:
    from rtp_ext.ring.offload import OffloadedShard


_P = ParamSpec("_P")
_T = TypeVar("_T")

_MODES = {_Mode.FAKE: "fake tensors", _Mode.PROXY: "make_fx", _Mode.FUNCTIONAL: "functionalisation"}


def refuse_transforms(operation: str) -> None:
    """Raises RuntimeError where what is computed now is traced or transformed: hops cannot be."""
    found = None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        found = "a transform of torch.func (grad, vjp, jvp, vmap, ...)"
    elif torch._C._get_tracing_state() is not None:
        found = "torch.jit.trace"
    elif torch._C._len_torch_dispatch_stack() > 0:
        modes = [name for key, name in _MODES.items() if torch._C._get_dispatch_mode(key) is not None]
        found = modes[0] if modes else None
    if found is not None:
        raise RuntimeError(
            f"{operation}: rtp_ext does not support {found}: shards travel between processes, which nothing can trace "
            "or transform. Call it eagerly, or through torch.compile"
        )


# The dispatch modes of a region's forward and of its recomputation. In the recomputation the second one returns what
# the first one has stored for an operator, by how often that was called, and calls the others again.
_STORING, _RETURNING = (type(context) for context in create_selective_checkpoint_contexts([]))


def storing_modes() -> list[Any]:
    """The modes of selective activation checkpointing that see what is computed now, the outermost first."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return []
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, (_STORING, _RETURNING))]


def returns(mode: Any) -> bool:
    """Whether a mode of `storing_modes` is that of a recomputation."""
    return isinstance(mode, _RETURNING)


@contextlib.contextmanager
def seen_by(modes: Sequence[Any]) -> Iterator[None]:
    """What runs within is seen by these dispatch modes, the last one first, and by no other."""
    before = _get_current_dispatch_mode_stack()
    for _ in before:
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
        for mode in before:
            _push_mode(mode)


def other_modes() -> list[Any]:
    """The dispatch modes that see what is computed now, but for those of selective activation checkpointing."""
    return [mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, (_STORING, _RETURNING))]


def unseen(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, of which selective activation checkpointing sees nothing, and other dispatch modes as much as ever.

    For all that a forward does beside what a user has asked for: it may do more in a recomputation than in the forward,
    or less, and it writes to memory that what was stored would not write to again.
    """

    @functools.wraps(function)
    def call(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        if not storing_modes():
            return function(*arguments, **keywords)
        with seen_by(other_modes()):
            return function(*arguments, **keywords)

    return call


_OWN_RULES: Any = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]  # what classes without any have


def holds_memory(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class are memory that native code can read. A class with a `__torch_dispatch__` of its own
    is a wrapper around other tensors (quantized weights, DTensor, fake tensors), whose address is 0."""
    return kind.__torch_dispatch__ is _OWN_RULES


# How functions of torch treat the classes of torch, and subclasses that say nothing of it.
_OWN_FUNCTIONS: Any = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


def computes_plainly(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class are memory, and every function of torch computes with them by torch's own rules."""
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return True
    function: Any = kind.__torch_function__
    return holds_memory(kind) and getattr(function, "__func__", function) in _OWN_FUNCTIONS


def expect_memory(operation: str, values: Sequence[Any]) -> Sequence[Any]:
    """`values`, in which what functional collectives have returned has arrived. Raises TypeError where another tensor
    among them, or in lists among them, is not memory."""
    found: list[Any] | None = None
    for place, value in enumerate(values):
        kind = type(value)
        if kind is torch.Tensor:
            continue
        if kind is list or kind is tuple:
            now: Any = expect_memory(operation, value)
        elif kind is AsyncCollectiveTensor:
            now = value.wait()
        elif isinstance(value, torch.Tensor) and not holds_memory(kind):
            raise TypeError(
                f"{operation}: expected plain tensors, got a {kind.__module__}.{kind.__qualname__} of shape "
                f"{tuple(value.shape)}, a tensor subclass that computes by rules of its own: pass a plain tensor with "
                "its values"
            )
        else:
            continue
        if now is not value:
            found = [*values] if found is None else found
            found[place] = now
    return values if found is None else found


class _FirstOrder(torch.autograd.Function):
    """Gradients that depend on tensors in a way that autograd cannot follow: a backward through them raises."""

    @staticmethod
    def forward(ctx, name: str, count: int, *tensors: torch.Tensor):
        ctx.name = name
        return tuple(gradient.detach() for gradient in tensors[:count])

    @staticmethod
    def backward(ctx, *_: Any):
        raise RuntimeError(
            f"{ctx.name}: double backward is not supported: a gradient that was made with create_graph=True is "
            "differentiated again (a gradient penalty or a Hessian), for which rotated operations have no formula"
        )


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd Function whose results cannot be differentiated again.

    torch's once_differentiable looks at the incoming gradients alone; results depend on what was saved, which the
    backward leaves in `ctx.unpacked`, and on the parameters of `ctx.call` as well. A later backward through any of them
    raises RuntimeError and is never cut short.
    """

    @unseen
    @functools.wraps(backward)
    def once(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.create_graph = torch.is_grad_enabled()
        with torch.no_grad():
            results = backward(ctx, *gradients)
        unpacked = ctx.__dict__.pop("unpacked", ())
        if not torch.is_grad_enabled():
            return results
        call = getattr(ctx, "call", None)
        sources: Sequence[Any] = (*gradients, *unpacked, *(call.watched if call else ()))
        sources = [source for source in sources if source is not None and source.requires_grad]
        several = results if isinstance(results, tuple) else (results,)
        made = [result for result in several if result is not None]
        name = call.name if call else "the gradient of a parameter"
        refusing = iter(_FirstOrder.apply(name, len(made), *made, *sources))
        several = tuple(None if result is None else next(refusing) for result in several)
        return several if isinstance(results, tuple) else several[0]

    return once


def wanted(ctx: Any) -> tuple[bool, ...]:
    """Of which arguments of an autograd Function this backward wants gradients: what `ctx.needs_input_grad` says, less
    what the engine will not follow.

    Zero-bubble pipelines, and torch.autograd.grad of some tensors, run a backward for inputs alone or parameters alone,
    of which `needs_input_grad` knows nothing. In a backward only, and for Functions that take inputs before parameters.
    """
    nodes = [node for node, _ in ctx.next_functions if node is not None]  # of the arguments that need a gradient
    if not nodes:  # an operator of a graph, which is made for what it returns
        return ctx.needs_input_grad
    executed = [_will_be_executed(node) for node in nodes]
    call = getattr(ctx, "call", None)
    if call is not None and executed and not executed[0]:
        call.ring.pass_by()
    found = iter(executed)
    return tuple(needed and next(found) for needed in ctx.needs_input_grad)


def _will_be_executed(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        # It tells all but the leaves whose gradients torch.autograd.grad was asked for: those it refuses to tell.
        if "A leaf node was passed" not in str(error):
            raise
        return True


# -- from the ring to the parameter ------------------------------------------------------------------------------------

GRADIENT_HANDLER = (
    "_rtp_gradient_handler"  # attribute of a parameter whose gradients are an outer policy's matter: a Claim
)
OFFLOADED = "_rtp_offloaded"  # attribute of a parameter whose shard stays on the host: a Kept


class GradientHandler(Protocol):
    """What an outer policy knows of one parameter."""

    def reduce(self, ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Called in backward with this rank's gradient of the parameter, averaged over the ring, which is the policy's
        to write to; None where nobody on the ring used it. Returns what goes on to the parameter now, if anything: laid
        out as the parameter is, or a DTensor."""
        ...

    def local(self, parameter: DTensor) -> torch.Tensor:
        """This rank's shard, which rotates. Outside forwards and backwards of its model it may be collective over the
        replicas."""
        ...

    @property
    def alone(self) -> bool:
        """Whether no replica has a part in its gradients."""
        ...


def gradient_handler_of(parameter: DTensor) -> GradientHandler | None:
    """What an outer policy knows of a parameter; None where it is no policy's."""
    return parameter.__dict__.get(GRADIENT_HANDLER)


def offloaded_shard_of(parameter: torch.Tensor) -> OffloadedShard | None:
    """How the shard of a parameter stays on the host; None where it does not."""
    return parameter.__dict__.get(OFFLOADED)


def save_delivery(ctx: Any, parameter: DTensor) -> None:
    """In the forward of a function whose backward calls `deliver_gradient`."""
    ctx.spec, ctx.handler, ctx.kept = parameter._spec, gradient_handler_of(parameter), offloaded_shard_of(parameter)


def deliver_gradient(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of a parameter as a DTensor, of this rank's part of it: in the backward of a function that called
    `save_delivery`. None where it is delivered at the end of the backward, by a policy or from the host.

    Raises RotationError where replicas hold the parameter and nobody would bring its gradients together; ValueError
    where ranks of tensor parallelism, which each have a copy of it, have different gradients.
    """
    mesh = ctx.spec.mesh
    replicas, tensor = followed.get(mesh, (1, False))
    if ctx.handler is None and replicas > 1:
        raise RotationError(
            f"a parameter of shape {tuple(ctx.spec.shape)} lies on {replicas} replicas, but belongs to no outer "
            "policy, so that its gradient would stay that of one: expected a parameter of a model that fully_rotate "
            "has converted, and a forward of that model before"
        )
    parameter = getattr(ctx.next_functions[0][0], "variable", None)
    if tensor and parameter is not None and isinstance(ctx.spec.placements[-2], Replicate):
        check_replicated_gradient(parameter, gradient, mesh)
    if ctx.handler is not None:
        gradient = ctx.handler.reduce(ctx, gradient)
    if gradient is None or isinstance(gradient, DTensor):
        return gradient
    gradient = gradient.detach().contiguous()
    if ctx.kept is not None:
        # Waited for where somebody reads it before the backward ends, or as soon as it does.
        if parameter is not None and (ctx.handler is None or ctx.handler.alone) and not read_within(ctx, parameter):
            ctx.kept.deliver(parameter, gradient, functools.partial(as_gradient, spec=ctx.spec))
            return None
        (gradient,) = ctx.kept.memory.store([gradient])
    return as_gradient(gradient, ctx.spec)


def read_within(ctx: Any, parameter: torch.Tensor) -> bool:
    """Whether the backward that runs hands on the gradient of a parameter to somebody: the user, who asked for it with
    torch.autograd.grad, a graph of this backward, or a hook."""
    return ctx.create_graph or hooked(parameter) or not accumulates(ctx.next_functions[0][0])


def hooked(parameter: Any) -> bool:
    """Whether a hook sees the gradient of a parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def accumulates(node: Any) -> bool:
    """Whether the backward that runs adds to the gradient of a leaf, and does not just return what it would add."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch's answer for torch.autograd.grad
        return False


def as_gradient(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """A DTensor laid out as a parameter is, which may be of another dtype."""
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]


def as_parameter(data: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """What `nn.Parameter` makes of a tensor. That detaches it: a DTensor asks its rules then, 5 ms for each shape."""
    if not isinstance(data, DTensor):
        return nn.Parameter(data, requires_grad=requires_grad)
    # The shard is no view: aliases of a view would not have the version that it shares with its parameter.
    made = as_gradient(data._local_tensor.data, data._spec)
    made._is_param = True  # type: ignore[attr-defined]
    return cast(nn.Parameter, made.requires_grad_(requires_grad))


_WIDE = "_rtp_wide"  # attribute of a rounded gradient: what it was rounded from, and its version then


def rounded(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient in the dtype that autograd wants of it. `unrounded` finds what it was."""
    result = gradient.to(dtype)
    if dtype.itemsize < gradient.dtype.itemsize:
        setattr(result, _WIDE, (gradient, result._version))
    return result


def unrounded(gradient: torch.Tensor) -> torch.Tensor:
    """What a gradient was before it was rounded, in float32 at least: many may be added up."""
    wide, version = getattr(gradient, _WIDE, (None, None))
    if wide is not None and version == gradient._version:  # autograd has added nothing to it
        return wide
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
