"""Runs a program under torchrun on several hosts that it emulates on this machine, with shaped links between them.

    python benchmarks/hosts.py --hosts 2 --rate 2gbit -- train.py --steps 20
    python benchmarks/hosts.py --hosts 2 --ranks-per-host 2 --rate 1gbit --delay 1ms -- -m package.module
    python benchmarks/hosts.py --hosts 2 --ranks-per-host 2 -- -m rtp_ext doctor

shared/hosts.py describes a host. The program needs root, iproute2 and util-linux, and a kernel with netem for --delay.
In the program, HOST is the number of its host, and /proc/net/dev counts the bytes of its link `eth0`; the name `host0`
resolves to the first host. If there are at least as many cores as ranks, every host has its own cores.

Exit status: that of the program on the host where it failed first; 77 if hosts cannot be made here, with the reason
on stderr; 2 for wrong options. However this program ends (Ctrl-C, kill -9), all processes on the hosts end, and the
hosts are removed.
"""

import argparse
import signal
import sys
from typing import NoReturn

from shared.hosts import Hosts, NoHosts, add_host_options, asked_links

CANNOT = 77


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a program on several hosts made here. See the top of the file.")
    add = parser.add_argument
    add_host_options(parser, hosts=2)
    add("--max-restarts", type=int, default=0, help="of torchrun")
    add("program", nargs="+", metavar="-- PROGRAM", help="a Python script, or -m and a module, and its arguments")
    args = parser.parse_args(argv)
    (args.links,) = asked_links(args, parser.error) if len(args.rates) == 1 else parser.error("expected one --rate")
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
