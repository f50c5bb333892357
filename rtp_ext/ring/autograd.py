"""What autograd has to know of a ring: who wrote a parameter, what has no second derivative, who gathered a weight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _TorchDispatchModeKey as _Mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rtp_ext._native import RotationError, share_version
from rtp_ext.ring.alike import expect_alike
from rtp_ext.ring.dispatch.selective import unseen
from rtp_ext.ring.enrolled import collectively_on
from rtp_ext.ring.mesh import followed, home_placements, own_part

if TYPE_CHECKING:
    from rtp_ext.ring.offload import Kept


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


def follow(mesh: DeviceMesh, replicas: int, tensor: bool) -> None:
    """Has writes of optimizers to the parameters on `mesh` seen by autograd, `full_tensor` of them averaged, and state
    refused that is whole or belongs to another rank. Raises ValueError where an equal mesh stands for something else:
    what becomes of a gradient is known by its mesh alone."""
    known = followed.get(mesh, (replicas, tensor))
    if known != (replicas, tensor):
        what = ["tensor parallelism" if cut else "replicas" for _, cut in (known, (replicas, tensor))]
        raise ValueError(
            "fully_rotate: expected one meaning for each dimension of a mesh, got "
            f"{mesh.mesh_dim_names} with {what[0]} in another model and with {what[1]} in this one, over the same "
            "ranks: give the dimension another name for one of the two (init_device_mesh(..., mesh_dim_names=...))"
        )
    if not followed:
        register_optimizer_step_pre_hook(_check_state)
        register_optimizer_step_post_hook(_count_writes)
        DTensor.full_tensor = _averaged_full_tensor(DTensor.full_tensor)  # type: ignore[method-assign]
        DTensor.redistribute = _averaged_redistribute(DTensor.redistribute)  # type: ignore[method-assign]
    followed[mesh] = replicas, tensor


def rotates(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and isinstance(tensor, nn.Parameter) and tensor.device_mesh in followed


def expect_own_shard(tensor: Any, parameter: torch.Tensor, what: str) -> None:
    """Raises ValueError where `tensor`, which goes with a parameter, is the shard of another rank: a DTensor remembers
    the place of the rank that pickled it."""
    if not isinstance(tensor, DTensor) or not isinstance(parameter, DTensor):
        return
    theirs, mine = tensor.device_mesh, parameter.device_mesh
    if theirs is mine or theirs != mine or theirs.get_coordinate() == mine.get_coordinate():
        return
    raise ValueError(
        f"{what}: expected the shard of the rank at {mine.get_coordinate()} of its mesh, got the one of the rank at "
        f"{theirs.get_coordinate()}: every rank has loaded what one rank saved. Save with torch.distributed.checkpoint "
        "(get_state_dict, set_state_dict), or a file for each rank"
    )


def _check_state(optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in filter(rotates, group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                what = f"{type(optimizer).__name__}: state {key} of a parameter of shape {tuple(parameter.shape)}"
                expect_own_shard(value, parameter, what)
                if _is_whole(value, parameter):
                    raise ValueError(
                        f"{what}: expected a DTensor that is cut as the parameter is, got a plain tensor of the whole "
                        "shape: load whole optimizer state with set_optimizer_state_dict of "
                        "torch.distributed.checkpoint.state_dict and full_state_dict=True"
                    )


def _is_whole(value: Any, parameter: Any) -> bool:
    """Whether a value of the state is a plain tensor as large as a parameter that is cut, on whatever rank."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.shape != parameter.shape:
        return False
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return any(ranks > 1 and not isinstance(placement, Replicate) for placement, ranks in sizes)


def _count_writes(optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
    """Foreach and fused steps on DTensors do not count as writes: torch counts below their dispatch."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    torch.autograd.graph.increment_version([p for p in parameters if rotates(p) and p.grad is not None])


def _averaged_full_tensor(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def full_tensor(self: DTensor, *, grad_placements: Any = None) -> torch.Tensor:
        if grad_placements is None and rotates(self) and self.requires_grad and torch.is_grad_enabled():
            return _FullTensor.apply(self, stock)
        return stock(self, grad_placements=grad_placements)

    return full_tensor


def _averaged_redistribute(stock: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """The other way to a whole parameter: redistribute(placements=[Replicate()])."""

    @functools.wraps(stock)
    def redistribute(self: DTensor, device_mesh: Any = None, placements: Any = None, **keywords: Any) -> DTensor:
        whole = placements is not None and all(isinstance(placement, Replicate) for placement in placements)
        here = device_mesh is None or device_mesh == self.device_mesh
        if whole and here and rotates(self) and self.requires_grad and torch.is_grad_enabled():
            return DTensor.from_local(self.full_tensor(), self.device_mesh, placements, run_check=False)
        return stock(self, device_mesh, placements, **keywords)

    return redistribute


class _FullTensor(torch.autograd.Function):
    """A whole parameter outside its module, such as a vocabulary head of which somebody computes the loss by hand.

    torch takes its gradient to be the same on every rank. Every rank has a batch of its own: gradients are averaged, as
    those of all parameters are. Where they are the same on every rank, so is their average.
    """

    @staticmethod
    def forward(ctx, parameter: DTensor, stock: Callable[..., torch.Tensor]):
        keep_way_home(ctx, parameter)
        whole = stock(parameter.detach()).clone()
        share_version(whole, parameter)
        return whole

    @staticmethod
    @first_order_only
    def backward(ctx, gradient: torch.Tensor):
        mesh = ctx.spec.mesh
        ring, ranks = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        wide = gradient.dtype if gradient.dtype == torch.float64 else torch.float32
        mean = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
        collectively_on(mesh, "full_tensor backward", dist.all_reduce, mean, group=ring)
        mean.div_(ranks)
        mean = own_part(mean, mesh, home_placements(ctx.spec))
        mean = mean if ctx.kept is None else ctx.kept.memory.load(mean)
        # a copy: the gradient must not keep the whole one alive
        return come_home(ctx, mean.to(gradient.dtype, copy=True, memory_format=torch.contiguous_format)), None


# -- from the ring to the parameter ------------------------------------------------------------------------------------

CLAIM = "_rtp_claim"  # attribute of a parameter whose gradients are an outer policy's matter: a Claim
KEPT = "_rtp_kept"  # attribute of a parameter whose shard stays on the host: a Kept


class Claim(Protocol):
    """What an outer policy knows of one parameter."""

    def take(self, ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Called in backward with this rank's gradient of the parameter, averaged over the ring, which is the policy's
        to write to; None where nobody on the ring used it. Returns what goes on to the parameter now, if anything: laid
        out as the parameter is, or a DTensor."""
        ...

    def home(self, parameter: DTensor) -> torch.Tensor:
        """This rank's shard, which rotates. Outside forwards and backwards of its model it may be collective over the
        replicas."""
        ...

    @property
    def alone(self) -> bool:
        """Whether no replica has a part in its gradients."""
        ...


def claim_of(parameter: DTensor) -> Claim | None:
    """What an outer policy knows of a parameter; None where it is no policy's."""
    return parameter.__dict__.get(CLAIM)


def kept_of(parameter: torch.Tensor) -> Kept | None:
    """How the shard of a parameter stays on the host; None where it does not."""
    return parameter.__dict__.get(KEPT)


def keep_way_home(ctx: Any, parameter: DTensor) -> None:
    """In the forward of a function whose backward calls `come_home`."""
    ctx.spec, ctx.claim, ctx.kept = parameter._spec, claim_of(parameter), kept_of(parameter)


def come_home(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of a parameter as a DTensor, of this rank's part of it: in the backward of a function that called
    `keep_way_home`. None where it is delivered at the end of the backward, by a policy or from the host.

    Raises RotationError where replicas hold the parameter and nobody would bring its gradients together; ValueError
    where ranks of tensor parallelism, which each have a copy of it, have different gradients.
    """
    mesh = ctx.spec.mesh
    replicas, tensor = followed.get(mesh, (1, False))
    if ctx.claim is None and replicas > 1:
        raise RotationError(
            f"a parameter of shape {tuple(ctx.spec.shape)} lies on {replicas} replicas, but belongs to no outer "
            "policy, so that its gradient would stay that of one: expected a parameter of a model that fully_rotate "
            "has converted, and a forward of that model before"
        )
    parameter = getattr(ctx.next_functions[0][0], "variable", None)
    if tensor and parameter is not None and isinstance(ctx.spec.placements[-2], Replicate):
        expect_alike(parameter, gradient, mesh)
    if ctx.claim is not None:
        gradient = ctx.claim.take(ctx, gradient)
    if gradient is None or isinstance(gradient, DTensor):
        return gradient
    gradient = gradient.detach().contiguous()
    if ctx.kept is not None:
        # Waited for where somebody reads it before the backward ends, or as soon as it does.
        if parameter is not None and (ctx.claim is None or ctx.claim.alone) and not read_within(ctx, parameter):
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
