"""Means of shards over replicas, in buckets."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rtp_ext.outer.buckets import InFlightBucket, bucketed
from rtp_ext.outer.local_training.peers import Peers
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.links.agree import expect_same

BUCKET = 16 << 20  # bytes of a bucket at most, unless one shard is larger
IN_FLIGHT = 2  # number of buckets, where results can be stored at once


class Means(OuterPolicy):
    """An outer policy that averages shards over replicas and counts the bytes."""

    replicas_type = Peers

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0  # number of optimizer steps
        self._sent_bytes = 0
        self._trained: set[int] = set()  # numbers of parameters that may differ between replicas

    @property
    def peers(self) -> Peers:
        assert isinstance(self.replicas, Peers), "one replica has none"
        return self.replicas

    def bytes_sent(self) -> int:
        """Bytes of weights that this rank has sent to other replicas since the start. A mean over K replicas counts
        2 (K - 1) / K of its size, as a ring all-reduce sends. Excludes bookkeeping messages."""
        return self._sent_bytes

    def _weights(self) -> list[tuple[int, Any]]:
        """Returns number and parameter for those that may differ between replicas; the same on all replicas."""
        return [(index, p) for index, p in sorted(dict(self._handled()).items()) if index in self._trained]

    def _common(self) -> tuple[int, int]:
        """Returns two hashes that are equal if replicas have the same model with the same parameters frozen, and if
        they mix the same parameters."""
        travels = hashlib.sha256(repr([(i, p.dtype, held(p).shape) for i, p in self._weights()]).encode())
        return int(self.fingerprint()[:15], 16), int(travels.hexdigest()[:15], 16)

    def _agree(self, what: str) -> None:
        """Raises ValueError if replicas are about to run different operations. Collective."""
        if self.replicas is None:
            return
        expect_same(
            "replicas disagree",
            self.exchange((what, self._steps, *self._common())),
            show=lambda each: f"{each[0]} after step {each[1]}",
            named="replica {}".format,
            hint=": every rank has to step its optimizer the same number of times, with the same model and policy, and "
            "to freeze the same parameters at the same step",
        )

    def _begin_means(self, values: Sequence[torch.Tensor], most: int = BUCKET) -> Iterator[InFlightBucket]:
        """Starts the means of values, in float32 at least, and yields each bucket for `_end_mean`."""
        sizes = ((number, sum_dtype(value.dtype), value.numel()) for number, value in enumerate(values))
        for bucket in bucketed(sizes, most):
            dtype = sum_dtype(values[bucket[0]].dtype)
            flat = torch.cat([values[number].reshape(-1).to(dtype) for number in bucket])
            self._sent_bytes += 2 * (self.size - 1) * flat.nbytes // self.size
            yield InFlightBucket(self.peers.begin_sum(flat) if flat.numel() else None, flat, flat, bucket)

    def _end_mean(self, flight: InFlightBucket, values: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Waits for a bucket; yields number and mean of each value."""
        if flight.work is not None:
            self.peers.end_sum(flight.work)
        parts = flight.flat.div_(self.size).split([values[number].numel() for number in flight.indices])
        for number, part in zip(flight.indices, parts, strict=True):
            yield number, part.view(values[number].shape)

    def _average(self, values: Sequence[torch.Tensor]) -> None:
        """Replaces tensors by their mean over replicas, in place."""
        flights: deque[InFlightBucket] = deque()
        for flight in self._begin_means(values):
            flights.append(flight)
            if len(flights) == IN_FLIGHT:
                self._put(flights.popleft(), values)
        for flight in flights:
            self._put(flight, values)

    def _put(self, flight: InFlightBucket, values: Sequence[torch.Tensor]) -> None:
        for number, mean in self._end_mean(flight, values):
            values[number].copy_(mean)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which weights are summed."""
    return torch.promote_types(dtype, torch.float32)


def mark_written(parameters: Sequence[torch.Tensor]) -> None:
    """Marks the local parts of parameters as written, for autograd and for prefetched shards."""
    torch.autograd.graph.increment_version(list(parameters))
