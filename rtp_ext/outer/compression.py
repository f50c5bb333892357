"""Gradients that travel compressed: payloads in buckets, and what compressors keep, at home and in checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from rtp_ext._native import shard_sizes
from rtp_ext.outer.compressors import Ask, Compressor, Memory, Payload, Way
from rtp_ext.outer.policy import Member, checksum
from rtp_ext.outer.replicas import Replicas
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.dtensor_parameters import expect_own_shard
from rtp_ext.ring.mesh import ring_dim, ring_shape

_ALIGNED = 8  # bytes, of parts in what is gathered
ERROR = "error"  # what a payload has lost, in a memory


@dataclass
class Trip:
    """A bucket of gradients on its ways, each with what it asks for next."""

    count: int
    ways: dict[int, tuple[Way, Ask]] = field(default_factory=dict)  # by place in the bucket
    means: dict[int, torch.Tensor] = field(default_factory=dict)
    sums: list[tuple[Any, torch.Tensor, list[int]]] = field(default_factory=list)  # places
    gathered: list[tuple[Any, torch.Tensor, torch.Tensor, list[int]]] = field(default_factory=list)


class Compression:
    """What AllReduce does with a compressor. Every parameter is compressed by itself, so that what comes of it does not
    depend on what travels with it."""

    def __init__(self, compressor: Compressor) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"AllReduce: expected a compressor of rtp_ext.outer, got {compressor!r:.100}")
        self.compressor = compressor
        self.memory: dict[int, Memory] = {}  # by number of the parameter
        self.summed_bytes = self.gathered_bytes = 0

    def _memory_of(self, index: int, shape: Sequence[int], dtype: torch.dtype, device: Any) -> Memory:
        if index not in self.memory:
            self.memory[index] = self._fresh(shape, dtype, device)
        return self.memory[index]

    def _fresh(self, shape: Sequence[int], dtype: torch.dtype, device: Any) -> Memory:
        fresh = self.compressor.remember(shape, dtype, device)
        if self.compressor.error_feedback:
            fresh[ERROR] = torch.zeros(tuple(shape), dtype=dtype, device=device)
        return fresh

    # -- what travels --------------------------------------------------------------------------------------------------

    def begin(self, replicas: Replicas, flat: torch.Tensor, members: Sequence[tuple[int, Member]]) -> Trip:
        """Starts to take the mean over replicas of gradients that lie in `flat` one after the other."""
        if flat.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"AllReduce: a compressor takes gradients in float32: expected reduce_dtype=None or torch.float32 in "
                f"mp_policy, got {flat.dtype}"
            )
        trip = Trip(len(members))
        with torch.inference_mode(False), torch.no_grad():
            parts = flat.split([member.numel for _, member in members])
            for place, ((index, member), part) in enumerate(zip(members, parts, strict=True)):
                if not member.numel:
                    trip.means[place] = part
                    continue
                way = self._way(index, part.view(member.shape))
                trip.ways[place] = way, next(way)
            self._post(replicas, trip)
        return trip

    def end(self, replicas: Replicas, trip: Trip) -> list[torch.Tensor]:
        """Waits, for all rounds: the means, flat. Raises ValueError for means that are not finite, the same everywhere:
        what compressors keep would never be again."""
        with torch.inference_mode(False), torch.no_grad():
            while trip.ways:
                for place, answer in list(self._answers(replicas, trip)):
                    way, _ = trip.ways.pop(place)
                    try:
                        trip.ways[place] = way, way.send(answer)
                    except StopIteration as done:
                        trip.means[place] = done.value
                self._post(replicas, trip)
            means = [trip.means[place].reshape(-1) for place in range(trip.count)]
            if not torch.stack([mean.abs().max() for mean in means if mean.numel()]).isfinite().all():
                error = ValueError(
                    f"AllReduce: {self.compressor!r} takes gradients that are finite, got others: what overflows once "
                    "would stay in what compressors keep. A GradScaler cannot be combined with it: use bfloat16"
                )
                replicas.end(error)
                raise error
        return means

    def _way(self, index: int, values: torch.Tensor) -> Any:
        memory = self._memory_of(index, values.shape, values.dtype, values.device)
        if not self.compressor.error_feedback:
            mean, _ = yield from self.compressor.way(values, memory)
            return mean
        values = values + memory[ERROR]
        mean, own = yield from self.compressor.way(values, memory)
        memory[ERROR] = values - own
        return mean

    def _post(self, replicas: Replicas, trip: Trip) -> None:
        """Sends what the ways of a trip ask for."""
        asked = sorted(trip.ways.items())
        linear = [(place, ask.payload) for place, (_, ask) in asked if ask.linear]
        if linear:
            flat = torch.cat([part.reshape(-1) for _, payload in linear for part in payload.parts])
            self.summed_bytes += flat.nbytes
            trip.sums.append((replicas.begin_sum(flat), flat, [place for place, _ in linear]))
        others = [(place, ask.payload) for place, (_, ask) in asked if not ask.linear]
        if others:
            mine = torch.cat([_bytes(part) for _, payload in others for part in payload.parts])
            self.gathered_bytes += mine.nbytes
            work, rows = replicas.begin_gather(mine)
            trip.gathered.append((work, rows, mine, [place for place, _ in others]))

    def _answers(self, replicas: Replicas, trip: Trip) -> Iterator[tuple[int, Any]]:
        for work, flat, places in trip.sums:
            replicas.end_sum(work)
            flat.div_(replicas.size)
            payloads = [trip.ways[place][1].payload for place in places]
            parts = iter(flat.split([part.numel() for payload in payloads for part in payload.parts]))
            for place, payload in zip(places, payloads, strict=True):
                means = tuple(next(parts).view(part.shape) for part in payload.parts)
                yield place, dataclasses.replace(payload, parts=means)
        for work, rows, _, places in trip.gathered:
            replicas.end_sum(work)
            payloads = [trip.ways[place][1].payload for place in places]
            answers = [_read(row, payloads) for row in rows]
            for number, place in enumerate(places):
                yield place, [theirs[number] for theirs in answers]
        trip.sums, trip.gathered = [], []

    def digest(self) -> tuple[tuple[int, str, int], ...]:
        """Of what all replicas have to keep alike."""
        return tuple(
            (index, key, checksum(memory[key]))
            for index, memory in sorted(self.memory.items())
            for key in self.compressor.shared
            if memory[key].numel()
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self, named: dict[str, tuple[int, Any]], members: Sequence[Member]) -> dict[str, Any]:
        """What is kept of each parameter, by name: of every rank its own, with a dimension for each of the mesh."""
        kept: dict[str, Any] = {}
        for name, (index, parameter) in named.items():
            member, device = members[index], held(parameter).device
            mine = self._memory_of(index, member.shape, member.wire, device)
            largest = self._fresh(_largest(parameter), member.wire, "meta")
            kept[name] = {key: _own_row(mine[key], parameter, like.numel()) for key, like in largest.items()}
        return {"compressor": repr(self.compressor), "memory": kept}

    def load_state_dict(
        self, state: dict[str, Any], named: dict[str, tuple[int, Any]], members: Sequence[Member]
    ) -> None:
        if state.get("compressor") != repr(self.compressor) or state["memory"].keys() != named.keys():
            raise ValueError(
                f"AllReduce: expected the state of {self.compressor!r} and of the same parameters, got one of "
                f"{state.get('compressor')}"
            )
        template = self.state_dict(named, members)["memory"]
        for name, (index, parameter) in named.items():
            for key, mine in self.memory[index].items():
                given, expected = state["memory"][name][key], template[name][key]
                expect_own_shard(given, parameter, f"load_state_dict of {name}")
                if not isinstance(given, DTensor) or (given.shape, given.placements) != (
                    expected.shape,
                    expected.placements,
                ):
                    raise ValueError(
                        f"load_state_dict of {name}: expected {key} of shape {tuple(expected.shape)}, a row for each "
                        "rank of the mesh it was saved on, got another: what compressors keep does not move to "
                        "another mesh; load the model without it"
                    )
                row = held(given).view(-1)[: mine.numel()].view(mine.shape)
                self.memory[index][key] = row.to(mine.device, copy=True)


def _bytes(part: torch.Tensor) -> torch.Tensor:
    flat = part.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGNED))


def _read(row: torch.Tensor, payloads: Sequence[Payload]) -> list[Payload]:
    """Payloads like `payloads`, of the bytes of a replica."""
    found, start = [], 0
    for payload in payloads:
        parts = []
        for part in payload.parts:
            parts.append(row[start : start + part.nbytes].view(part.dtype).view(part.shape))
            start += part.nbytes + -part.nbytes % _ALIGNED
        found.append(dataclasses.replace(payload, parts=tuple(parts)))
    return found


def _largest(parameter: DTensor) -> list[int]:
    """The shape of the largest shard of a parameter, the first."""
    shape, dim, mesh = list(ring_shape(parameter)), ring_dim(parameter), parameter.device_mesh
    if dim is not None:
        shape[dim] = shard_sizes(shape[dim], mesh.size(mesh.ndim - 1))[0]
    return shape


def _own_row(value: torch.Tensor, parameter: DTensor, length: int) -> DTensor:
    """A tensor of every rank's own, padded to `length`, as one of [*mesh, length]."""
    mesh = parameter.device_mesh
    row = torch.zeros(length, dtype=value.dtype, device=held(parameter).device)
    row[: value.numel()] = value.reshape(-1)
    shape = torch.Size((*mesh.shape, length))
    return DTensor.from_local(
        row.view(*[1] * mesh.ndim, length),
        mesh,
        [Shard(dim) for dim in range(mesh.ndim)],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
