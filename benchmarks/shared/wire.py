"""The bytes that strategies send between made hosts, as counted and in closed form, and the bound of the step time.

`roof_ms` estimates the shortest step that computes like one without communication and sends as many bytes. It is the
maximum of two times: computing plus what products lose beside a bare socket program that moves the bytes,
and the time on the wire. The optimizer adds to either, since it needs all gradients, and the next forward needs all
parameters.
"""

import os
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rtp_ext.host import cores
from rtp_ext.planner import ModelSpec, rotations_of
from rtp_ext.planner.native import travel_bytes
from shared.hosts import address, bits_per_second, bytes_sent, card
from shared.launch import Place, gather

# -- a bare socket program ---------------------------------------------------------------------------------------------

MOST = 512 * 2**20  # bytes that are moved at a time, beside products
SECONDS = 0.7  # of the wire, for those bytes
COMPUTING = 1.0  # seconds of products, so that they outlast the wire
PIECE = 4 * 2**20
SIZE = 1024  # of the square factors of a product


@dataclass(frozen=True)
class Sockets:
    """Seconds per byte that a rank sends to the next one while as many arrive.

    processor: of the program's threads, beside nothing. beside: by which products of this rank take longer.
    """

    processor: float
    beside: float


class _Mover:
    """Connections to both neighbours, and threads that move `pieces` pieces through each."""

    def __init__(self, place: Place, pieces: int) -> None:
        with socket.create_server(("", 0)) as listener:
            every: list[Any] = [None] * place.ranks
            dist.all_gather_object(every, (address(int(os.environ["HOST"])), listener.getsockname()[1]))
            self._there = socket.create_connection(every[(place.rank + 1) % place.ranks])
            self._here, _ = listener.accept()
        self._out, self._into = memoryview(bytearray(PIECE)), memoryview(bytearray(PIECE))
        self._pieces = pieces

    def start(self) -> Sequence[threading.Thread]:
        threads = [threading.Thread(target=action, daemon=True) for action in (self._send, self._receive)]
        for thread in threads:
            thread.start()
        return threads

    def _send(self) -> None:
        for _ in range(self._pieces):
            self._there.sendall(self._out)

    def _receive(self) -> None:
        left = self._pieces * PIECE
        while left:
            received = self._here.recv_into(self._into, min(left, PIECE), socket.MSG_WAITALL)
            if received == 0:
                raise ConnectionError("the rank before this one has closed its connection")
            left -= received

    def close(self) -> None:
        self._there.close()
        self._here.close()


class _Products:
    def __init__(self, place: Place) -> None:
        self._left, self._right = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE)
        self._product = torch.empty(SIZE, SIZE)
        self._count = 8
        self.take()
        per_product = self.take() / self._count
        self._count = int(gather(COMPUTING / per_product, place).max()) + 1

    def take(self) -> float:
        """Returns the seconds that all products take."""
        start = time.perf_counter()
        for _ in range(self._count):
            torch.mm(self._left, self._right, out=self._product)
        return time.perf_counter() - start


def measure_sockets(place: Place, rate: str | None, times: int) -> Sockets:
    """Measures `times` times, after one run that does not count. Returns the mean over the ranks of the least of each,
    since other load only adds. Collective.

    rate: of the link of a host, None: no limit.
    """
    speed = bits_per_second(rate)
    pieces = max(1, int(MOST if speed is None else min(MOST, speed * SECONDS / 8)) // PIECE)
    mover, products = _Mover(place, pieces), _Products(place)
    own, alone, beside = [], [], []
    for _ in range(1 + times):
        dist.barrier()
        start = time.process_time()
        for thread in mover.start():
            thread.join()
        own.append(time.process_time() - start)
        dist.barrier()
        alone.append(products.take())
        dist.barrier()
        threads = mover.start()
        beside.append(products.take())
        for thread in threads:
            thread.join()
    mover.close()
    processor, before, after = (min(values[1:]) for values in (own, alone, beside))
    taken, lost = (gather([processor, after - before], place).mean(0) / (pieces * PIECE)).tolist()
    return Sockets(taken, max(taken, lost))


_RINGS = ("rtp", "rtp-lean", "rtp-unkept", "rtp-exact", "rtp-c10d", "rtp-unbundled", "rtp-gram", "rtp-whole")
_RINGS += ("rtp-bf16", "rtp-int8", "rtp-rowwise")


class Counter:
    """Bytes that leave this host from one step to the next, as the kernel counts them; nothing on hosts not made here.

    With a barrier at either end, so that what other steps send is not among them.
    """

    def __init__(self) -> None:
        self._made, self._before = bool(card()), 0

    def start(self) -> None:
        if self._made:
            self._before = bytes_sent()

    def stop(self) -> list[int]:
        """Converts one number; None for none."""
        if not self._made:
            return []
        dist.barrier()
        return [bytes_sent() - self._before]


def _narrow(layers: list[nn.Linear], ranks: int, ways: Mapping[str, str | None]) -> float:
    """Bytes of these weights in forward and backward together, in the format in which they travel."""
    values = sum(layer.weight.numel() for layer in layers)
    if ways.get("recipe") == "float8_rowwise":  # a code a value; a float32 scale a row there, a column of a shard back
        return 2 * values + 4 * sum(layer.out_features + ranks * layer.in_features for layer in layers)
    return 2 * travel_bytes(ways.get("travel"), 4) * values


def closed_form(
    strategy: str, model: nn.Module, ranks: int, per_host: int = 1, ways: Mapping[str, str | None] | None = None
) -> float | None:
    """Bytes that one rank sends in forward and backward in float32; None for strategies without a formula here.

    ways: `travel` and `recipe` of the linear layers of blocks, None as computed with.

    Between hosts it is also what leaves a host, however many of the ring's ranks it has, each next to the last one; a
    ring that can be one of two levels is, and then each of K hosts hands on (K - 1) / K of the shards in a pass.
    Gloo has no reduce-scatter: torch makes one of an all-reduce. `model`: the plain one.
    """

    def size(parameters: Any) -> int:
        return sum({id(p): p.numel() * 4 for p in parameters}.values())

    whole = size(model.parameters())
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tied = {id(p) for module in model.modules() if isinstance(module, nn.Linear) for p in module.parameters()}
    only_looked_up = size(p for table in tables for p in table.parameters() if id(p) not in tied)
    share = (ranks - 1) / ranks
    if strategy in (*_RINGS, "rtp-flat"):  # weights there and back
        if per_host > 1 and strategy != "rtp-flat":
            share = (ranks - per_host) / ranks
        twice = strategy == "rtp-unkept" and getattr(model, "computes_again", False)
        more = size(model.blocks.parameters()) if twice else 0  # for the forward that backward computes again
        layers = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
        saved = 8 * sum(layer.weight.numel() for layer in layers) - _narrow(layers, ranks, ways or {})
        return share * (3 * whole - only_looked_up + more - saved)  # no backward of indices reads weights
    if strategy == "ddp":
        return share * 2 * whole
    if strategy in ("fsdp2", "fsdp2-gathered"):  # parameters outside of blocks are gathered once
        return share * (3 * whole + size(model.blocks.parameters()))
    if strategy == "fsdp2-noreshard":
        return share * 3 * whole
    return 0.0 if strategy in ("none", "single") else None


def adapters_form(
    strategy: str, sizes: dict[str, int], rank: int, ranks: int, ways: Mapping[str, str | None]
) -> float | None:
    """The same for adapters of rank `rank` around the frozen weights of a Llama of `sizes`, one rank on a host.

    ways: `travel` and `frozen` of a strategy that rotates. Rotations are those of the planner; the first projections,
    whose input requires no gradient, travel in forward only, and norms are gathered once.
    """
    names = {"ffn": "inner", "vocab": "vocabulary"}
    keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    spec = ModelSpec.llama(**{key: sizes[names.get(key, key)] for key in keys})
    trained = 4 * spec.layers * spec.adapter_parameters(rank)
    blocks, whole = (4 * count + trained for count in (spec.layers * spec.layer_parameters, spec.parameters))
    share = (ranks - 1) / ranks
    if strategy == "ddp":
        return share * 2 * trained
    if strategy == "fsdp2":
        return share * (whole + blocks + 2 * trained)
    if not strategy.startswith("rtp"):
        return 0.0 if strategy in ("none", "single") else None
    rotations, norms = rotations_of(spec, frozen=ways.get("frozen"), lora_rank=rank)
    first = [*rotations[1:10:3], *rotations[2:10:3]]  # q, k, v of the first layer, each with its A
    size, total = travel_bytes(ways["travel"], 4), 4.0 * sum(weight.shard_elements(ranks) for weight in norms)
    for rotation in rotations:
        total += sum(weight.travelling_bytes(ranks, size) for weight in rotation.weights)
        total += sum(4 * weight.shard_elements(ranks) for weight in rotation.weights if weight.has_gradient)
        total += sum(weight.travelling_bytes(ranks, size) for weight in rotation.backward_weights)
    total -= sum(weight.travelling_bytes(ranks, size) for rotation in first for weight in rotation.weights)
    return (ranks - 1) * total


def roof(row: dict[str, Any], sent: list[int], sockets: Sockets, place: Place) -> dict[str, Any]:
    """Returns the fields of a row about the bytes of a step. `sent`: of this rank's host at every step. Collective."""
    if not card() or row["exposed_ms"] is None:
        return {}
    count = gather(float(statistics.median(sent)), place).max().item()
    rate = bits_per_second(None if row["rate"] == "none" else row["rate"])
    wire = 0.0 if rate is None else count * 8 / rate * 1e3
    compute, beside = row["reference_forward_backward_ms"], count * sockets.beside * 1e3
    found = {
        "sent_bytes": round(count),
        "wire_ms": wire,
        "socket_processor_ms": count * sockets.processor * 1e3,
        "socket_beside_ms": beside,
        "roof_ms": max(compute + beside, wire) + row["optimizer_ms"],
        "hidden_share": None,
    }
    if wire > 0 and row["strategy"] != "none":
        found["hidden_share"] = (compute + wire - row["forward_backward_ms"]) / min(compute, wire)
    return found


def processors() -> int:
    """Sums over all ranks."""
    return card().get("cores", cores())
