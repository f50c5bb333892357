"""Muon on sharded matrices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr

from rtp_ext.convert.adafactor import shard_of
from rtp_ext.optim.exchange import Sharers, on, run_round
from rtp_ext.optim.layout import Layout, expect_matrices, matrices_of
from rtp_ext.optim.newton_schulz import Iteration
from rtp_ext.optim.plan import ROUND, Plan, Task, make_plan
from rtp_ext.optim.table import PlanTable
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import as_gradient
from rtp_ext.words import Exchange, LearningRateAdjustment

# Options of a group that all ranks must share, beside those that are numbers.
_OPTIONS = ("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "blocks")

_Entry = tuple[int, Tensor, dict[str, Any]]  # a parameter's index in the optimizer, itself, and its group


class Muon(Optimizer):
    """torch.optim.Muon for the parameters of a model after `fully_rotate`, whose matrices are whole on no rank.

    The update is that of torch.optim.Muon on the whole matrices, with the iteration in float32 (float64 for float64
    parameters) instead of bfloat16, from gradients averaged over ring and replicas. Momentum is cut like the
    parameters. Replicas that train apart (LocalSGD, DiLoCo, Gossip) each step on matrices of their own.

    Each matrix has an owner, one of the ranks that hold a part of it, which runs the Newton-Schulz iteration. Owners
    are spread by work. A matrix with sides m >= n over R ranks reaches its owner in one of two ways:

    - `gram`: each rank sends the triangle of X_r^T X_r, n (n + 1) / 2 numbers, for its part X_r of the momentum. The
      owner iterates their sum, and returns the triangle of Q. Each rank computes X_r Q. Sent on average: n (n + 1)
      (R - 1) / R numbers. Only for matrices cut along their long side; others always go whole.
    - `whole`: parts travel to the owner, which iterates the matrix, and updates return: 2 m n (R - 1) / R^2 numbers.

    A matrix that one rank has whole is iterated there. docs/optimizers.md has the accuracy of both.

    Args:
        params: parameters [m, n], or stacks [E, m, n] of E matrices (experts); plain parameters too, which are iterated
            on every rank. Groups may have the option `blocks`: the rows of each (of each expert) are that many matrices
            of equal size, orthogonalised one by one, such as 3 for fused q, k and v.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in torch.optim.Muon.
            Learning rates are adjusted by the shape of one matrix.
        exchange: `gram`, `whole`, or `auto`: for each matrix the one with the lower sum of operations and bytes.

    The first step is collective over all ranks that share parameters, and makes a process group. Every step compares
    learning rates, other options and the parameters with gradients, and raises ValueError on every rank if they differ.
    It recognises parameters by their names if the optimizer was built from named ones, otherwise by their order, which
    all ranks must share. If all learning rates are 0, a step updates the momentum, and no matrix travels.

    Raises ValueError or TypeError for parameters that are no matrices, DTensors on meshes of others, or unknown
    options.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (DEFAULT_A, DEFAULT_B, DEFAULT_C),
        eps: float = EPS,
        ns_steps: int = 5,
        adjust_lr_fn: LearningRateAdjustment | None = None,
        *,
        exchange: Exchange = "auto",
    ) -> None:
        if exchange not in get_args(Exchange):
            raise ValueError(f"Muon: expected an exchange of {', '.join(get_args(Exchange))}, got {exchange!r}")
        self._exchange = exchange
        self._begin()
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)

    def _begin(self) -> None:
        self._round_bytes = ROUND
        self._sent = 0
        self._plans: tuple[Any, list[Plan]] = (None, [])  # and what they depend on
        self._sharers: dict[Layout, Sharers] = {}

    # -- parameters and state ------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            for parameter in group["params"]:
                expect_matrices(parameter, group.get("blocks", 1))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of every optimizer; groups of a state dict without `blocks`, such as torch.optim.Muon's, keep theirs."""
        blocks = [group.get("blocks") for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, known in zip(self.param_groups, blocks, strict=True):
            if known is not None:
                group.setdefault("blocks", known)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_exchange": self._exchange}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_plans" not in self.__dict__:  # a copy, or unpickled
            self._begin()

    # -- the plan ------------------------------------------------------------------------------------------------------

    def bytes_sent(self) -> int:
        """Bytes of contributions and results that this rank has sent. Excludes padding to 16 bytes, and the comparison
        of ranks in each step."""
        return self._sent

    def plan(self) -> PlanTable:
        """Returns what each matrix does in a step: `str` is a table, `rows` the data. For the parameters with
        gradients; before the first backward for all that require one."""
        parameters = [entry for entry in self._parameters() if entry[1].grad is not None]
        if not parameters:
            parameters = [entry for entry in self._parameters() if entry[1].requires_grad]
        return PlanTable.of(self._planned(parameters), self._names())

    def _parameters(self) -> Iterator[_Entry]:
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                yield index, parameter, group
                index += 1

    def _names(self) -> list[str]:
        """The names of the parameters if the optimizer got any, else their places in the groups."""
        found: list[str] = []
        for number, group in enumerate(self.param_groups):
            places = (f"params[{place}] of group {number}" for place in range(len(group["params"])))
            found += group.get("param_names") or places
        return found

    def _planned(self, parameters: list[_Entry]) -> list[Plan]:
        """Returns a plan for the parameters of each layout, in the order in which layouts first appear."""
        described = [
            (i, Layout.of(p), p.shape, self._dtype(p), group.get("blocks", 1), Iteration.of(group))
            for i, p, group in parameters
        ]
        key = (self._exchange, self._round_bytes, described)
        if self._plans[0] != key:
            by_layout: dict[Layout, list[Any]] = {}
            for (index, layout, _, dtype, blocks, iteration), (_, p, _) in zip(described, parameters, strict=True):
                expect_matrices(p, blocks)
                found = matrices_of(index, p, blocks, layout)
                by_layout.setdefault(layout, []).extend((matrix, iteration, dtype) for matrix in found)
            plans = [make_plan(each, some, self._exchange, self._round_bytes) for each, some in by_layout.items()]
            self._plans = key, plans
        return self._plans[1]

    def _sharers_of(self, layout: Layout, parameter: Tensor) -> Sharers | None:
        if layout.mesh is None:
            return None
        if layout not in self._sharers:
            self._sharers[layout] = sharers = Sharers(layout, parameter)
            weakref.finalize(self, sharers.leave).atexit = False
        return self._sharers[layout]

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Takes a step. Collective over the ranks that share parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [entry for entry in self._parameters() if entry[1].grad is not None]
        for _, parameter, _ in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise RuntimeError("Muon does not support sparse gradients")
        for group in self.param_groups:
            _check_options(group)
        plans = self._agreed(parameters)  # before anything changes
        if all(float(group["lr"]) == 0.0 for group in self.param_groups):
            plans = []
        entries = {index: self._learn(parameter, group) for index, parameter, group in parameters}
        for plan, sharers in plans:
            first = entries[plan.tasks[0].matrix.parameter]
            device = first.shard.device if sharers is None else sharers.device
            step = _Step(entries, 0 if sharers is None else sharers.rank, device)
            with torch.autocast(device.type, enabled=False):
                for tasks in plan.rounds:
                    self._sent += run_round(tasks, sharers, step.source, step.sink, device)
        return loss

    def _agreed(self, parameters: list[_Entry]) -> list[tuple[Plan, Sharers | None]]:
        """Returns the plans, each with the ranks that share its parameters, which have agreed on the step. All ranks
        of all parameters take part: one of them may have no gradients, by mistake."""
        facts = self._facts(parameters)
        first: dict[Layout, Tensor] = {}
        for _, parameter, _ in self._parameters():
            first.setdefault(Layout.of(parameter), parameter)
        found = {layout: self._sharers_of(layout, parameter) for layout, parameter in first.items()}
        for sharers in found.values():
            if sharers is not None:
                sharers.agree(facts)
        return [(plan, found[plan.layout]) for plan in self._planned(parameters)]

    def _learn(self, parameter: Tensor, group: dict[str, Any]) -> _Shard:
        """Updates the momentum of a parameter, and returns this rank's shards."""
        gradient, state = shard_of(parameter.grad, parameter), self.state[parameter]
        if "momentum_buffer" not in state:
            zeros = torch.zeros_like(gradient)
            state["momentum_buffer"] = as_gradient(zeros, parameter._spec) if isinstance(parameter, DTensor) else zeros
        buffer = held(state["momentum_buffer"])
        buffer.lerp_(gradient.to(buffer.dtype), 1 - group["momentum"])
        return _Shard(held(parameter), gradient, buffer, group)

    def _facts(self, parameters: list[_Entry]) -> list[str]:
        facts = [f"exchange={self._exchange!r}, rounds of {self._round_bytes} bytes"]
        for number, group in enumerate(self.param_groups):
            options = {key: group.get(key, 1) for key in _OPTIONS}
            options |= {key: float(group[key]) for key in ("lr", "weight_decay", "momentum")}
            facts.append(f"options {options} of group {number}")
        names = self._names()
        for index, parameter, _ in parameters:
            facts.append(f"a gradient of {names[index]}, {tuple(parameter.shape)} in {self._dtype(parameter)}")
        return facts

    def _dtype(self, parameter: Tensor) -> torch.dtype:
        """Returns the dtype of the momentum."""
        like = self.state.get(parameter, {}).get("momentum_buffer", parameter.grad)
        return parameter.dtype if like is None else like.dtype


@dataclass(frozen=True)
class _Shard:
    """This rank's shards of a parameter, its gradient and its momentum; and the options of its group."""

    shard: Tensor
    gradient: Tensor
    momentum: Tensor
    group: dict[str, Any]


class _Step:
    """The momentum and the updates of this rank's shards in one step."""

    def __init__(self, shards: dict[int, _Shard], rank: int, device: torch.device) -> None:
        self._shards, self._rank, self._device = shards, rank, device

    def source(self, task: Task) -> Tensor:
        own = self._shards[task.matrix.parameter]
        part = task.matrix.of_shard(own.momentum, self._rank)
        if own.group["nesterov"]:
            gradient = task.matrix.of_shard(own.gradient, self._rank)
            part = gradient.to(part.dtype).lerp(part, own.group["momentum"])
        return on(self._device, part)

    def sink(self, task: Task, update: Tensor) -> None:
        own = self._shards[task.matrix.parameter]
        group, shard = own.group, task.matrix.of_shard(own.shard, self._rank)
        rate = float(group["lr"])
        shard.mul_(1 - rate * group["weight_decay"])
        adjusted = _adjust_lr(rate, group["adjust_lr_fn"], torch.Size(task.matrix.shape))
        shard.add_(on(shard.device, update), alpha=-adjusted)


def _check_options(group: dict[str, Any]) -> None:
    for name in ("lr", "momentum", "weight_decay"):
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Muon: expected {name} to be a number or a tensor of one, got shape {tuple(value.shape)}")
        if not float(value) >= 0.0:
            raise ValueError(f"Muon: expected {name} >= 0, got {value}")
    known = (None, *get_args(LearningRateAdjustment))
    if group["adjust_lr_fn"] not in known:
        raise ValueError(f"Muon: expected adjust_lr_fn of {known}, got {group['adjust_lr_fn']!r}")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"Muon: expected three ns_coefficients, got {group['ns_coefficients']}")
    if not 0 <= group["ns_steps"] < 100:
        raise ValueError(f"Muon: expected 0 <= ns_steps < 100, got {group['ns_steps']}")
