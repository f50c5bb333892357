"""AllReduce averages gradients over replicas while the rest of backward runs.

Interception. Every gradient of a sharded parameter passes the autograd node between the parameter and its local shard
(`deliver_gradient`), once for each use of the parameter, after its last ring hop. The policy takes the gradient there
and returns None to autograd: a gradient that autograd received during its reduction would be read too early, by the sum
of two uses of a tied weight or by `p.grad += g`. At the end of the backward, the engine's final callback delivers the
reduced gradients to the parameters in a separate backward, so that p.grad is correct when backward() returns. Only new
gradients are reduced; they are added to p.grad, which is never reduced again.

Where interception is impossible, the node reduces the gradient itself and passes the result on: for
torch.autograd.grad, for a backward with create_graph=True, and for parameters with hooks, which must see the gradient.

Without a reduction (`requires_all_reduce` False) the node passes gradients on unreduced, and they accumulate in p.grad,
in float32 where the parameter has 16 bits; zero_grad clears them as usual. They are stored in the scale of the result:
the reduction is then the mean over replicas for any divide factor, and terms that all replicas share (a gradient that
was reduced before, a penalty on the weights) keep their value. Optimizers refuse to step on unreduced gradients.
`left_for_later` and `reduce` do the same for a pipeline, which calls torch.autograd.grad for each part of a backward.

Order. Buckets are filled in the order in which gradients were complete in the previous backward of replica 0, which
sends that order at the end of each backward, and they are sent in that order only. At the end, the replicas exchange
how many buckets they have sent and which other gradients they have, and then send the rest. All replicas therefore
send the same buckets, independent of the parameters that each replica used.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from rtp_ext.outer.buckets import AgreementMessage, BackwardState, InFlightBucket, Order, bucketed
from rtp_ext.outer.compression import Compression
from rtp_ext.outer.compressors import Compressor
from rtp_ext.outer.micro_batches import MicroBatches
from rtp_ext.outer.policy import OuterPolicy, Unit
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import accumulates, read_within, unrounded
from rtp_ext.ring.links.agree import expect_same

BUCKET = 4 << 20  # bytes


class AllReduce(MicroBatches):
    """Averages gradients over replicas: the exact gradient of all batches, as HSDP computes it.

    Reduces each gradient once per backward, on process groups separate from the ring's, in reduce_dtype of the model's
    MixedPrecisionPolicy or float32 (float64 for float64). Reduces large shards in place and small ones in buckets.
    Holds new gradients until the backward ends, in addition to p.grad.

    Args:
        compressor: one of TopK, RandomK, Sign, Quantize, PowerSGD, EF21, Neolithic. Its payloads travel instead of the
            gradients, in one or more rounds; each parameter is compressed separately. `state_dict` contains the
            compressor's state. Gradients of parameters that every rank holds whole are not compressed.
        bucket_bytes: upper bound of a bucket in bytes, unless one shard is larger.
    """

    def __init__(self, compressor: Compressor | None = None, *, bucket_bytes: int = BUCKET) -> None:
        super().__init__()
        self._compression = None if compressor is None else Compression(compressor)
        if bucket_bytes < 1:
            raise ValueError(f"AllReduce: expected bucket_bytes >= 1, got {bucket_bytes}")
        self.bucket_bytes = bucket_bytes
        self._pass: BackwardState | None = None
        self._backwards = 0
        self._plan: list[tuple[int, ...]] = []  # buckets of parameter numbers
        self._order: Order = ()  # from which the plan was made
        self._places: dict[int, tuple[int, int]] = {}  # by parameter number: bucket, and expected number of gradients
        self._defers = False  # whether gradients are passed on unreduced, for `reduce`
        self._has_deferred = False  # whether there are any since the last reduction; the same on all ranks
        self._reduced_bytes = 0

    def __deepcopy__(self, memo: dict) -> AllReduce:
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, AllReduce)
        twin.bucket_bytes = self.bucket_bytes
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self._compression is None else self._compression.compressor})"

    def bytes_sent(self) -> int:
        """Bytes of gradients that this rank sent: 2 (K - 1) / K of the reduced bytes, as a ring all-reduce sends, plus
        K - 1 times the gathered payloads. Excludes bookkeeping messages."""
        summed, gathered = self._reduced_bytes, 0
        if self._compression is not None:
            summed, gathered = summed + self._compression.summed_bytes, self._compression.gathered_bytes
        return 2 * (self.size - 1) * summed // self.size + (self.size - 1) * gathered

    def _with_same_settings(self) -> OuterPolicy:
        return type(self)() if self._compression is None else AllReduce(copy.deepcopy(self._compression.compressor))

    def _problem(self) -> str | None:
        if self._compression is not None:
            answers = self.exchange((repr(self._compression.compressor), self._compression.digest()))
            compressors, digests = zip(*answers, strict=True)
            hint = ": every rank has to load the same checkpoint, or none"
            try:
                expect_same("replicas disagree on the compressor", compressors, named="replica {}".format)
                expect_same(
                    f"replicas disagree on the shared state of {compressors[0]}, its digest",
                    digests,
                    named="replica {}".format,
                    hint=hint,
                )
            except ValueError as error:
                return str(error)
        return super()._problem()

    def state_dict(self) -> dict[str, Any]:
        """Returns the compressor's state of each parameter, different on every rank; {} without a compressor."""
        if self._compression is None or self.size == 1:
            return {}
        return self._compression.state_dict(self._named(), self._members)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._compression is None or self.size == 1:
            return super().load_state_dict(state)
        self._compression.load_state_dict(state, self._named(), self._members)
        self._verified = ""  # so that replicas compare the loaded state

    # -- in backward ---------------------------------------------------------------------------------------------------

    def reduce_gradient(self, index: int, ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if self.size == 1:
            return None if gradient is None else self.scaled(index, gradient)
        current = None if self._defers else self._current()
        if gradient is None:
            return None
        dtype = gradient.dtype
        value = unrounded(gradient).contiguous()  # overwritten, and reduced in place
        scale = self.scale(self._members[index].unit)
        if scale != 1.0:
            value.mul_(scale)
        node = ctx.next_functions[0][0]
        parameter = getattr(node, "variable", None)
        if current is None:
            return value if parameter is None else self._hand_on(index, parameter, value)
        if parameter is None or not accumulates(node):
            return self._reduce_now(index, value).to(dtype)
        if not current.reduces:
            current.parameters[index] = parameter
            return self._hand_on(index, parameter, value)
        if read_within(ctx, parameter):
            before = self._take_unreduced(index, parameter)
            if before is not None:
                (reduced,) = self._at_owner([parameter], [self._reduce_now(index, before)])
                parameter.grad = self._as_gradient(parameter, reduced)
            return self._reduce_now(index, value).to(dtype)
        self._add(current, index, parameter, value)
        return None

    def _current(self) -> BackwardState:
        """Returns the state of the running backward; queues its final callback when it is new."""
        self.restart()
        if self._pass is None:
            self._backwards += 1
            self._pass = BackwardState(self.requires_all_reduce and not self._defers)
            end = functools.partial(self._end, self._pass)
            self._pass.end = weakref.ref(end)
            Variable._execution_engine.queue_callback(end)
        return self._pass

    def _add(self, current: BackwardState, index: int, parameter: Any, value: torch.Tensor) -> None:
        if index in current.values:
            current.values[index].add_(value)
        else:
            before = None if index in current.counts else self._take_unreduced(index, parameter)
            current.values[index] = value if before is None else before.add_(value)
        current.parameters[index] = parameter
        current.counts[index] = current.counts.pop(index, 0) + 1  # moves it to the end of the order
        while current.launched < len(self._plan) and all(
            current.counts.get(i, 0) >= self._places[i][1] for i in self._plan[current.launched]
        ):
            self._launch_next(current)

    def restart(self) -> None:
        if self._pass is not None and not self._pass.running:
            self._pass = None  # left by a backward that failed

    # -- unreduced gradients -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def left_for_later(self) -> Iterator[None]:
        if self.size == 1:
            yield
            return
        self.restart()
        before, self._defers, self._has_deferred = self._defers, True, True
        try:
            yield
        finally:
            self._defers = before
            self._note_unreduced()

    def reduce(self) -> None:
        if not self._has_deferred or not self.requires_all_reduce:
            return
        self.restart()
        self._backwards += 1
        current = self._pass = BackwardState(reduces=True)
        try:
            self._reduce_rest(current)
        finally:
            self._pass = None

    # -- communication -------------------------------------------------------------------------------------------------

    def _buckets(self, indices: Iterable[int]) -> list[tuple[int, ...]]:
        """Groups parameters by the bucket that their gradients share."""
        members = ((index, self._members[index]) for index in indices)
        return bucketed(((index, member.wire_dtype, member.numel) for index, member in members), self.bucket_bytes)

    def _launch_next(self, current: BackwardState) -> None:
        """Sends the next bucket of the plan, with zeros for missing gradients."""
        current.launched += 1
        self._launch(current, self._plan[current.launched - 1])

    def _launch(self, current: BackwardState, bucket: tuple[int, ...]) -> None:
        flat = self._pack(bucket, [current.values.pop(index, None) for index in bucket])
        if flat.numel():
            current.flights.append(self._begin(flat, bucket))

    def _pack(self, bucket: tuple[int, ...], values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Concatenates flat gradients, with zeros for missing ones."""
        assert self.replicas is not None, "one replica sends nothing"
        wire_dtype = self._members[bucket[0]].wire_dtype
        sizes = [self._members[index].numel for index in bucket]
        if len(bucket) == 1 and values[0] is not None:
            flat = values[0].to(wire_dtype).contiguous().view(-1)
        else:
            flat = torch.zeros(sum(sizes), dtype=wire_dtype, device=self.replicas.device)
            for part, value in zip(flat.split(sizes), values, strict=True):
                if value is not None:
                    part.copy_(value.reshape(-1))
        return flat

    def _begin(self, flat: torch.Tensor, bucket: tuple[int, ...]) -> InFlightBucket:
        assert self.replicas is not None, "one replica sends nothing"
        if self._compression is not None:
            members = [(index, self._members[index]) for index in bucket]
            return InFlightBucket(self._compression.begin(self.replicas, flat, members), flat, flat, bucket)
        self._reduced_bytes += flat.nbytes
        return InFlightBucket(self.replicas.begin_sum(flat), flat, flat, bucket)

    def _wait_for_bucket(self, flight: InFlightBucket) -> Sequence[torch.Tensor]:
        """Waits for a bucket and returns the mean of each gradient, flat."""
        assert self.replicas is not None, "one replica sends nothing"
        if self._compression is not None:
            return self._compression.end(self.replicas, flight.work)
        self.replicas.end_sum(flight.work)
        return flight.flat.div_(self.size).split([self._members[index].numel for index in flight.indices])

    def _reduce_now(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Reduces one gradient and returns its mean over replicas. Collective."""
        assert self.replicas is not None, "one replica reduces nothing"
        self._agree(self._current(), f"the gradient of {self._members[index].name}")
        if self._compression is None or not value.numel():
            return self._mean(value, self._members[index].wire_dtype)
        (mean,) = self._wait_for_bucket(self._begin(self._pack((index,), [value]), (index,)))
        return mean.view(value.shape).to(value.dtype)

    def _mean(self, value: torch.Tensor, wire_dtype: torch.dtype) -> torch.Tensor:
        assert self.replicas is not None, "one replica reduces nothing"
        flat = value.to(wire_dtype, copy=True, memory_format=torch.contiguous_format)
        if flat.numel():
            self._reduced_bytes += flat.nbytes
            self.replicas.end_sum(self.replicas.begin_sum(flat))
        return flat.div_(self.size).to(value.dtype)

    def reduce_whole(self, gradient: torch.Tensor, name: str, unit: Unit) -> torch.Tensor:
        gradient = gradient.mul_(self.scale(unit))
        if self.size == 1:
            return gradient
        self._agree(self._current(), f"the gradient of {name}")
        return self._mean(gradient, torch.promote_types(gradient.dtype, torch.float32))

    def _agree(self, current: BackwardState, what: str) -> list[AgreementMessage]:
        """Compares with the other replicas, then sends the buckets that any of them has sent. Collective."""
        assert self.replicas is not None, "one replica compares nothing"
        self.verify()
        order = tuple(current.counts.items())
        mine = AgreementMessage(
            what,
            self._backwards,
            current.reduces,
            self.fingerprint(),
            current.launched,
            tuple(current.values),
            order,
        )
        answers = self.exchange(mine)
        models = {theirs.model for theirs in answers}
        hint = ", of a model with other parameters or settings" if len(models) > 1 else ""
        hint += ": every rank has to call backward the same number of times, with the same settings"
        with self._ended_by_differences():
            expect_same(
                "replicas disagree", answers, key=lambda each: each.comparable(), named="replica {}".format, hint=hint
            )
        while current.launched < max(theirs.launched for theirs in answers):
            self._launch_next(current)
        return answers

    # -- the end of a backward -----------------------------------------------------------------------------------------

    def _end(self, current: BackwardState) -> None:
        """Final callback of the autograd engine."""
        if self._pass is not current:
            return  # it has ended already, or failed
        try:
            if current.reduces:
                self._reduce_rest(current)
            else:
                self._note_unreduced()
        finally:
            self._pass = None

    def _reduce_rest(self, current: BackwardState) -> None:
        for index, (parameter, _) in list(self._unreduced.items()):  # not reached by this backward
            value = self._take_unreduced(index, parameter)
            if value is not None:
                current.values[index], current.parameters[index] = value, parameter
                current.counts.setdefault(index, 0)
        answers = self._agree(current, "the end")
        rest: set[int] = set()
        for theirs in answers:
            rest |= {index for index in theirs.pending if not self._was_sent(index, theirs.launched, answers)}
        for bucket in self._buckets(sorted(rest)):
            self._launch(current, bucket)
        self._deliver(current, {index for theirs in answers for index, _ in theirs.order})
        self._make_plan(answers[0].order)
        self._has_deferred = False

    def _was_sent(self, index: int, launched: int, answers: Sequence[AgreementMessage]) -> bool:
        """Returns whether a gradient of this replica was sent as zeros in a bucket that other replicas had sent."""
        place = self._places.get(index)
        return place is not None and launched <= place[0] < max(theirs.launched for theirs in answers)

    def _deliver(self, current: BackwardState, used: set[int]) -> None:
        """Waits for all buckets and adds the results to p.grad of every parameter that any replica used."""
        totals: dict[int, torch.Tensor] = {}
        for flight in current.flights:
            for index, part in zip(flight.indices, self._wait_for_bucket(flight), strict=True):
                totals[index] = totals[index] + part if index in totals else part
        parameters, values = [], []
        for index in sorted(used):
            parameter = current.parameters.get(index)
            parameter = self.parameter(index) if parameter is None else parameter
            if parameter is None or not parameter.requires_grad:
                continue
            value, part = totals.get(index), held(parameter)
            if value is None:
                assert self.replicas is not None, "one replica delivers nothing"
                value = part.new_zeros(part.shape, device=self.replicas.device)
            parameters.append(parameter)
            values.append(value.view(part.shape))
        values = self._at_owner(parameters, values)
        added = []
        for parameter, value in zip(parameters, values, strict=True):
            if parameter.grad is not None:
                added.append((parameter, self._as_gradient(parameter, value)))
            else:  # its hooks ran already; cloned, because a DTensor of a view of a bucket cannot be deep-copied
                parameter.grad = self._as_gradient(parameter, value.clone() if value._is_view() else value)
        if added:
            torch.autograd.backward(*zip(*added, strict=True))

    def _make_plan(self, order: Order) -> None:
        """Makes the bucket plan of the next backward from the order of replica 0."""
        if order == self._order:
            return
        self._order = order
        counts = {index: count for index, count in order if count}
        self._plan = self._buckets(counts)
        self._places = {i: (number, counts[i]) for number, bucket in enumerate(self._plan) for i in bucket}
