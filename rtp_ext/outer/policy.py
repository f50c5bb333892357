"""Base of all outer policies: their parameters, the scale of gradients, and the comparison of replicas."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from rtp_ext.outer.replicas import Replicas
from rtp_ext.parameters.cut_over_replicas import is_piece, local_shape
from rtp_ext.parameters.sharding import held
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import GRADIENT_HANDLER, summing_dtype, unrounded
from rtp_ext.ring.links.agree import differing, expect_same

logger = logging.getLogger("rtp_ext")


@dataclass
class Unit:
    """Gradient settings of one call of fully_rotate, without the modules that were converted before."""

    reduce_dtype: torch.dtype | None
    divide_factor: float | None = None  # None: the number of ranks, which gives the average
    members: list[weakref.ref[nn.Module]] = field(default_factory=list, repr=False)  # modules of the call

    def __deepcopy__(self, memo: dict) -> Unit:
        memo[id(self)] = twin = Unit(self.reduce_dtype, self.divide_factor)  # copied modules register themselves
        return twin


UNIT = "_rtp_unit"  # attribute of a module that was passed to fully_rotate: its Unit


class Units:
    """Maps each parameter to the unit of the innermost enclosing module that was passed to fully_rotate."""

    def __init__(self, root: nn.Module) -> None:
        self._found: dict[int, list[Unit]] = {}  # by id of the parameter
        self._walk(root, root.__dict__[UNIT], set())

    def _walk(self, part: nn.Module, around: Unit, seen: set[tuple[int, int]]) -> None:
        unit = part.__dict__.get(UNIT, around)
        if (id(part), id(unit)) in seen:
            return
        seen.add((id(part), id(unit)))
        for parameter in part._parameters.values():
            units = self._found.setdefault(id(parameter), [])
            if not any(known is unit for known in units):
                units.append(unit)
        for child in part.children():
            self._walk(child, unit, seen)

    def of(self, name: str, parameter: torch.Tensor) -> Unit:
        """Returns the unit of a parameter. Raises ValueError if units with different divide factors share it."""
        units = self._found[id(parameter)]
        factors = sorted({str(unit.divide_factor) for unit in units})
        if len(factors) > 1:
            raise ValueError(
                f"{name}: expected one gradient divide factor for all parts that share a parameter, got "
                f"{' and '.join(factors)}: call set_gradient_divide_factor for each of them with the same factor, or "
                "convert them in one call, fully_rotate([part, other part])"
            )
        return units[0]


@dataclass
class Member:
    """A parameter of a policy, in the form that replicas compare."""

    name: str
    shape: tuple[int, ...]  # of this rank's shard
    dtype: torch.dtype
    unit: Unit
    requires_grad: bool

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype in which its gradients travel."""
        return summing_dtype(self.dtype, self.unit.reduce_dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GradientHandler:
    """See rtp_ext.ring.autograd.GradientHandler."""

    policy: OuterPolicy
    index: int

    def reduce(self, ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return self.policy.reduce_gradient(self.index, ctx, gradient)

    def local(self, parameter: DTensor) -> torch.Tensor:
        return self.policy.local(self.index, parameter)

    @property
    def alone(self) -> bool:
        return self.policy.size == 1

    @property
    def ring(self) -> Ring | None:
        return self.policy.ring

    def __deepcopy__(self, memo: dict) -> GradientHandler:
        return GradientHandler(copy.deepcopy(self.policy, memo), self.index)

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled parameter has no policy


class OuterPolicy:
    """Handles gradients after they were averaged over a ring. One policy belongs to one model.

    Attributes:
        ring: set by `fully_rotate`.
        requires_all_reduce: see rtp_ext.set_requires_all_reduce.
    """

    replicas_type = Replicas
    acts_alone = False  # whether the policy also acts with a single ring

    def __init__(self) -> None:
        self.ring: Ring | None = None
        self.replicas: Replicas | None = None  # None: a single ring
        self.requires_all_reduce = True
        self._members: list[Member] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._fingerprint: str | None = None
        self._verified = ""  # fingerprint that the replicas have compared
        self._compared = 0  # number of members whose values the replicas have compared

    # -- called by fully_rotate --------------------------------------------------------------------------------------

    def expect_free(self, ring: Ring | None) -> None:
        """Raises ValueError where the policy belongs to another ring than `ring`; None: to any."""
        if self.ring is not None and self.ring is not ring:
            raise ValueError(
                f"fully_rotate: expected an outer policy of its own for every model, got a {type(self).__name__} that "
                "belongs to another ring"
            )

    def connect(self, ring: Ring) -> None:
        """Gives the policy to a model on `ring`. Collective over all replicas."""
        if self.ring is ring:
            return  # modules that were converted before share it
        self.expect_free(ring)
        self.ring = ring
        if ring.replicas > 1:
            self.replicas = self.replicas_type(ring)

    def handle_gradients(self, root: nn.Module) -> None:
        """Registers the sharded parameters of a model. Parameters that are registered already keep their unit."""
        self._fingerprint = None
        units = Units(root)
        handled = False
        for name, parameter in root.named_parameters():
            if not isinstance(parameter, DTensor):
                continue
            unit, known = units.of(name, parameter), parameter.__dict__.get(GRADIENT_HANDLER)
            if known is None and self.size == 1 and unit.divide_factor is None and not self.acts_alone:
                continue  # the gradient is correct on arrival
            handled = True
            if known is not None and known.policy is self:
                member = self._members[known.index]
                member.dtype, member.requires_grad = parameter.dtype, parameter.requires_grad
            else:
                parameter.__dict__[GRADIENT_HANDLER] = GradientHandler(self, len(self._members))
                shape = local_shape(parameter)
                self._members.append(Member(name, shape, parameter.dtype, unit, parameter.requires_grad))
            if parameter.dtype.itemsize < 4:
                parameter.grad_dtype = None  # type: ignore[attr-defined]  # so that micro-batches accumulate in float32
        if handled and self.ring is not None:
            self.ring.traceable = False
        if handled and not any(reference() is root for reference in self._roots):
            self._roots.append(weakref.ref(root))

    def parameter(self, index: int) -> torch.Tensor | None:
        """Returns a parameter by its number; None if the model no longer has it."""
        return next((parameter for number, parameter in self._handled() if number == index), None)

    def _handled(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields number and parameter for every registered parameter that the model still has."""
        for reference in self._roots:
            root = reference()
            for parameter in () if root is None else root.parameters():
                known = parameter.__dict__.get(GRADIENT_HANDLER)
                if known is not None and known.policy is self:
                    yield known.index, parameter

    def _has(self, parameter: torch.Tensor) -> bool:
        handler = parameter.__dict__.get(GRADIENT_HANDLER)
        return handler is not None and handler.policy is self

    def _whole(self) -> nn.Module:
        """Returns the model that has all parameters of the policy."""
        roots = [root for reference in self._roots if (root := reference()) is not None]
        if not roots:
            raise ValueError(f"{type(self).__name__}: expected a policy that was given to fully_rotate")
        return max(roots, key=lambda root: sum(self._has(p) for p in root.parameters()))

    def _named(self) -> dict[str, tuple[int, Any]]:
        """Returns number and parameter, by name in the whole model."""
        named = self._whole().named_parameters()
        return {name: (p.__dict__[GRADIENT_HANDLER].index, p) for name, p in named if self._has(p)}

    def __deepcopy__(self, memo: dict) -> OuterPolicy:
        memo[id(self)] = twin = self._with_same_settings()  # a copy of a model has the same replicas
        twin.ring, twin.replicas = self.ring, self.replicas
        twin._members = [replace(member, unit=copy.deepcopy(member.unit, memo)) for member in self._members]
        twin.requires_all_reduce = self.requires_all_reduce
        return twin

    def _with_same_settings(self) -> OuterPolicy:
        """Returns a new policy with the same settings."""
        return type(self)()

    # -- settings ----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """K, the number of replicas."""
        return 1 if self.replicas is None else self.replicas.size

    def set_divide_factor(self, unit: Unit, factor: float | None, roots: Sequence[nn.Module]) -> None:
        """Sets the factor by which the gradients of a unit are divided. Collective.

        `roots`: all models that hold its parameters, the outermost first. Raises ValueError, and changes nothing, if
        another unit with another factor shares a parameter.
        """
        assert self.ring is not None, "set by fully_rotate"
        answers = self._gather_from_all_ranks(factor)
        if any(theirs != answers[0] for theirs in answers):
            raise ValueError(
                f"set_gradient_divide_factor: expected the same factor on every rank, got {factor} here and "
                f"{sorted(set(answers), key=str)} altogether"
            )
        before, unit.divide_factor = unit.divide_factor, factor
        try:
            for root in roots:
                self.handle_gradients(root)
        except ValueError:
            unit.divide_factor = before
            raise

    def _gather_from_all_ranks(self, value: Any) -> list[Any]:
        """Gathers `value` from every rank of all replicas, ring positions and tensor-parallel parts. Collective."""
        assert self.ring is not None, "set by fully_rotate"
        column = [[value]] if self.replicas is None else self.exchange([value])
        every = [theirs[0] for answers in self.ring.exchange(column) for theirs in answers]
        if self.ring.tensor_mesh is None:
            return every
        parts: list[Any] = [None] * self.ring.tensor_mesh.size()
        dist.all_gather_object(parts, every, group=self.ring.tensor_mesh.get_group())
        return [theirs for part in parts for theirs in part]

    def scale(self, unit: Unit) -> float:
        """Returns the factor applied to the mean over all ranks of the gradients of a unit."""
        assert self.ring is not None, "set by fully_rotate"
        ranks = self.ring.size * self.size
        return 1.0 if unit.divide_factor is None else ranks / unit.divide_factor

    def scaled(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Multiplies a gradient by the scale of its unit, keeping the dtype."""
        scale = self.scale(self._members[index].unit)
        return gradient if scale == 1.0 else (unrounded(gradient) * scale).to(gradient.dtype)

    # -- comparison of replicas --------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Returns a hash of all members; equal on all replicas."""
        if self._fingerprint is None:
            self._fingerprint = hashlib.sha256(repr(self._members).encode()).hexdigest()
        return self._fingerprint

    def exchange(self, value: Any) -> list[Any]:
        """Gathers `value` from every replica. Raises ValueError, and ends the ring, if the types of the values differ.
        Collective."""
        assert self.replicas is not None, "one replica exchanges nothing"
        answers = self.replicas.exchange(value)
        hint = ": every rank has to do the same with its model, at the same step: "
        hint += "optimizer steps, freezing and thawing, loading of checkpoints"
        with self._ended_by_differences():
            expect_same("replicas disagree on what comes next", answers, key=type, named="replica {}".format, hint=hint)
        return answers

    @contextlib.contextmanager
    def _ended_by_differences(self) -> Iterator[None]:
        """Ends the replicas where one does other things than the others: sums that it has begun never end."""
        try:
            yield
        except ValueError as error:
            assert self.replicas is not None, "one replica differs from none"
            self.replicas.end(error)
            raise

    def verify(self) -> None:
        """Raises ValueError on every rank if replicas hold different models or weights. Collective over all ranks.

        Compares each set of parameters once, and the values of each new parameter once.
        """
        current = self.fingerprint()
        if self._verified == current or self.replicas is None:
            return
        for problem in self._gather_from_all_ranks(self._problem()):
            if problem is not None:
                raise ValueError(problem)
        self._verified, self._compared = current, len(self._members)

    def _problem(self) -> str | None:
        """Returns in what the replicas of this rank differ; None: in nothing. Collective over replicas."""
        answers = differing(self, (self.fingerprint(), self._checksums()))
        return _difference(answers) if answers else None

    def _checksums(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for index, parameter in self._handled():
            if index >= self._compared and not is_piece(parameter):
                sums[self._members[index].name] = checksum(held(parameter).detach())
        return sums

    # -- hooks for subclasses ----------------------------------------------------------------------------------------

    allows_in_place = True  # whether the shards of its parameters may travel in place
    allows_offload = True  # whether shards may stay in host memory
    allows_tensor_parallel = True  # whether the ring may cut tensor-parallel parameters

    def placement_over(self, replicas: int, shape: Sequence[int], dim: int | None, ranks: int) -> Placement | None:
        """How a parameter of `shape` that a ring of `ranks` cuts along `dim` lies over the replicas once the policy has
        it; None: it lies on the ring alone."""
        return Replicate()

    def cut(self, root: nn.Module) -> None:
        """Lays the parameters of a converted model out as the policy keeps them. Collective."""

    def begin_forward(self) -> None:
        """Called when an outermost forward begins, outside of backward. May be collective."""

    def end_forward(self) -> None:
        """Called when the outermost forward has ended or failed."""

    def local(self, index: int, parameter: DTensor) -> torch.Tensor:
        """See rtp_ext.ring.autograd.GradientHandler."""
        return held(parameter)

    def reduce_gradient(self, index: int, ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """See rtp_ext.ring.autograd.GradientHandler."""
        raise NotImplementedError

    def reduce_whole(self, gradient: torch.Tensor, name: str, unit: Unit) -> torch.Tensor:
        """Averages the gradient of a parameter that every rank holds whole over replicas, times the scale of its
        unit."""
        raise NotImplementedError

    @contextlib.contextmanager
    def left_for_later(self) -> Iterator[None]:
        """Context in which backwards pass gradients on unreduced, for `reduce`: parts of a pipeline's backward,
        including torch.autograd.grad, whose results the pipeline adds to p.grad."""
        yield

    def reduce(self) -> None:
        """Reduces deferred gradients, unless `requires_all_reduce` is False or a backward has reduced. Collective."""

    def restart(self) -> None:
        """Discards the state of a backward that did not finish. Called when a forward begins."""

    def bytes_sent(self) -> int:
        """Returns the bytes of gradients that this rank has sent to other replicas since the start."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a checkpoint needs beyond the model and its optimizer."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of `state_dict`."""
        if state:
            raise ValueError(f"{type(self).__name__}: expected an empty state, got one of {', '.join(map(str, state))}")


_PIECE = 1 << 18  # elements


def checksum(values: torch.Tensor) -> int:
    """Returns a hash of the bytes of a tensor and their positions."""
    flat = values.contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, piece in enumerate(flat.split(_PIECE)):
        places = torch.arange(1, piece.numel() + 1, device=flat.device)
        total += (piece.long() * places * places).sum() * (2 * number + 1)
    return int(total)


def _difference(answers: list[tuple[str, dict[str, int]]]) -> str | None:
    """Describes the first difference between replicas; None if there is none."""
    names, sums = answers[0]
    for replica, (their_names, their_sums) in enumerate(answers):
        if their_names != names:
            missing = ", ".join(sorted(set(sums).symmetric_difference(their_sums))[:5])
            return (
                f"the model differs between replicas 0 and {replica}: expected the same parameters, of the same shapes "
                f"and dtypes, in the same order, the same of them frozen, "
                f"with the same reduce_dtype and divide factor{missing and ', got differences in ' + missing}"
            )
        for name, value in sums.items():
            if their_sums.get(name) != value:
                return (
                    f"expected the same weights in all replicas, got values of {name} in replica {replica} that are "
                    "not those of replica 0: the ranks were built with different seeds or weights, and training would "
                    "diverge. Seed every rank with the same value, or load a checkpoint on every rank"
                )
    return None
