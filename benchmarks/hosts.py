"""Runs a program under torchrun on several hosts, which it makes on this machine, with shaped links between them.

    python benchmarks/hosts.py --hosts 2 --rate 2gbit -- train.py --steps 20
    python benchmarks/hosts.py --hosts 2 --ranks-per-host 2 --rate 1gbit --delay 1ms -- -m package.module
    python benchmarks/hosts.py --hosts 2 --ranks-per-host 2 -- -m rtp_ext doctor

What a host is made of: shared/hosts.py. Needs root, iproute2 and util-linux, and a kernel with netem for --delay. In
the program, HOST is the number of its host, and /proc/net/dev counts the bytes of its link `eth0`; the name `host0`
leads to the first host. Where there are as many cores as ranks, every host has its own share of them.

Exit status: that of the program on the host where it failed first; 77 where hosts cannot be made here, with the reason
on stderr; 2 for wrong options. However this ends (Ctrl-C, kill -9), all that ran on the hosts ends, and nothing stays.
"""

import argparse
import signal
import sys
from typing import NoReturn

from shared.hosts import Hosts, Links, NoHosts, bits_per_second

CANNOT = 77


def rate(text: str) -> str | None:
    """As tc writes it, or `none`."""
    try:
        bits_per_second(None if text == "none" else text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem
    return None if text == "none" else text


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a program on several hosts made here. See the top of the file.")
    add = parser.add_argument
    add("--hosts", type=int, default=2)
    add("--ranks-per-host", type=int, default=1)
    add("--rate", type=rate, help="of what a host sends, such as 2gbit or 500mbit (default: none, no limit)")
    add("--delay", help="of every packet, such as 1ms")
    add("--pin", action=argparse.BooleanOptionalAction, help="cores of its own for every host")
    add("--max-restarts", type=int, default=0, help="of torchrun")
    add("program", nargs="+", metavar="-- PROGRAM", help="a Python script, or -m and a module, and its arguments")
    args = parser.parse_args(argv)
    try:
        args.links = Links(args.hosts, args.ranks_per_host, args.rate, args.delay, args.pin)
    except ValueError as problem:
        parser.error(str(problem))
    if args.max_restarts < 0:
        parser.error(f"--max-restarts must be at least 0, got {args.max_restarts}")
    return args


def _ended(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)
    try:
        with Hosts(args.links) as hosts:
            return hosts.torchrun(args.program, max_restarts=args.max_restarts)
    except NoHosts as problem:
        print(f"hosts.py: hosts cannot be made here: {problem}", file=sys.stderr)
        return CANNOT


if __name__ == "__main__":
    sys.exit(main())
