"""`--hosts`, `--rate` and what belongs to them, for benchmarks that run on made hosts."""

import argparse
from collections.abc import Callable
from typing import Any

from shared.hosts import Links, refusal


def add_host_options(parser: argparse.ArgumentParser, hosts: int | None = None) -> None:
    """`hosts`: the default; None: no hosts are made."""
    add = parser.add_argument_group(
        "hosts", "made on this machine, each with one link: see shared/hosts.py"
    ).add_argument
    add("--hosts", type=int, default=hosts, metavar="N", help="how many" + (f" (default: {hosts})" if hosts else ""))
    add("--ranks-per-host", type=int, default=1, metavar="N")
    add(
        "--rate",
        dest="rates",
        type=lambda text: [None if part == "none" else part for part in text.split(",")],
        default=[None],
        help="of what a host sends, such as 2gbit or 500mbit (default: none, no limit); several: a run for each",
    )
    add("--delay", help="of every packet, such as 1ms")
    add("--pin", action=argparse.BooleanOptionalAction, help="cores of its own for every host (default: if there are)")


def asked_links(args: argparse.Namespace, error: Callable[[str], Any]) -> list[Links]:
    """Returns one network for each rate; none without hosts."""
    if args.hosts is None:
        if (args.ranks_per_host, args.rates, args.delay, args.pin) != (1, [None], None, None):
            error("--ranks-per-host, --rate, --delay and --pin are of --hosts")
        return []
    if len(set(args.rates)) < len(args.rates):
        error(f"--rate: expected each once, got {args.rates}")
    try:
        return [Links(args.hosts, args.ranks_per_host, rate, args.delay, args.pin) for rate in args.rates]
    except ValueError as problem:
        error(str(problem))
        raise


def complete_hosts(args: argparse.Namespace, error: Callable[[str], Any]) -> None:
    """Sets `networks`, and `network` to the first of them or None, for benchmarks that `launch` starts. Calls `error`
    for impossible options."""
    args.networks = asked_links(args, error)
    args.network = args.networks[0] if args.networks else None
    if args.network is None:
        return
    if args.device == "cuda":
        error("--device cuda: made hosts have CPUs alone")
    if (why := refusal()) is not None:
        error(f"--hosts: they cannot be made here: {why}")
    args.device = "cpu"
