"""Compressed gradients: payloads in buckets, and the state of compressors in memory and in checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from rtp_ext._native import shard_sizes
from rtp_ext.outer.compressors import Compressor, Memory, Payload, Round, Way
from rtp_ext.outer.policy import Member, checksum
from rtp_ext.outer.replicas import Replicas
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.mesh import ring_dim, ring_shape
from rtp_ext.ring.parameters_in_use import expect_own_shard

_ALIGNED = 8  # alignment in bytes of the parts of a gathered row
ERROR = "error"  # key of a memory: the error of the last payload


@dataclass
class CompressedBucket:
    """A bucket of gradients in flight, with the pending round of each."""

    count: int
    ways: dict[int, tuple[Way, Round]] = field(default_factory=dict)  # by position in the bucket
    means: dict[int, torch.Tensor] = field(default_factory=dict)
    sums: list[tuple[Any, torch.Tensor, list[int]]] = field(default_factory=list)  # positions
    gathered: list[tuple[Any, torch.Tensor, torch.Tensor, list[int]]] = field(default_factory=list)


class Compression:
    """Applies a compressor for AllReduce. Every parameter is compressed separately, so that the result does not depend
    on the other gradients of its bucket."""

    def __init__(self, compressor: Compressor) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"AllReduce: expected a compressor of rtp_ext.outer, got {compressor!r:.100}")
        self.compressor = compressor
        self.memory: dict[int, Memory] = {}  # by parameter number
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

    # -- communication -------------------------------------------------------------------------------------------------

    def begin(self, replicas: Replicas, flat: torch.Tensor, members: Sequence[tuple[int, Member]]) -> CompressedBucket:
        """Starts the mean over replicas of gradients that lie in `flat` one after the other."""
        if flat.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"AllReduce: a compressor takes gradients in float32: expected reduce_dtype=None or torch.float32 in "
                f"mp_policy, got {flat.dtype}"
            )
        pending = CompressedBucket(len(members))
        with torch.inference_mode(False), torch.no_grad():
            parts = flat.split([member.numel for _, member in members])
            for place, ((index, member), part) in enumerate(zip(members, parts, strict=True)):
                if not member.numel:
                    pending.means[place] = part
                    continue
                way = self._way(index, part.view(member.shape))
                pending.ways[place] = way, next(way)
            self._post(replicas, pending)
        return pending

    def end(self, replicas: Replicas, pending: CompressedBucket) -> list[torch.Tensor]:
        """Runs the remaining rounds and returns the means, flat.

        Raises ValueError, on every replica, for means that are not finite: they would stay in the compressor's state.
        """
        with torch.inference_mode(False), torch.no_grad():
            while pending.ways:
                for place, answer in list(self._answers(replicas, pending)):
                    way, _ = pending.ways.pop(place)
                    try:
                        pending.ways[place] = way, way.send(answer)
                    except StopIteration as done:
                        pending.means[place] = done.value
                self._post(replicas, pending)
            means = [pending.means[place].reshape(-1) for place in range(pending.count)]
            if not torch.stack([mean.abs().max() for mean in means if mean.numel()]).isfinite().all():
                error = ValueError(
                    f"AllReduce: {self.compressor!r} takes gradients that are finite, got others: a value that "
                    "overflows would stay in the compressor's state. A GradScaler cannot be combined with it: "
                    "use bfloat16"
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

    def _post(self, replicas: Replicas, pending: CompressedBucket) -> None:
        """Sends the pending rounds of a bucket."""
        asked = sorted(pending.ways.items())
        linear = [(place, ask.payload) for place, (_, ask) in asked if ask.linear]
        if linear:
            flat = torch.cat([part.reshape(-1) for _, payload in linear for part in payload.parts])
            self.summed_bytes += flat.nbytes
            pending.sums.append((replicas.begin_sum(flat), flat, [place for place, _ in linear]))
        others = [(place, ask.payload) for place, (_, ask) in asked if not ask.linear]
        if others:
            mine = torch.cat([_bytes(part) for _, payload in others for part in payload.parts])
            self.gathered_bytes += mine.nbytes
            work, rows = replicas.begin_gather(mine)
            pending.gathered.append((work, rows, mine, [place for place, _ in others]))

    def _answers(self, replicas: Replicas, pending: CompressedBucket) -> Iterator[tuple[int, Any]]:
        for work, flat, places in pending.sums:
            replicas.end_sum(work)
            flat.div_(replicas.size)
            payloads = [pending.ways[place][1].payload for place in places]
            parts = iter(flat.split([part.numel() for payload in payloads for part in payload.parts]))
            for place, payload in zip(places, payloads, strict=True):
                means = tuple(next(parts).view(part.shape) for part in payload.parts)
                yield place, dataclasses.replace(payload, parts=means)
        for work, rows, _, places in pending.gathered:
            replicas.end_sum(work)
            payloads = [pending.ways[place][1].payload for place in places]
            answers = [_read(row, payloads) for row in rows]
            for number, place in enumerate(places):
                yield place, [theirs[number] for theirs in answers]
        pending.sums, pending.gathered = [], []

    def digest(self) -> tuple[tuple[int, str, int], ...]:
        """Returns hashes of the state that must be equal on all replicas."""
        return tuple(
            (index, key, checksum(memory[key]))
            for index, memory in sorted(self.memory.items())
            for key in self.compressor.shared
            if memory[key].numel()
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self, named: dict[str, tuple[int, Any]], members: Sequence[Member]) -> dict[str, Any]:
        """Returns the state of each parameter by name: a DTensor with a leading dimension per mesh dimension."""
        kept: dict[str, Any] = {}
        for name, (index, parameter) in named.items():
            member, device = members[index], held(parameter).device
            mine = self._memory_of(index, member.shape, member.wire_dtype, device)
            largest = self._fresh(_largest(parameter), member.wire_dtype, "meta")
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
                        "rank of the mesh it was saved on, got another: a compressor's state does not move to "
                        "another mesh; load the model without it"
                    )
                row = held(given).view(-1)[: mine.numel()].view(mine.shape)
                self.memory[index][key] = row.to(mine.device, copy=True)


def _bytes(part: torch.Tensor) -> torch.Tensor:
    flat = part.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGNED))


def _read(row: torch.Tensor, payloads: Sequence[Payload]) -> list[Payload]:
    """Reads payloads with the layout of `payloads` from the bytes of a replica."""
    found, start = [], 0
    for payload in payloads:
        parts = []
        for part in payload.parts:
            parts.append(row[start : start + part.nbytes].view(part.dtype).view(part.shape))
            start += part.nbytes + -part.nbytes % _ALIGNED
        found.append(dataclasses.replace(payload, parts=tuple(parts)))
    return found


def _largest(parameter: DTensor) -> list[int]:
    """Returns the shape of the first, largest shard of a parameter."""
    shape, dim, mesh = list(ring_shape(parameter)), ring_dim(parameter), parameter.device_mesh
    if dim is not None:
        shape[dim] = shard_sizes(shape[dim], mesh.size(mesh.ndim - 1))[0]
    return shape


def _own_row(value: torch.Tensor, parameter: DTensor, length: int) -> DTensor:
    """Returns a DTensor [*mesh, length] whose local row is this rank's `value`, padded to `length`."""
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
