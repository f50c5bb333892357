"""Means over replicas of what their shards hold, in buckets."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rtp_ext.outer.local_training.peers import Peers
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.outer.travel import Flight, bucketed
from rtp_ext.parameters.sharding import held

BUCKET = 16 << 20  # bytes that travel at once at most, unless one shard is larger
IN_FLIGHT = 2  # buckets, where what arrives can be put in its place at once


class Means(OuterPolicy):
    """A policy with means over replicas, and the bytes that they take."""

    replicas_type = Peers

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0  # of the optimizer
        self._sent_bytes = 0
        self._trained: set[int] = set()  # numbers of parameters that steps may have made replicas differ in

    @property
    def peers(self) -> Peers:
        assert isinstance(self.replicas, Peers), "one replica has none"
        return self.replicas

    def bytes_sent(self) -> int:
        """Bytes of weights that this rank has sent to other replicas since the start; of a mean over K replicas
        2 (K - 1) / K of what it is of, as a ring all-reduce sends it. Without the few bytes of bookkeeping."""
        return self._sent_bytes

    def _weights(self) -> list[tuple[int, Any]]:
        """Parameters that replicas may differ in, and their numbers, the same on all replicas."""
        return [(index, p) for index, p in sorted(dict(self._handled()).items()) if index in self._trained]

    def _common(self) -> tuple[int, int]:
        """Numbers that differ, but for chance, where replicas have different models, or others of it frozen, and where
        they mix different parameters."""
        travels = hashlib.sha256(repr([(i, p.dtype, held(p).shape) for i, p in self._weights()]).encode())
        return int(self.fingerprint()[:15], 16), int(travels.hexdigest()[:15], 16)

    def _meet(self, what: str) -> None:
        """Raises ValueError where replicas are about to do something else. Collective."""
        if self.replicas is None:
            return
        answers = self.exchange((what, self._steps, *self._common()))
        for replica, theirs in enumerate(answers):
            if theirs != answers[0]:
                raise ValueError(
                    f"replicas disagree: expected {answers[0][0]} after step {answers[0][1]} (replica 0), got "
                    f"{theirs[0]} after step {theirs[1]} in replica {replica}: every rank has to call its "
                    "optimizer as often, with the same model and policy, and to freeze the same at the same step"
                )

    def _begin_means(self, values: Sequence[torch.Tensor], most: int = BUCKET) -> Iterator[Flight]:
        """Buckets of values as they leave, in float32 at least, for `_end_mean`."""
        sizes = ((number, wide(value.dtype), value.numel()) for number, value in enumerate(values))
        for bucket in bucketed(sizes, most):
            dtype = wide(values[bucket[0]].dtype)
            flat = torch.cat([values[number].reshape(-1).to(dtype) for number in bucket])
            self._sent_bytes += 2 * (self.size - 1) * flat.nbytes // self.size
            yield Flight(self.peers.begin_sum(flat) if flat.numel() else None, flat, flat, bucket)

    def _end_mean(self, flight: Flight, values: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Waits for a bucket: numbers and means of its values."""
        if flight.work is not None:
            self.peers.end_sum(flight.work)
        parts = flight.flat.div_(self.size).split([values[number].numel() for number in flight.indices])
        for number, part in zip(flight.indices, parts, strict=True):
            yield number, part.view(values[number].shape)

    def _average(self, values: Sequence[torch.Tensor]) -> None:
        """Gives tensors the mean over replicas, in place."""
        flights: deque[Flight] = deque()
        for flight in self._begin_means(values):
            flights.append(flight)
            if len(flights) == IN_FLIGHT:
                self._put(flights.popleft(), values)
        for flight in flights:
            self._put(flight, values)

    def _put(self, flight: Flight, values: Sequence[torch.Tensor]) -> None:
        for number, mean in self._end_mean(flight, values):
            values[number].copy_(mean)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What weights are added up in."""
    return torch.promote_types(dtype, torch.float32)


def written(parameters: Sequence[torch.Tensor]) -> None:
    """Tells autograd, and shards that were sent ahead, that the local parts of parameters were written to."""
    torch.autograd.graph.increment_version(list(parameters))
