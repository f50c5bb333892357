"""AllReduce: gradients are averaged over replicas, under the rest of backward.

Where it takes hold. Every gradient of a sharded parameter passes the autograd node between the parameter and its local
shard (`deliver_gradient`), once for each use of the parameter, after its last ring hop. The policy takes it there,
and autograd gets nothing: a gradient that were handed on while it is being reduced would be read at once, by a sum of
two uses of a tied weight or by `p.grad += g`. At the end of the backward, in the engine's final callback, what was
reduced is given to the parameter by a backward of its own, so that p.grad is what stock code makes of it, and is right
when backward() returns. So only what is new is reduced: p.grad is added to, never reduced again.

Where that cannot be, the gradient is reduced in the node itself and handed on: for torch.autograd.grad, for a backward
with create_graph=True, and for parameters with hooks, which must see it.

Without a reduction (`requires_all_reduce` False) gradients are handed on unreduced, and p.grad is where they add up, in
float32 where the parameter has 16 bits: zero_grad clears them as it clears any gradient. They are in the scale of the
result, so that a reduction is the mean over replicas, whatever the divide factor, and what replicas have in common
(a gradient that was reduced before, a penalty on the weights) stays as it is. Optimizers refuse to step on them.
`left_for_later` and `reduce` are the same for a pipeline, whose parts of a backward are calls of torch.autograd.grad.

What travels when. Buckets are filled in the order in which gradients were complete in the backward before, as replica 0
tells at the end of each, and leave in that order only. At the end replicas tell each other how many buckets have left
and what else has arrived, and then send the rest: whatever a replica does or does not use, all send the same.
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

from rtp_ext.outer.compression import Compression
from rtp_ext.outer.compressors import Compressor
from rtp_ext.outer.micro_batches import MicroBatches
from rtp_ext.outer.policy import OuterPolicy, Unit
from rtp_ext.outer.travel import Flight, Order, Pass, Told, bucketed
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import accumulates, read_within, unrounded

BUCKET = 4 << 20  # bytes


class AllReduce(MicroBatches):
    """Averages gradients over replicas: the exact gradient of all batches, as HSDP.

    Each is reduced once in a backward, on process groups apart from the ring's, in reduce_dtype of the model's
    MixedPrecisionPolicy or float32 (float64 for float64). Large shards are reduced where they are, small ones in
    buckets. What is new is held until the backward ends, beside the p.grad that it is added to.

    Args:
        compressor: one of TopK, RandomK, Sign, Quantize, PowerSGD, EF21, Neolithic: what travels in the place of the
            gradients, in as many rounds as it takes; of each parameter on its own. What compressors keep is in
            `state_dict`. Gradients of parameters that every rank holds whole travel as they are.
        bucket_bytes: how much travels at once at most, unless one shard is larger.
    """

    def __init__(self, compressor: Compressor | None = None, *, bucket_bytes: int = BUCKET) -> None:
        super().__init__()
        self._compression = None if compressor is None else Compression(compressor)
        if bucket_bytes < 1:
            raise ValueError(f"AllReduce: expected bucket_bytes >= 1, got {bucket_bytes}")
        self.bucket_bytes = bucket_bytes
        self._pass: Pass | None = None
        self._backwards = 0
        self._plan: list[tuple[int, ...]] = []  # buckets, by numbers of parameters
        self._order: Order = ()  # that the plan was made of
        self._places: dict[int, tuple[int, int]] = {}  # by number: bucket, and how many gradients to wait for
        self._later = False  # whether gradients are handed on as they come, for `reduce`
        self._left_over = False  # whether any were since the last reduction; the same on all ranks
        self._reduced_bytes = 0

    def __deepcopy__(self, memo: dict) -> AllReduce:
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, AllReduce)
        twin.bucket_bytes = self.bucket_bytes
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self._compression is None else self._compression.compressor})"

    def bytes_sent(self) -> int:
        """2 (K - 1) / K of what was reduced, as a ring all-reduce sends it, and K - 1 times the payloads that were
        gathered; without the few bytes of bookkeeping."""
        summed, gathered = self._reduced_bytes, 0
        if self._compression is not None:
            summed, gathered = summed + self._compression.summed_bytes, self._compression.gathered_bytes
        return 2 * (self.size - 1) * summed // self.size + (self.size - 1) * gathered

    def _anew(self) -> OuterPolicy:
        return type(self)() if self._compression is None else AllReduce(copy.deepcopy(self._compression.compressor))

    def verify(self) -> None:
        if self._compression is not None and self._verified != self.fingerprint():
            answers = self.exchange((repr(self._compression.compressor), self._compression.digest()))
            if any(theirs[0] != answers[0][0] for theirs in answers):
                raise ValueError(f"replicas disagree on the compressor: got {', '.join(one[0] for one in answers)}")
            if any(theirs != answers[0] for theirs in answers):
                raise ValueError(
                    f"replicas disagree on what {answers[0][0]} keeps for all of them: expected every rank to load the "
                    "same checkpoint, or none"
                )
        super().verify()

    def state_dict(self) -> dict[str, Any]:
        """What compressors keep of each parameter, of every rank its own; empty without one."""
        if self._compression is None or self.size == 1:
            return {}
        return self._compression.state_dict(self._named(), self._members)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._compression is None or self.size == 1:
            return super().load_state_dict(state)
        self._compression.load_state_dict(state, self._named(), self._members)
        self._verified = ""  # replicas compare it

    # -- in backward ---------------------------------------------------------------------------------------------------

    def reduce_gradient(self, index: int, ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if self.size == 1:
            return None if gradient is None else self.scaled(index, gradient)
        current = None if self._later else self._current()
        if gradient is None:
            return None
        dtype = gradient.dtype
        value = unrounded(gradient).contiguous()  # is written to, and reduced where it is
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

    def _current(self) -> Pass:
        """What this backward has gathered so far; its end is waited for."""
        self.restart()
        if self._pass is None:
            self._backwards += 1
            self._pass = Pass(self.requires_all_reduce and not self._later)
            end = functools.partial(self._end, self._pass)
            self._pass.end = weakref.ref(end)
            Variable._execution_engine.queue_callback(end)
        return self._pass

    def _add(self, current: Pass, index: int, parameter: Any, value: torch.Tensor) -> None:
        if index in current.values:
            current.values[index].add_(value)
        else:
            before = None if index in current.counts else self._take_unreduced(index, parameter)
            current.values[index] = value if before is None else before.add_(value)
        current.parameters[index] = parameter
        current.counts[index] = current.counts.pop(index, 0) + 1  # and is the last one now
        while current.launched < len(self._plan) and all(
            current.counts.get(i, 0) >= self._places[i][1] for i in self._plan[current.launched]
        ):
            self._launch_next(current)

    def restart(self) -> None:
        if self._pass is not None and not self._pass.running:
            self._pass = None  # of a backward that failed

    # -- what is not reduced yet ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def left_for_later(self) -> Iterator[None]:
        if self.size == 1:
            yield
            return
        self.restart()
        before, self._later, self._left_over = self._later, True, True
        try:
            yield
        finally:
            self._later = before
            self._note_unreduced()

    def reduce(self) -> None:
        if not self._left_over or not self.requires_all_reduce:
            return
        self.restart()
        self._backwards += 1
        current = self._pass = Pass(reduces=True)
        try:
            self._reduce_rest(current)
        finally:
            self._pass = None

    # -- what travels --------------------------------------------------------------------------------------------------

    def _buckets(self, indices: Iterable[int]) -> list[tuple[int, ...]]:
        """Parameters whose gradients travel together."""
        members = ((index, self._members[index]) for index in indices)
        return bucketed(((index, member.wire, member.numel) for index, member in members), self.bucket_bytes)

    def _launch_next(self, current: Pass) -> None:
        """Sends the next bucket of the plan, with zeros for what has not arrived."""
        current.launched += 1
        self._launch(current, self._plan[current.launched - 1])

    def _launch(self, current: Pass, bucket: tuple[int, ...]) -> None:
        flat = self._pack(bucket, [current.values.pop(index, None) for index in bucket])
        if flat.numel():
            current.flights.append(self._begin(flat, bucket))

    def _pack(self, bucket: tuple[int, ...], values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """What travels of gradients: one after the other, with zeros for those that are not there."""
        assert self.replicas is not None, "one replica sends nothing"
        wire = self._members[bucket[0]].wire
        sizes = [self._members[index].numel for index in bucket]
        if len(bucket) == 1 and values[0] is not None:
            flat = values[0].to(wire).contiguous().view(-1)
        else:
            flat = torch.zeros(sum(sizes), dtype=wire, device=self.replicas.device)
            for part, value in zip(flat.split(sizes), values, strict=True):
                if value is not None:
                    part.copy_(value.reshape(-1))
        return flat

    def _begin(self, flat: torch.Tensor, bucket: tuple[int, ...]) -> Flight:
        assert self.replicas is not None, "one replica sends nothing"
        if self._compression is not None:
            members = [(index, self._members[index]) for index in bucket]
            return Flight(self._compression.begin(self.replicas, flat, members), flat, flat, bucket)
        self._reduced_bytes += flat.nbytes
        return Flight(self.replicas.begin_sum(flat), flat, flat, bucket)

    def _land(self, flight: Flight) -> Sequence[torch.Tensor]:
        """Waits for a bucket: the mean of each gradient, flat."""
        assert self.replicas is not None, "one replica sends nothing"
        if self._compression is not None:
            return self._compression.end(self.replicas, flight.work)
        self.replicas.end_sum(flight.work)
        return flight.flat.div_(self.size).split([self._members[index].numel for index in flight.indices])

    def _reduce_now(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """The mean over replicas of one gradient, waited for. Collective."""
        assert self.replicas is not None, "one replica reduces nothing"
        self._meet(self._current(), f"the gradient of {self._members[index].name}")
        if self._compression is None or not value.numel():
            return self._mean(value, self._members[index].wire)
        (mean,) = self._land(self._begin(self._pack((index,), [value]), (index,)))
        return mean.view(value.shape).to(value.dtype)

    def _mean(self, value: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
        assert self.replicas is not None, "one replica reduces nothing"
        flat = value.to(wire, copy=True, memory_format=torch.contiguous_format)
        if flat.numel():
            self._reduced_bytes += flat.nbytes
            self.replicas.end_sum(self.replicas.begin_sum(flat))
        return flat.div_(self.size).to(value.dtype)

    def reduce_whole(self, gradient: torch.Tensor, name: str, unit: Unit) -> torch.Tensor:
        gradient = gradient.mul_(self.scale(unit))
        if self.size == 1:
            return gradient
        self._meet(self._current(), f"the gradient of {name}")
        return self._mean(gradient, torch.promote_types(gradient.dtype, torch.float32))

    def _meet(self, current: Pass, what: str) -> list[Told]:
        """Replicas compare what they are about to do, and send what others have sent. Collective."""
        assert self.replicas is not None, "one replica meets nobody"
        self.verify()
        order = tuple(current.counts.items())
        mine = Told(
            what,
            self._backwards,
            current.reduces,
            self.fingerprint(),
            current.launched,
            tuple(current.values),
            order,
        )
        answers = self.exchange(mine)
        for replica, theirs in enumerate(answers):
            if theirs.comparable() != answers[0].comparable():
                model = "" if theirs.model == answers[0].model else ", of a model with other parameters or settings"
                raise ValueError(
                    f"replicas disagree: expected {answers[0]} (replica 0), got {theirs} in replica {replica}{model}: "
                    "every rank has to call backward as often, with the same settings"
                )
        while current.launched < max(theirs.launched for theirs in answers):
            self._launch_next(current)
        return answers

    # -- the end of a backward -----------------------------------------------------------------------------------------

    def _end(self, current: Pass) -> None:
        """The engine's final callback."""
        if self._pass is not current:
            return  # it has ended within this backward, or failed
        try:
            if current.reduces:
                self._reduce_rest(current)
            else:
                self._note_unreduced()
        finally:
            self._pass = None

    def _reduce_rest(self, current: Pass) -> None:
        for index, (parameter, _) in list(self._unreduced.items()):  # that this backward did not reach
            value = self._take_unreduced(index, parameter)
            if value is not None:
                current.values[index], current.parameters[index] = value, parameter
                current.counts.setdefault(index, 0)
        answers = self._meet(current, "the end")
        rest = {
            index for theirs in answers for index in theirs.pending if not self._left(index, theirs.launched, answers)
        }
        for bucket in self._buckets(sorted(rest)):
            self._launch(current, bucket)
        self._deliver(current, {index for theirs in answers for index, _ in theirs.order})
        self._learn(answers[0].order)
        self._left_over = False

    def _left(self, index: int, launched: int, answers: Sequence[Told]) -> bool:
        """Whether what a replica had not sent has left with a bucket that others had sent."""
        place = self._places.get(index)
        return place is not None and launched <= place[0] < max(theirs.launched for theirs in answers)

    def _deliver(self, current: Pass, used: set[int]) -> None:
        """Waits for all that travels, and adds it to p.grad of the parameters that any replica has used."""
        totals: dict[int, torch.Tensor] = {}
        for flight in current.flights:
            for index, part in zip(flight.indices, self._land(flight), strict=True):
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
            else:  # Its hooks have seen every part of it. No part of a bucket: a DTensor of one cannot be deep-copied.
                parameter.grad = self._as_gradient(parameter, value.clone() if value._is_view() else value)
        if added:
            torch.autograd.backward(*zip(*added, strict=True))

    def _learn(self, order: Order) -> None:
        """The next backward is expected to be like this one of replica 0."""
        if order == self._order:
            return
        self._order = order
        counts = {index: count for index, count in order if count}
        self._plan = self._buckets(counts)
        self._places = {i: (number, counts[i]) for number, bucket in enumerate(self._plan) for i in bucket}
