"""Measures the cost for a core to move bytes between two hosts while it computes.

    torchrun --nnodes 2 --nproc-per-node 1 ... benchmarks/wire.py --how sockets,low-water,tcp,c10d

Two ranks, each on its own core and host, send each other messages in both directions at once while GEMMs keep the core
busy. For each way rank 0 prints the wall time, the processor time beyond that of the same GEMMs alone (the threads of
the transport and the slowdown of the GEMMs), the processor time of those threads, and the context switches.

sockets: plain blocking sockets, with a thread per direction that receives whole messages. low-water: the same, but the
kernel wakes the receiver only after a MiB has arrived (SO_RCVLOWAT). tcp, c10d: the transports of a ring.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import rtp_ext
from rtp_ext.ring.links.host_address import own_address

LOW_WATER = 1 << 20
Exchange = Callable[[Callable[[], None]], None]  # moves all messages, and computes beside each


def tasks() -> tuple[float, int]:
    """Seconds that the threads other than this one have run, and context switches of all threads."""
    seconds, switches = 0.0, 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
        for line in (task / "status").read_text().splitlines():
            if "ctxt_switches" in line:
                switches += int(line.split()[1])
    return seconds, switches


def gather(value: object) -> list[object]:
    told: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def _receive(connection: socket.socket, target: memoryview, low_water: bool) -> None:
    at = 0
    while at < len(target):
        if low_water:  # for poll: a recv that has to wait counts only what came since
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(LOW_WATER, len(target) - at))
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            poll.poll()
        received = connection.recv_into(target[at:], 0, socket.MSG_DONTWAIT if low_water else socket.MSG_WAITALL)
        if received == 0:
            raise ConnectionError("the other rank has gone")
        at += received


@contextmanager
def sockets(messages: int, size: int, low_water: bool) -> Iterator[Exchange]:
    host = own_address(gather)
    with socket.create_server((host, 0)) as listener:
        addresses = gather(listener.getsockname())
        outgoing = socket.create_connection(addresses[1 - dist.get_rank()])
        incoming, _ = listener.accept()
    outgoing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    source, target = (memoryview(torch.zeros(size, dtype=torch.uint8).numpy()) for _ in range(2))

    def exchange(compute: Callable[[], None]) -> None:
        arrived = threading.Semaphore(0)
        counted = threading.Event()  # threads that have ended are not counted

        def send() -> None:
            for _ in range(messages):
                outgoing.sendall(source)
            counted.wait()

        def receive() -> None:
            for _ in range(messages):
                _receive(incoming, target, low_water)
                arrived.release()
            counted.wait()

        threads = [threading.Thread(target=each) for each in (send, receive)]
        for thread in threads:
            thread.start()
        for _ in range(messages):
            compute()
            arrived.acquire()
        exchange.end = lambda: (counted.set(), [thread.join() for thread in threads])  # type: ignore[attr-defined]

    try:
        yield exchange
    finally:
        outgoing.close()
        incoming.close()


@contextmanager
def ring(messages: int, size: int, transport: str) -> Iterator[Exchange]:
    with rtp_ext.Ring(transport=transport) as made:
        shard = torch.zeros(size, dtype=torch.uint8)

        def exchange(compute: Callable[[], None]) -> None:
            for _ in range(messages):
                for step, _ in enumerate(made.rotate(shard)):
                    if step == 0:  # while the other rank's shard travels
                        compute()

        yield exchange


WAYS = {
    "sockets": lambda messages, size: sockets(messages, size, False),
    "low-water": lambda messages, size: sockets(messages, size, True),
    "tcp": lambda messages, size: ring(messages, size, "tcp"),
    "c10d": lambda messages, size: ring(messages, size, "c10d"),
}


def measure(exchange: Exchange, messages: int, compute: Callable[[], None]) -> dict[str, float]:
    dist.barrier()
    start = time.process_time()
    for _ in range(messages):
        compute()
    alone = time.process_time() - start
    dist.barrier()
    threads, switches = tasks()
    start, start_wall = time.process_time(), time.perf_counter()
    exchange(compute)
    wall, used = time.perf_counter() - start_wall, time.process_time() - start
    threads_after, switches_after = tasks()
    getattr(exchange, "end", lambda: None)()
    return {
        "wall": wall,
        "beyond": used - alone,
        "threads": threads_after - threads,
        "switches": switches_after - switches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--how", default=",".join(WAYS), help="which ways, of " + ", ".join(WAYS))
    parser.add_argument("--mib", type=int, default=8, help="size of a message")
    parser.add_argument("--messages", type=int, default=24, help="in each direction")
    parser.add_argument("--gemms", type=float, default=0.9, help="seconds of GEMMs beside them")
    parser.add_argument("--runs", type=int, default=3, help="of each way; the median of each column is printed")
    options = parser.parse_args()
    ways = options.how.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"--how: expected {', '.join(WAYS)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() != 2:
        raise SystemExit(f"wire.py: expected 2 ranks, got {dist.get_world_size()}")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    left, right = torch.randn(512, 1024), torch.randn(1024, 1024)
    for _ in range(3):
        torch.mm(left, right)
    start = time.process_time()
    for _ in range(20):
        torch.mm(left, right)
    count = max(1, round(options.gemms / options.messages / ((time.process_time() - start) / 20)))

    def compute() -> None:
        for _ in range(count):
            torch.mm(left, right)

    for way in ways:
        with WAYS[way](options.messages, options.mib << 20) as exchange:
            runs = [measure(exchange, options.messages, compute) for _ in range(options.runs)]
        middle = {key: sorted(run[key] for run in runs)[options.runs // 2] for key in runs[0]}
        if dist.get_rank() == 0:
            print(
                f"{way:<10} wall {middle['wall']:.3f} s, processor time beyond the GEMMs {middle['beyond']:.3f} s, of "
                f"the threads {middle['threads']:.3f} s, context switches {middle['switches']:.0f}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
