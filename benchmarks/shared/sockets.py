"""The time that a bare socket program needs to move bytes between hosts: its own, and what products beside it lose.

A program that only moves bytes finds idle cores, so its processor time leaves out most of what the kernel does for its
packets. Products on the same core lose that time too, and what cold caches cost them. This estimates what a strategy
that sends the same bytes has to lose, if its threads share the cores with its products.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shared.hosts import address, bits_per_second
from shared.launch import Place, gather

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
