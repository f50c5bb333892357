"""ZeroOuter reduce-scatters gradients over replicas, so that all ranks share the optimizer state.

Registered parameters. In a model with K replicas of rings of R ranks, every parameter is a DTensor, and each rank holds
1/(R K) of it, its piece. The parameter is cut over the ring as usual, and the resulting shard over the replicas, along
the same dimension where DTensors can express it, otherwise along another. This layout applies from the end of
fully_rotate on; stock optimizers, clipping and checkpoints handle it. Scalars, and the few vectors with unsuitable
sizes, are not cut over the replicas.

Rotated shards. The policy gathers the pieces of all replicas into a plain tensor, the shard (1/R). At the start of an
outermost forward every rank compares its pieces with its shards value by value, because writes through `.data` and by
foreach optimizers change no version counter. The replicas exchange which pieces differ and gather those. The result
therefore does not depend on the writer: an optimizer, load_state_dict, or the user on one rank. Each forward costs one
read of the pieces and one small exchange between the replicas; all replicas have to take part.

Reduction. The schedule is that of AllReduce, with a reduce-scatter in place of the all-reduce. Without a reduction,
p.grad accumulates as in AllReduce; it is then a DTensor of the whole shard (same shape, different layout), and the next
reduction replaces it by the gradient of the piece. A reduced gradient that already exists is multiplied by K and added
to this rank's piece of the shard; the mean over replicas restores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from rtp_ext._native import RotationError, shard_sizes, share_version
from rtp_ext.outer.all_reduce import BUCKET, AllReduce
from rtp_ext.outer.buckets import InFlightBucket, bucketed
from rtp_ext.outer.policy import checksum, logger
from rtp_ext.parameters.cut_over_replicas import (
    as_pieces,
    cut_local,
    is_piece,
    let_state_dicts_fit,
    local_spec,
    own_piece,
    piece_placement,
    piece_placements,
)
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import GRADIENT_HANDLER, as_gradient
from rtp_ext.ring.links.agree import expect_same
from rtp_ext.ring.mesh import piece_dim, ring_dim


@dataclass
class _GatheredShard:
    """A shard that was gathered from the pieces of all replicas."""

    tensor: torch.Tensor
    version: int  # version counter of the parameter at the last comparison


@dataclass(frozen=True)
class _ChangeMessage:
    """Message that replicas exchange before they gather shards."""

    model: str
    wanted: tuple[int, ...]  # numbers of parameters
    changed: tuple[int, ...]


class ZeroOuter(AllReduce):
    """Averages gradients over replicas; each replica keeps 1/K of every shard and of its optimizer state.

    Computes the exact gradient of all batches, as AllReduce does. Optimizer state and p.grad take 1/(R K) of the model.
    Sends fewer bytes: a reduce-scatter of gradients, and an all-gather of changed weights in the dtype of the
    parameters. The shards that rotate (1/R of the model) come on top of the registered 1/(R K).

    Every replica has to call forward the same number of times. A module may be called outside the model; each of its
    parameters then costs a small exchange.

    Args:
        bucket_bytes: upper bound of a bucket in bytes, unless one shard is larger.
    """

    allows_in_place = False
    allows_offload = False
    allows_tensor_parallel = False

    def __init__(self, bucket_bytes: int = BUCKET) -> None:
        super().__init__(bucket_bytes=bucket_bytes)
        self._local_shards: dict[int, _GatheredShard] = {}  # by parameter number
        self._dims: dict[int, int | None] = {}  # by parameter number: dimension of the cut; None: not cut
        self._in_forward = False
        self._sent_bytes = 0  # by scatters and gathers

    def __deepcopy__(self, memo: dict) -> ZeroOuter:
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, ZeroOuter)
        twin._dims = dict(self._dims)
        return twin

    def bytes_sent(self) -> int:
        """Bytes of gradients and weights that this rank sent.

        (K - 1) / K of the reduced bytes (twice that over Gloo, which sums whole buckets), plus (K - 1) times this
        rank's gathered pieces, each padded to the longest piece of its shard. Excludes bookkeeping messages.
        """
        return super().bytes_sent() + self._sent_bytes

    # -- registered parameters -----------------------------------------------------------------------------------------

    def placement_over(self, replicas: int, shape: Sequence[int], dim: int | None, ranks: int) -> Placement | None:
        found = None if dim is None or replicas == 1 else piece_placement(shape, dim, replicas, ranks)
        return found or Replicate()

    def cut(self, root: nn.Module) -> None:
        if self.replicas is None:
            return
        assert self.ring is not None and self.ring.parameter_mesh is not None, "replicas have a mesh"
        let_state_dicts_fit(self.ring.parameter_mesh)
        shards: dict[str, torch.Tensor] = {}
        pieces: dict[int, nn.Parameter] = {}
        for name, parameter in root.named_parameters():
            placements = self._placements(parameter)
            if placements is not None:
                pieces[id(parameter)] = as_pieces(parameter, placements)  # type: ignore[arg-type]
                shards[name] = parameter
        self._warn_of_other_values(shards)
        for module in root.modules():
            for name, shard in module._parameters.items():
                if id(shard) in pieces:
                    module._parameters[name] = pieces[id(shard)]

    def _placements(self, parameter: Any) -> tuple[Placement, Placement] | None:
        """Returns the placements that cut a parameter over the replicas; None if it is cut already or cannot be."""
        assert self.ring is not None, "set by fully_rotate"
        if not isinstance(parameter, DTensor) or parameter.device_mesh != self.ring.parameter_mesh:
            return None
        return None if ring_dim(parameter) is None or is_piece(parameter) else piece_placements(parameter)

    def _warn_of_other_values(self, shards: dict[str, torch.Tensor]) -> None:
        answers = self.exchange({name: checksum(held(p).detach()) for name, p in shards.items() if not p.is_meta})
        if self.replicas is not None and self.replicas.rank:  # one warning for all replicas
            return
        for replica, theirs in enumerate(answers):
            for name, value in answers[0].items():
                if theirs.get(name, value) != value:
                    logger.warning(
                        "fully_rotate: the values of %s in replica %d are not those of replica 0: the ranks were built "
                        "with different seeds or weights, and the model now mixes pieces of both. Seed every rank "
                        "with the same value, or load a checkpoint",
                        name,
                        replica,
                    )
                    return

    def handle_gradients(self, root: nn.Module) -> None:
        for name, parameter in root.named_parameters() if self.size > 1 else ():
            if self._placements(parameter) is not None:
                raise ValueError(
                    f"{name}: expected parameters that were in the model when fully_rotate was called, got a shard "
                    "that joined it later. ZeroOuter cannot cut it, because optimizers may hold it already. "
                    "Build the whole model before fully_rotate"
                )
        super().handle_gradients(root)
        for index, handled in self._handled():
            self._dims[index] = piece_dim(handled._spec)  # type: ignore[attr-defined]

    # -- rotated shards ------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self._refresh(dict(self._handled()))
        self._in_forward = True

    def end_forward(self) -> None:
        self._in_forward = False

    def local(self, index: int, parameter: DTensor) -> torch.Tensor:
        if self.size == 1 or self._dims[index] is None:
            return held(parameter)
        if not self._in_forward and torch._C._current_graph_task_id() == -1:
            self._refresh({index: parameter})
        local = self._local_shards.get(index)
        if local is None or local.version != parameter._version:
            raise RotationError(
                f"{self._members[index].name}: expected weights that stay unchanged from the start of a forward to "
                "the end of its backward, got a write in between, which the rotated shards do not contain: "
                "write to weights before the forward of the whole model"
            )
        return local.tensor

    def _refresh(self, parameters: dict[int, torch.Tensor]) -> None:
        """Updates the shards of parameters from the pieces of all replicas. Collective over the replicas."""
        if self.replicas is None:
            return
        self.verify()
        wanted = {i: parameter for i, parameter in sorted(parameters.items()) if self._dims[i] is not None}
        changed = self._changed(wanted)
        answers = self.exchange(_ChangeMessage(self.fingerprint(), tuple(wanted), changed))
        expect_same(
            "replicas disagree on which weights they need",
            answers,
            key=lambda each: (each.model, each.wanted),
            show=lambda each: f"those of {', '.join(self._members[i].name for i in each.wanted[:5])}, ...",
            named="replica {}".format,
            hint=": every rank has to call the same modules",
        )
        gathered = sorted({index for theirs in answers for index in theirs.changed})
        with torch.inference_mode(False), torch.no_grad():
            sizes = ((index, wanted[index].dtype, self._members[index].numel) for index in gathered)
            for bucket in bucketed(sizes, self.bucket_bytes):
                self._gather(bucket, wanted)
        for index, parameter in wanted.items():
            self._local_shards[index].version = parameter._version

    def _changed(self, parameters: dict[int, torch.Tensor]) -> tuple[int, ...]:
        """Returns the numbers of the parameters whose shard differs from this rank's piece."""
        differ: dict[int, Any] = {}
        with torch.inference_mode(False), torch.no_grad():
            for index, parameter in parameters.items():
                local, piece = self._local_shards.get(index), held(parameter)
                if local is None or (local.tensor.dtype, local.tensor.device) != (piece.dtype, piece.device):
                    differ[index] = True
                else:
                    differ[index] = (own_piece(local.tensor, parameter._spec) != piece).any()  # type: ignore[attr-defined]
        flags = [flag for flag in differ.values() if isinstance(flag, torch.Tensor)]
        found = iter(torch.stack(flags).tolist() if flags else ())  # one host sync
        return tuple([i for i, flag in differ.items() if (next(found) if isinstance(flag, torch.Tensor) else flag)])

    def _gather(self, bucket: Sequence[int], parameters: dict[int, torch.Tensor]) -> None:
        assert self.replicas is not None, "one replica gathers nothing"
        pieces = [held(parameters[index]) for index in bucket]
        widths = [self._width(index) for index in bucket]
        flat = torch.zeros(sum(widths), dtype=pieces[0].dtype, device=pieces[0].device)
        for place, piece in zip(flat.split(widths), pieces, strict=True):
            place[: piece.numel()].copy_(piece.reshape(-1))
        if flat.numel():
            self._sent_bytes += (self.size - 1) * flat.nbytes
        rows = self.replicas.all_gather(flat) if flat.numel() else flat.expand(self.size, -1)
        for index, columns in zip(bucket, rows.split(widths, dim=1), strict=True):
            parameter = parameters[index]
            known = self._local_shards.get(index)
            if known is None or (known.tensor.dtype, known.tensor.device) != (flat.dtype, flat.device):
                local = torch.empty(self._members[index].shape, dtype=flat.dtype, device=flat.device)
                known = self._local_shards[index] = _GatheredShard(local, 0)
            share_version(known.tensor, parameter)  # autograd then detects a backward that needs the old values
            for place, row in zip(self._pieces(index, known.tensor), columns, strict=True):
                place.copy_(row[: place.numel()].view(place.shape))

    # -- reduction -----------------------------------------------------------------------------------------------------

    def _pieces(self, index: int, local: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns the piece of each replica, as views of a shard or of its gradient."""
        dim = self._dims[index]
        return [local] * self.size if dim is None else cut_local(local, dim, self.size)

    def _piece_shape(self, index: int, replica: int) -> torch.Size:
        dim, shape = self._dims[index], list(self._members[index].shape)
        if dim is not None:
            shape[dim] = shard_sizes(shape[dim], self.size)[replica]
        return torch.Size(shape)

    def _width(self, index: int) -> int:
        """Returns the number of elements of the first, largest piece of a parameter."""
        return self._piece_shape(index, 0).numel()

    def _own_shape(self, index: int) -> torch.Size:
        """Returns the shape of this rank's piece."""
        assert self.replicas is not None, "one replica cuts nothing"
        return self._piece_shape(index, self.replicas.rank)

    def _pack(self, bucket: tuple[int, ...], values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Returns [K, n]: row k holds the pieces of replica k."""
        assert self.replicas is not None, "one replica sends nothing"
        widths = [self._width(index) for index in bucket]
        wire_dtype = self._members[bucket[0]].wire_dtype
        rows = torch.zeros(self.size, sum(widths), dtype=wire_dtype, device=self.replicas.device)
        for index, value, columns in zip(bucket, values, rows.split(widths, dim=1), strict=True):
            for piece, row in zip(() if value is None else self._pieces(index, value), columns, strict=False):
                row[: piece.numel()].view(piece.shape).copy_(piece)
        return rows

    def _begin(self, flat: torch.Tensor, bucket: tuple[int, ...]) -> InFlightBucket:
        assert self.replicas is not None, "one replica sends nothing"
        work, row = self.replicas.begin_reduce_scatter(flat)
        self._sent_bytes += self.replicas.sent_by_scatter(row)
        return InFlightBucket(work, flat, row, bucket)

    def _wait_for_bucket(self, flight: InFlightBucket) -> Sequence[torch.Tensor]:
        assert self.replicas is not None, "one replica sends nothing"
        self.replicas.end_sum(flight.work)
        columns = flight.flat.div_(self.size).split([self._width(index) for index in flight.indices])
        return [column[: self._own_shape(i).numel()] for i, column in zip(flight.indices, columns, strict=True)]

    def _reduce_now(self, index: int, value: torch.Tensor) -> torch.Tensor:
        self._agree(self._current(), f"the gradient of {self._members[index].name}")
        flat = self._pack((index,), [value])
        if not flat.numel():
            return value.new_empty(self._own_shape(index))
        (part,) = self._wait_for_bucket(self._begin(flat, (index,)))
        return part.view(self._own_shape(index)).to(value.dtype)

    # -- unreduced gradients -------------------------------------------------------------------------------------------

    def _to_add_up(self, index: int, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """Returns `value` as a gradient of the shard, and converts an existing p.grad to that layout."""
        if self._dims[index] is None:
            return super()._to_add_up(index, parameter, value)
        spec, before = local_spec(parameter._spec), parameter.grad
        if before is not None and is_piece(before):
            wide = value.new_zeros(value.shape)
            own_piece(wide, parameter._spec).copy_(held(before)).mul_(self.size)
            parameter.grad = as_gradient(wide, spec)
        elif before is not None and before.dtype != value.dtype:
            parameter.grad = as_gradient(held(before).to(value.dtype), spec)
        return as_gradient(value.detach(), spec)

    def _take_unreduced(self, index: int, parameter: Any, keep: bool = False) -> torch.Tensor | None:
        gradient = parameter.grad
        if index not in self._unreduced and gradient is not None and self.has_unreduced(index, parameter):
            self._unreduced[index] = (parameter, held(gradient))  # left by a backward that failed
        return super()._take_unreduced(index, parameter, keep)

    def has_unreduced(self, index: int, parameter: Any) -> bool:
        if self._dims[index] is None:
            return super().has_unreduced(index, parameter)
        return isinstance(parameter.grad, DTensor) and not is_piece(parameter.grad)

    def _counts_as_unreduced(self, index: int, parameter: Any) -> bool:
        if self._dims[index] is None:
            return super()._counts_as_unreduced(index, parameter)
        return self.has_unreduced(index, parameter)

    def _as_gradient(self, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        if parameter.grad is not None and self.has_unreduced(parameter.__dict__[GRADIENT_HANDLER].index, parameter):
            raise RotationError(
                f"a parameter of shape {tuple(parameter.shape)}: expected a gradient that is reduced over replicas, or "
                "none, got one that a failed backward without a reduction has left: call zero_grad"
            )
        return super()._as_gradient(parameter, value)
