"""torch's Adafactor on shards: its statistics are means over rows, columns and whole matrices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import as_gradient, gradient_handler_of, run_collective
from rtp_ext.ring.mesh import own_part


def shard_of(value: Any, parameter: Any) -> Any:
    """Returns this rank's shard of a gradient or a value of the state of a parameter, which is sharded like it."""
    if not isinstance(value, DTensor):
        return value
    if value.shape == parameter.shape and value.placements != parameter.placements:
        value = value.redistribute(placements=parameter.placements)
    return held(value)


_ROWS, _COLUMNS = -1, -2  # the dimension that a sum over each row, or each column, leaves out


@dataclass
class _Step:
    """One parameter in one step, laid out over its mesh as `parameter` is."""

    parameter: DTensor
    gradient: Tensor  # this rank's shard; negated where the step maximizes
    state: dict[str, Any]

    def own(self, whole: Tensor, *without: int) -> Tensor:
        """Returns this rank's part, a view, of a tensor of the parameter's shape with some dimensions of size 1."""
        left_out = {dim % self.parameter.dim() for dim in without}
        kept = [
            Replicate() if getattr(placement, "dim", None) in left_out else placement
            for placement in self.parameter.placements
        ]
        return own_part(whole, self.parameter.device_mesh, kept)

    def zeros(self, without: int) -> Tensor:
        shape = list(self.parameter.shape)
        shape[without] = 1
        return self.gradient.new_zeros(shape)

    def begin(self) -> None:
        """Creates the same state as torch's Adafactor."""
        if self.state:
            return
        self.state["step"] = torch.tensor(0.0, dtype=torch.get_default_dtype())
        spec = self.parameter._spec
        if self.parameter.dim() < 2:
            self.state["variance"] = as_gradient(torch.zeros_like(self.gradient), spec)
            return
        for name, dim in (("row_var", _ROWS), ("col_var", _COLUMNS)):
            zeros = self.zeros(dim)
            meta = TensorMeta(zeros.shape, zeros.stride(), zeros.dtype)
            whole = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=meta)
            self.state[name] = as_gradient(zeros, whole)

    def squares(self) -> list[Tensor]:
        """Returns sums of squares over this rank's shard: of the parameter, and of each row and column of the
        gradient."""
        wide = _accumulation_dtype(self.gradient.dtype)
        sums = [held(self.parameter).to(wide).square().sum()]
        squares = self.gradient.to(wide).square()
        for dim in (_ROWS, _COLUMNS) if self.parameter.dim() > 1 else ():
            whole = self.zeros(dim).to(wide)
            self.own(whole, dim).copy_(squares.sum(dim, keepdim=True))
            sums.append(whole)
        return sums

    def learn(self, sums: Sequence[Tensor], weight: float) -> None:
        """Updates the running variances. `sums`: whole sums of squares over rows and columns."""
        if self.parameter.dim() < 2:
            variance = held(self.state["variance"])
            variance.lerp_(self.gradient.square(), weight)
            return
        for name, dim, found in zip(("row_var", "col_var"), (_ROWS, _COLUMNS), sums, strict=True):
            known = held(self.state[name])
            known.lerp_((found / self.parameter.shape[dim]).to(known.dtype), weight)

    def update(self, eps: float) -> Tensor:
        """Returns the update of this rank's shard, before it is clipped and scaled."""
        wide = _accumulation_dtype(self.gradient.dtype)
        if self.parameter.dim() < 2:
            estimate = held(self.state["variance"]).to(wide, copy=True)
        else:
            rows, columns = (held(self.state[name]).to(wide) for name in ("row_var", "col_var"))
            mean = rows.mean(_COLUMNS, keepdim=True).clamp_(min=eps)
            estimate = self.own(rows, _ROWS) * self.own(columns, _COLUMNS)
            estimate.div_(self.own(mean, _ROWS, _COLUMNS))
        return estimate.clamp_(min=eps * eps).rsqrt_().mul_(self.gradient)


def step_on_shards(group: dict[str, Any], parameters: Sequence[DTensor], state: Any) -> None:
    """Runs a step of torch's Adafactor for parameters of one group that are sharded over a mesh. Sends the sums over
    rows and columns, and two numbers for each parameter, once in a step. Collective over the sharding ranks."""
    steps = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = shard_of(parameter.grad, parameter)
        steps.append(_Step(parameter, -gradient if group["maximize"] else gradient, state[parameter]))
        steps[-1].begin()
    (least, least_scale), rate = group["eps"], float(group["lr"])
    found = _sum_over_shards(steps, [step.squares() for step in steps])
    scales, updates = [], []
    for step, (norm, *sums) in zip(steps, found, strict=True):
        step.state["step"] += 1
        number = step.state["step"].item()
        step.learn(sums, number ** group["beta2_decay"])
        root_mean_square = (norm / step.parameter.numel()).sqrt()
        scales.append(root_mean_square.clamp_(min=least_scale).mul_(min(rate, 1 / math.sqrt(number))))
        updates.append([step.update(_eps(least, step)).square().sum()])
    # Updates are computed twice: all of them together would be as large as the parameters.
    for step, scale, (norm,) in zip(steps, scales, _sum_over_shards(steps, updates), strict=True):
        clip = (norm / step.parameter.numel()).sqrt().div_(group["d"]).clamp_(min=1.0)
        shard = held(step.parameter)
        shard.mul_(1 - rate * group["weight_decay"])
        shard.sub_(step.update(_eps(least, step)).mul_(scale / clip))


def _eps(given: float | None, step: _Step) -> float:
    return torch.finfo(step.parameter.dtype).eps if given is None else given


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _sum_over_shards(steps: Sequence[_Step], values: Sequence[list[Tensor]]) -> list[list[Tensor]]:
    """Returns the sums of each parameter's values over the ranks that hold different shards of it; replicas with local
    training have sums of their own."""
    together: dict[Any, list[int]] = defaultdict(list)
    for number, (step, own) in enumerate(zip(steps, values, strict=True)):
        placements = step.parameter.placements
        cut = tuple(i for i, placement in enumerate(placements) if isinstance(placement, (Shard, _StridedShard)))
        together[step.parameter.device_mesh, cut, own[0].dtype, own[0].device].append(number)
    found: dict[int, list[Tensor]] = {}
    for (mesh, cut, *_), numbers in together.items():
        flat = torch.cat([value.reshape(-1) for number in numbers for value in values[number]])
        handler = gradient_handler_of(steps[numbers[0]].parameter)
        for dim in cut:
            run_collective(mesh, handler, "Adafactor", dist.all_reduce, flat, group=mesh.get_group(dim))
        parts = iter(flat.split([value.numel() for number in numbers for value in values[number]]))
        for number in numbers:
            found[number] = [next(parts).view(value.shape) for value in values[number]]
    return [found[number] for number in range(len(steps))]
