"""Every patch and global hook of torch and transformers that this package makes. No other file makes one.

[Note: hooks of DTensor]
Each function makes one patch, once, and documents its versions of torch and its reason. The module that is responsible
for the new behaviour passes it in as a callback, with a test of whose parameters are meant: those of rings, so that
other DTensors of the process keep torch's behaviour. `python_tests/house/test_dtensor_hooks.py` runs torch without each
patch, and fails once torch no longer needs it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rtp_ext._native import RotationError

logger = logging.getLogger("rtp_ext")

_PATCHED = "_rtp_patched"  # attribute of functions that replace torch's
_RULES: dict[Any, Any] = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})  # type: ignore[attr-defined]


# -- DTensor -----------------------------------------------------------------------------------------------------------


@functools.cache
def patch_full_tensor(handles: Callable[[DTensor], bool], full_tensor: Callable[..., torch.Tensor]) -> None:
    """DTensor.full_tensor and DTensor.redistribute: torch 2.11 to 2.14.

    torch assumes that the gradient of a whole tensor is the same on every rank, and keeps a slice of this rank's. Ranks
    of a ring have batches of their own, so that their gradients have to be averaged. For parameters that `handles`
    accepts, `full_tensor(parameter, stock)` is called instead.
    """
    whole, laid_out = DTensor.full_tensor, DTensor.redistribute

    def differentiates(parameter: DTensor) -> bool:
        return handles(parameter) and parameter.requires_grad and torch.is_grad_enabled()

    @functools.wraps(whole)
    def averaged_full_tensor(self: DTensor, *, grad_placements: Any = None) -> torch.Tensor:
        if grad_placements is None and differentiates(self):
            return full_tensor(self, whole)
        return whole(self, grad_placements=grad_placements)

    @functools.wraps(laid_out)
    def redistribute(self: DTensor, device_mesh: Any = None, placements: Any = None, **keywords: Any) -> DTensor:
        everywhere = placements is not None and all(isinstance(placement, Replicate) for placement in placements)
        here = device_mesh is None or device_mesh == self.device_mesh
        if everywhere and here and differentiates(self):
            return DTensor.from_local(self.full_tensor(), self.device_mesh, placements, run_check=False)
        return laid_out(self, device_mesh, placements, **keywords)

    DTensor.full_tensor = averaged_full_tensor  # type: ignore[method-assign]
    DTensor.redistribute = redistribute  # type: ignore[method-assign]


@functools.cache
def patch_data(
    handles: Callable[[DTensor], bool],
    assign: Callable[[DTensor, Any], None],
    share_version: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """DTensor.data: torch 2.11 to 2.14.

    An assignment changes torch's wrapper but not the local shard, without an error. For parameters that `handles`
    accepts, `assign(parameter, values)` is called instead. A write to `parameter.data` does not raise the version
    counter of the parameter, by which a shard that was sent ahead and codes of a shard are known to be stale:
    `share_version(parameter.data, parameter)` is called.
    """
    stock: Any = torch.Tensor.data

    def read_data(self: DTensor) -> torch.Tensor:
        values: torch.Tensor = stock.__get__(self)
        if handles(self):
            share_version(values, self)
        return values

    def assign_data(self: DTensor, values: Any) -> None:
        (assign if handles(self) else stock.__set__)(self, values)

    DTensor.data = property(read_data, assign_data)  # type: ignore[assignment]


class _Suspended(threading.local):
    """The operators that this thread runs in torch's way at the moment."""

    operators: frozenset = frozenset()


_suspended = _Suspended()


@functools.cache
def _patch_rules() -> None:
    """The table of DTensor's rules of operators, an attribute that torch reads at every operator: torch 2.11 to 2.14.

    A rule calls its operator in torch's way, which needs a table without the rule. Other threads keep the whole table:
    without the patch one of them would compute, without an error, what the rule prevents.
    """
    dispatcher: Any = DTensor._op_dispatcher
    name = "_custom_op_handlers"
    if name not in vars(dispatcher):
        return

    def read(self: Any) -> dict:
        rules: dict = vars(self)[name]
        if not _suspended.operators:
            return rules
        rules = rules.copy()  # hashes no operator again, which takes longer than most operators of an optimizer
        for operator in _suspended.operators:
            rules.pop(operator, None)
        return rules

    def write(self: Any, rules: dict) -> None:
        vars(self)[name] = rules

    dispatcher.__class__ = type(type(dispatcher).__name__, (type(dispatcher),), {name: property(read, write)})


def _set_rule(operator: Any, rule: Callable[[Callable[..., Any], tuple, dict], Any]) -> None:
    """Has `rule(stock, arguments, keywords)` decide how DTensor treats an operator, where `stock(*arguments,
    **keywords)` is torch's way."""
    before = _RULES.get(operator)
    _patch_rules()

    def stock(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            return before(operator, args, kwargs)
        outer, _suspended.operators = _suspended.operators, _suspended.operators | {operator}
        try:
            return operator(*args, **kwargs)
        finally:
            _suspended.operators = outer

    def choose(_operator: Any, args: tuple, kwargs: dict) -> Any:
        return rule(stock, args, kwargs)

    _RULES[operator] = choose


@functools.cache
def patch_random(operators: tuple, handles: Callable[[Any], bool], draw: Callable[..., Any]) -> None:
    """The random operators of DTensor: torch 2.11 to 2.14.

    On CPUs ranks with one seed draw equal shards, so that a weight repeats its rows. For tensors that `handles`
    accepts, `draw(operator, tensor, *arguments, **keywords)` is called instead.
    """
    if not _RULES:
        logger.warning("torch %s hides how DTensor treats operators: initialise models before", torch.__version__)

    def choose(operator: Any, stock: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        return draw(operator, *args, **kwargs) if handles(args[0]) else stock(*args, **kwargs)

    for operator in operators:
        _set_rule(operator, functools.partial(choose, operator))


@functools.cache
def patch_grad_scaler() -> None:
    """The rule of DTensor for the unscaling of GradScaler: torch 2.11 to 2.14.

    torch decides by the first gradient of a group whether ranks exchange infinities. Where that gradient is replicated,
    an overflow in another rank's shard goes unnoticed, and ranks no longer take the same steps. The patch puts sharded
    gradients first.
    """

    def sharded_first(stock: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        gradients = sorted(args[0], key=lambda gradient: sum(isinstance(p, Replicate) for p in gradient.placements))
        return stock(gradients, *args[1:], **kwargs)

    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    if operator in _RULES:
        _set_rule(operator, sharded_first)


@functools.cache
def patch_operators(rules: tuple[tuple[Any, Callable[[Callable[..., Any], tuple, dict], Any]], ...]) -> None:
    """Operators of DTensor: torch 2.11 to 2.14. `rules`: see `_set_rule`; of an operator that torch lacks, None.

    - A sum of a plain scalar and a DTensor is a DTensor, whose gradient enters the graph of the plain scalar, where the
      next operator raises, and whose local value is that of no rank.
    - `item` of a DTensor returns the part of this rank without an error.
    - A gradient that is replicated cannot be added to one that is cut: gradients of parameters with fewer rows than
      ranks, for which most operators return replicated tensors.
    - Norms of order infinity, maxima and minima raise on ranks with an empty shard alone; the others wait for them.
    - Foreach operators in place do not raise the version counters of what they write.
    """
    for operator, rule in rules:
        if operator is not None:
            _set_rule(operator, rule)


@functools.cache
def patch_mixing(refuse: Callable[[Any, torch.Tensor, Any], None]) -> None:
    """The replication of plain scalars among the arguments of DTensor's operators: torch 2.11 to 2.14.

    torch does not return the gradient of such a scalar as a plain tensor. `refuse(operator, scalar, mesh)` is called
    before.
    """
    dispatcher: Any = DTensor._op_dispatcher
    name = "_try_replicate_spec_for_scalar_tensor"
    stock = getattr(dispatcher, name, None)
    if stock is None:
        return

    def replicate(operator: Any, scalar: torch.Tensor, mesh: Any) -> Any:
        refuse(operator, scalar, mesh)
        return stock(operator, scalar, mesh)

    setattr(dispatcher, name, replicate)


@functools.cache
def patch_state_dicts(handles: Callable[[Any, Any], bool], cut: Callable[[torch.Tensor, Any, Any], DTensor]) -> None:
    """The sharding of whole state dicts (full_state_dict=True) by torch.distributed.checkpoint: torch 2.11 to 2.14.

    torch asserts that sizes divide where two mesh dimensions shard one tensor dimension (_StridedShard). For a mesh and
    placements that `handles` accepts, `cut(whole, mesh, placements)` is called instead.
    """
    stock: Any = _state_dict_utils.distribute_tensor  # type: ignore[attr-defined]

    @functools.wraps(stock)
    def distribute_tensor(tensor: Any, device_mesh: Any = None, placements: Any = None, **keywords: Any) -> Any:
        if not placements or isinstance(tensor, DTensor) or not handles(device_mesh, placements):
            return stock(tensor, device_mesh, placements, **keywords)
        return cut(tensor, device_mesh, placements)

    _state_dict_utils.distribute_tensor = distribute_tensor  # type: ignore[attr-defined]


# -- steps of optimizers (public hooks of torch) -----------------------------------------------------------------------

# The order of the checks before a step, independent of the order in which modules register theirs. A stage raises to
# refuse a step; the last one may return new (arguments, keywords) of it.
STEP_STAGES = ("stale", "state", "reduced", "attached", "stand-in")
StepHook = Callable[[Optimizer, Any, Any], Any]

_stages: dict[str, StepHook] = {}
# by optimizer: arguments and keywords of the step that begins, as its caller gave them, until the step has ended
_given: weakref.WeakKeyDictionary[Optimizer, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def before_steps(stage: str, hook: StepHook) -> None:
    """Runs `hook(optimizer, arguments, keywords)` before every step of any optimizer, in its stage. All stages get the
    arguments that the caller of the step gave. torch runs global hooks before those of an optimizer."""
    if stage not in STEP_STAGES:
        raise ValueError(f"expected a stage of {', '.join(STEP_STAGES)}, got {stage!r}")
    _register_stages()
    _stages[stage] = hook


def before_steps_of(optimizer: Optimizer, hook: StepHook) -> RemovableHandle:
    """Runs `hook(optimizer, arguments, keywords)` before every step of one optimizer, after the hooks that were
    registered on it earlier. It gets the arguments that the caller gave, not those of a stand-in."""
    _register_stages()

    def with_given(stepped: Optimizer, arguments: Any, keywords: Any) -> None:
        arguments, keywords = _given.get(stepped, (arguments[1:], keywords))
        hook(stepped, (stepped, *arguments), keywords)

    return optimizer.register_step_pre_hook(with_given)


@functools.cache
def _register_stages() -> None:
    register_optimizer_step_pre_hook(_run_stages)
    register_optimizer_step_post_hook(_forget_given)


def _forget_given(optimizer: Optimizer, _arguments: Any, _keywords: Any) -> None:
    _given.pop(optimizer, None)


def _run_stages(optimizer: Optimizer, arguments: Any, keywords: Any) -> Any:
    _given[optimizer] = arguments[1:], keywords  # a value that refers to its key would keep it alive
    result = None
    for stage in STEP_STAGES:
        if stage in _stages:
            result = _stages[stage](optimizer, arguments, keywords)
    return result


@functools.cache
def count_writes(handles: Callable[[Any], bool]) -> None:
    """A hook after every step: torch 2.11 to 2.14.

    Foreach and fused steps on DTensors do not raise the version counters of parameters, since torch counts below the
    dispatch of DTensor. Autograd would then not detect that a saved parameter was written.
    """

    def count(optimizer: Optimizer, _arguments: Any, _keywords: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        torch.autograd.graph.increment_version([p for p in parameters if handles(p) and p.grad is not None])

    register_optimizer_step_post_hook(count)


@functools.cache
def after_steps(hook: StepHook) -> None:
    """Registers `hook(optimizer, arguments, keywords)` to run after every step of any optimizer."""
    register_optimizer_step_post_hook(hook)


def on_registration(hook: Callable[[torch.nn.Module, str, Any], None]) -> None:
    """Registers `hook(module, name, submodule)` to run before any module gets a submodule; a public hook of torch."""
    register_module_module_registration_hook(hook)


# -- other parts of torch ----------------------------------------------------------------------------------------------

# Whether torch derives the names of groups with local synchronization from the number of groups that were made. Before
# torch 2.14, it derives them from the number that exist in this process.
GROUPS_ARE_COUNTED = "group_count" in dist.distributed_c10d._hash_ranks_to_str.__code__.co_names


@contextlib.contextmanager
def named_groups(members: list[int]) -> Iterator[None]:
    """`_process_group_name` of torch.distributed, while a ring makes a group of `members`: torch 2.11 to 2.15.

    The members of a group wait for each other's addresses under its name in the store. torch derives the name from the
    number of groups that its process has, or has made. Processes may have different numbers, as stages of a pipeline
    or ranks outside of all rings do: a group with members of both would never be made. And before torch 2.14, a group
    that takes the place of a destroyed one gets its name, and finds the addresses of sockets that are closed.

    With the patch the name holds how many groups of rings this rank has made with the same members. The count lies in
    the store, beside the addresses, so that both end with their world.
    """
    module: Any = dist.distributed_c10d
    made = module._get_default_store().add(f"rtp_ext groups of {dist.get_rank()} in {members}", 1)
    name = hashlib.sha1(f"rtp_ext {members} {made}".encode(), usedforsecurity=False).hexdigest()
    stock, module._process_group_name = module._process_group_name, lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        module._process_group_name = stock


@functools.cache
def register_traced_files(files: tuple[str, ...]) -> None:
    """Rules of torch.compile (torch._dynamo.trace_rules): torch 2.11 to 2.14.

    torch traces every installed package and has no public way to restrict that to some files of one. With these rules
    its graphs break at all files of rtp_ext except `files`, which are traced where traced code calls them. A torch
    without BUILTIN_INLINE_WHEN_CALLED breaks its graphs at all of the package.
    """
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rules.add("rtp_ext")
    package = Path(__file__).resolve().parent
    traced: set[str] = getattr(rules, "BUILTIN_INLINE_WHEN_CALLED", set())
    traced.update(str(package / file) for file in files)


@functools.cache
def leave_gradients_alone() -> None:
    """Excludes DTensor.__tensor_unflatten__ from compilation: torch 2.11 to 2.14.

    Where a compiled function calls `backward`, torch 2.14 would compile it and fail if parameters are cut along
    different dimensions.
    """
    from torch._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    set_code_exec_strategy(DTensor.__tensor_unflatten__.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def refuse_ddp(root: torch.nn.Module, message: str) -> None:
    """`_ddp_params_and_buffers_to_ignore` of a module, which DistributedDataParallel reads first: torch 2.11 to 2.14.

    Stock trainers wrap every model. On DTensors DistributedDataParallel fails with a missing rule of c10d.broadcast_,
    an error that hides the cause; this raises ValueError(message).
    """
    root.__dict__.setdefault("_ddp_params_and_buffers_to_ignore", _Refusing(message))


class _Refusing:
    def __init__(self, message: str) -> None:
        self.message = message

    def __iter__(self) -> Any:
        raise ValueError(self.message)


def refuse_fully_shard(module: torch.nn.Module, message: str) -> None:
    """The registry of composable functions of a module, which fully_shard searches first: torch 2.11 to 2.14.

    Without it fully_shard ends in an error of torch that does not name the cause ("Invariant encountered"); this raises
    ValueError(message).
    """
    module.__dict__[REGISTRY_KEY] = _Registry(module.__dict__.get(REGISTRY_KEY, {}), message)


class _Registry(dict):
    def __init__(self, entries: Mapping[str, Any], message: str) -> None:
        super().__init__(entries)
        self.message = message

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise ValueError(self.message)
        return super().__contains__(name)


def patch_parametrizations(refuse: Callable[[Any], None], refuse_named: Callable[[Any, str], None]) -> None:
    """Utilities of torch.nn.utils that compute a weight from other parameters: torch 2.11 to 2.14.

    They treat a shard as a plain parameter, and replace it without an error, so that the model no longer rotates. With
    the patch they call `refuse(parameter)`, or `refuse_named(module, name)`, before they change anything; where a torch
    has another name for a utility, the next forward of the model detects the replacement.
    """

    def each(original: Any) -> None:
        for parameter in original if isinstance(original, (list, tuple)) else (original,):
            refuse(parameter)

    def several(parameters: Any) -> None:
        for module, name in parameters:
            refuse_named(module, name)

    old: dict[str, Any] = {name: sys.modules[f"torch.nn.utils.{name}"] for name in ("weight_norm", "spectral_norm")}
    _guard(parametrize.ParametrizationList, "__init__", each, "original")
    _guard(getattr(parametrizations, "_SpectralNorm", None), "__init__", each, "weight")
    _guard(prune.BasePruningMethod, "apply", refuse_named, "module", "name")
    _guard(old["weight_norm"].WeightNorm, "apply", refuse_named, "module", "name")
    _guard(old["spectral_norm"].SpectralNorm, "apply", refuse_named, "module", "name")
    _guard(prune, "global_unstructured", several, "parameters")


def _guard(owner: Any, name: str, refuse: Callable[..., None], *needed: str) -> None:
    """Patches a function of `owner` to call `refuse` first, with its `needed` arguments."""
    kept = vars(owner).get(name) if owner is not None else None
    stock: Any = getattr(kept, "__func__", kept)
    if stock is None or hasattr(stock, _PATCHED):
        return
    signature = inspect.signature(stock)
    if not set(needed) <= signature.parameters.keys():
        return

    @functools.wraps(stock)
    def guarded(*arguments: Any, **keywords: Any) -> Any:
        try:
            given = signature.bind(*arguments, **keywords).arguments
        except TypeError:
            return stock(*arguments, **keywords)  # raises torch's error
        refuse(*(given.get(each) for each in needed))
        return stock(*arguments, **keywords)

    setattr(guarded, _PATCHED, True)
    wrapper = type(kept) if isinstance(kept, (staticmethod, classmethod)) else None
    setattr(owner, name, guarded if wrapper is None else wrapper(guarded))


def patch_pipeline_stages(
    replace_backward: Callable[[Callable[..., Any]], Callable[..., Any]],
    replace_reduction: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Stages of torch.distributed.pipelining, once it is imported: torch 2.11 to 2.14.

    A stage delays and reduces gradients for FSDP and DistributedDataParallel alone, by their classes. The callbacks
    return new methods for the stock ones.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        return
    base = getattr(module, "_PipelineStageBase", None)
    for name, replace in (
        ("backward_maybe_with_nosync", replace_backward),
        ("perform_reduce_grad", replace_reduction),
    ):
        stock = getattr(base, name, None)
        if stock is None:
            raise RotationError(
                f"this torch has pipelines without _PipelineStageBase.{name}, where gradients are left for, or reduced "
                "at, the end of a step: expected one of torch 2.11 to 2.14 for a model with replicas"
            )
        _replace(base, name, replace)


# -- transformers ------------------------------------------------------------------------------------------------------


def patch_generate(**replacements: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Methods of transformers' GenerationMixin and its subclasses, once they are loaded: torch 2.11 to 2.14.

    `generate` calls the model as often as one rank's sequences need, while a forward of a converted model needs all
    ranks. The patch changes the classes, since a plain model around a converted part generates too. `replacements`: by
    the name of a method, a function that returns a new method for the stock one.
    """
    utilities = sys.modules.get("transformers.generation.utils")
    if utilities is None:
        return
    mixin = utilities.GenerationMixin
    for cls, name in itertools.product({*mixin.__mro__, *_subclasses(mixin)}, replacements):
        if name in vars(cls):
            _replace(cls, name, replacements[name])


def _subclasses(cls: Any) -> Iterator[type]:
    for below in cls.__subclasses__():
        yield below
        yield from _subclasses(below)


def _replace(owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
    """Replaces a method by `replacement(method)`, once."""
    stock = getattr(owner, name)
    if not hasattr(stock, _PATCHED):
        replaced = replacement(stock)
        setattr(replaced, _PATCHED, True)
        setattr(owner, name, replaced)
