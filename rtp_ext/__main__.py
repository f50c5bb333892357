"""The command line: ``rtp-ext schedule``, ``plan``, ``explain``, ``bench``, ``doctor``, ``record`` and ``completion``,
or ``python -m rtp_ext`` with the same. Help, `plan` and `schedule` need no torch, whose import takes seconds."""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import rtp_ext
from rtp_ext.command_line import DTYPES, PROGRAM, SHELLS, Parser, completion, dtype_name, in_words, progress
from rtp_ext.host import gpu_driver
from rtp_ext.observe import schedule, timeline
from rtp_ext.words import Format, GradientRoute, GradientTravel, PassGradientRoute, PassRoute, Travel

_JSON = "print values for other programs"


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _duration(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite time of at least 0, got {text}")
    return value


def _schedule(options: argparse.Namespace, parser: Parser) -> int:
    if options.rank_only is not None and not 0 <= options.rank_only < options.ranks:
        parser.error(f"argument --rank-only: expected 0 to {options.ranks - 1}, got {options.rank_only}")
    form = {
        "op": options.op,
        "pass_": options.pass_,
        "route": options.route,
        "in_place": options.in_place,
        "halves": options.halves,
        "two_lanes": options.two_lanes,
        "hosts": options.hosts,
        "gradient_route": options.gradient_route,
        "group": options.group,
    }
    if options.hosts > 1 and options.route != "two-level":
        parser.error(f"argument --hosts: expected --route two-level, got {options.route}")
    try:
        every = schedule.schedules(options.ranks, **form)
    except ValueError as error:
        parser.error(str(error))
    title = schedule.describe(every, **form)
    if options.json:
        print(json.dumps(schedule.to_dict(every, title=title, rank=options.rank_only), indent=2))
    else:
        print(schedule.table(every, title=title, rank=options.rank_only))
    if options.plot is None:
        return 0
    try:
        times = {"hop_time": options.hop_time, "copy_time": options.copy_time, "outer_time": options.outer_time}
        with progress("drawing"):
            timeline.plot(options.plot, every, title=title, rank=options.rank_only, **times)
    except (ImportError, OSError, ValueError) as error:
        return _failed(parser, f"cannot draw {options.plot}: {in_words(error)}")
    print(f"timeline: {options.plot}", file=sys.stderr if options.json else sys.stdout)
    return 0


def _failed(parser: Parser, why: str) -> int:
    """Reports why a command failed; returns its exit status."""
    print(f"{parser.prog}: {why}", file=sys.stderr)
    return 1


def _doctor(options: argparse.Namespace, parser: Parser) -> int:
    with progress("testing transports"):
        from rtp_ext.observe import doctor

        facts = doctor.facts()
    if facts is not None:  # under torchrun only one rank has a report
        print(json.dumps(facts, indent=2) if options.json else doctor.report(facts))
    return 0


def _record(options: argparse.Namespace, parser: Parser) -> int:
    from rtp_ext.observe import record

    try:
        with progress("reading records"):
            rings = record.rings(record.files_of(options.files))
            facts = [record.to_dict(ring) for ring in rings]
    except (OSError, ValueError) as error:
        return _failed(parser, in_words(error))
    print(json.dumps(facts, indent=2) if options.json else record.report(facts))
    return 0


def _plan(options: argparse.Namespace, parser: Parser) -> int:
    from rtp_ext.planner import cli
    from rtp_ext.planner.app import command

    if not options.app and (options.host is not None or options.port is not None):
        parser.error(f"argument {'--host' if options.host is not None else '--port'}: expected --app beside it")
    return command.run(options) if options.app else cli.run(options)


def _explain(options: argparse.Namespace, parser: Parser) -> int:
    if options.rank >= options.ranks:
        parser.error(f"argument --rank: expected 0 to {options.ranks - 1}, got {options.rank}")
    try:
        if options.model is None:
            config = options.hf_config
            Path(config).stat()  # torch would take seconds to find no file
        else:
            from rtp_ext.planner.specs.hugging_face import config_of
            from rtp_ext.planner.specs.model import ModelSpec

            config = config_of(ModelSpec.preset(options.model))
        with progress("planning the model"):
            from rtp_ext.convert import command

            text = command.explained(config, options)
    except (ImportError, OSError, ValueError) as error:
        return _failed(parser, in_words(error))
    print(text)
    return 0


def _bench(options: argparse.Namespace, parser: Parser) -> int:
    if options.device == "cuda" and not gpu_driver():  # torch would take seconds to find none
        parser.error("argument --device: expected a GPU for device cuda, found no driver of one")
    names = ("ranks", "tokens", "seconds", "device", "travel", "gradient_route", "gradient_travel")
    requested = {name: getattr(options, name) for name in names}
    with progress("loading torch"):
        from rtp_ext.measure import bench
    if options.reduce_dtype is not None:
        import torch

        requested["reduce_dtype"] = getattr(torch, options.reduce_dtype)
    try:
        plan = bench.choose(**requested)
    except ValueError as error:
        parser.error(str(error).removeprefix("bench: "))
    try:
        with progress("measuring"):
            found = bench.run(plan)
    except bench.FAILURES as error:
        return _failed(parser, str(error))
    if options.json:
        print(json.dumps(bench.to_dict(plan, found), indent=2))
    else:
        print(f"{bench.table(plan, found)}\n\n{bench.verdict(plan, found)}")
    return 0


def _completion(options: argparse.Namespace, parser: Parser) -> int:
    print(completion(_parser(), options.shell), end="")
    return 0


def _parser() -> Parser:
    parser = Parser(prog=PROGRAM, description="Rotated Tensor Parallelism for PyTorch.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {rtp_ext.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    show = commands.add_parser(
        "schedule",
        help="print what every rank computes, sends and receives",
        description="Print what every rank of a ring computes, sends and receives in one pass of one operation.",
    )
    show.add_argument("--ranks", type=_at_least_one, required=True, metavar="R", help="size of the ring")
    show.add_argument(
        "--op",
        choices=schedule.OPERATIONS,
        default="linear",
        help=f"{', '.join(schedule.BUNDLES)} are bundles: their wgrad follows their dgrad; default: %(default)s",
    )
    show.add_argument(
        "--pass", dest="pass_", choices=("forward", "backward"), default="forward", help="default: %(default)s"
    )
    show.add_argument(
        "--route",
        choices=get_args(PassRoute),
        default="ring",
        help="hops to the neighbour, weights directly from their owner, all shards first and then one product, or "
        "shards that turn inside hosts and are handed on between them; default: %(default)s",
    )
    show.add_argument(
        "--hosts",
        type=_at_least_one,
        default=1,
        metavar="K",
        help="of the route two-level, each with R / K ranks; default: %(default)s",
    )
    show.add_argument("--in-place", action="store_true", help="the local shard itself travels")
    show.add_argument(
        "--gradient-route",
        choices=get_args(PassGradientRoute),
        default="chain",
        help="a partial sum of each gradient travels from rank to rank, or each contribution goes straight to its "
        "owner; default: %(default)s",
    )
    show.add_argument(
        "--group", type=_at_least_one, default=1, metavar="G", help="shards in a product; default: %(default)s"
    )
    show.add_argument("--halves", action="store_true", help="gradients travel in two halves, each a chain of its own")
    show.add_argument("--two-lanes", action="store_true", help="a second stream computes concurrently with the first")
    show.add_argument("--rank-only", type=int, metavar="N", help="only rank N, with the buffers it reads and writes")
    show.add_argument("--plot", metavar="FILE", help="draw the timeline into FILE, for example a PNG")
    show.add_argument(
        "--hop-time",
        type=_duration,
        default=0.5,
        metavar="T",
        help="duration of a shard's hop in the plot, where a product with it takes 1; default: %(default)s",
    )
    show.add_argument(
        "--outer-time",
        type=_duration,
        metavar="T",
        help="the same of a hop between hosts, on the route two-level; default: that of --hop-time",
    )
    show.add_argument(
        "--copy-time",
        type=_duration,
        default=0.1,
        metavar="T",
        help="duration of a copy or an addition on one rank in the plot; default: %(default)s",
    )
    show.add_argument("--json", action="store_true", help=_JSON)
    show.set_defaults(run=_schedule, parser=show)

    from rtp_ext.planner import cli
    from rtp_ext.planner.app import command

    plan = commands.add_parser(
        "plan",
        help="predict memory and step time of training, or search for the fastest plan",
        description="Predict memory of every pipeline stage and time of a step, or search for plans. No GPU needed.",
    )
    cli.add_arguments(plan)
    command.add_arguments(plan)
    plan.set_defaults(run=_plan, parser=plan)

    explained = commands.add_parser(
        "explain",
        help="print how fully_rotate converts every parameter of a model, and the bytes of a step",
        description="Print how fully_rotate converts every parameter of a model of the transformers package: its "
        "movement, route and dtypes, and the bytes that a rank sends. No weights, GPU or other ranks are needed.",
    )
    source = explained.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf-config", metavar="FILE", help="a config.json, or its directory")
    source.add_argument("--model", metavar="NAME", help="a model that plan knows, such as llama-3-8b")
    explained.add_argument("--ranks", type=_at_least_one, required=True, metavar="R", help="size of the ring")
    explained.add_argument(
        "--rank", type=int, default=0, metavar="N", help="count the bytes of rank N; default: %(default)s"
    )
    explained.add_argument("--json", action="store_true", help=_JSON)
    explained.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s")
    dtypes: dict[str, Any] = {"type": dtype_name, "choices": tuple(DTYPES.values())}
    explained.add_argument("--param-dtype", **dtypes, help="compute dtype; default: that of the configuration")
    explained.add_argument("--reduce-dtype", **dtypes, help="dtype in which gradients travel; default: float32")
    explained.add_argument("--travel", choices=get_args(Travel), help="dtype in which weights travel")
    explained.add_argument("--route", choices=("auto", "ring", "direct", "gather"), default="auto")
    explained.add_argument("--gradient-route", choices=get_args(GradientRoute), default="auto")
    explained.add_argument(
        "--gradient-travel", choices=get_args(GradientTravel), help="dtype in which gradients travel, on route direct"
    )
    explained.add_argument("--group", type=_at_least_one, metavar="G", help="shards in a product")
    explained.add_argument(
        "--collective", action="store_true", help="one gather and one scatter for an operation with all shards in one"
    )
    explained.add_argument("--transport", default="auto", metavar="T", help="see rtp_ext.Ring; default: %(default)s")
    explained.add_argument("--in-place", action="store_true", help="the local shards themselves travel")
    explained.add_argument("--no-bundle", action="store_true", help="every layer rotates by itself")
    explained.add_argument(
        "--frozen", choices=get_args(Format), help="all parameters are frozen, and linear weights in these bits"
    )
    explained.add_argument("--fused-loss", action="store_true", help="vocabulary head and loss as one operation")
    explained.set_defaults(run=_explain, parser=explained)

    check = commands.add_parser(
        "doctor",
        help="report versions, GPUs, links, and which transports work here",
        description="Report versions, GPUs, links, and which transports work here and why the others do not. Under "
        "torchrun also where the ranks are, and the ring that they make.",
    )
    check.add_argument("--json", action="store_true", help=_JSON)
    check.set_defaults(run=_doctor, parser=check)

    record = commands.add_parser(
        "record",
        help="evaluate the records of a ring's ranks: late ranks, skipped operations, hops that no rank posted",
        description="Read the records of rings' last passes, written when a ring fails, by Ring.record, or on SIGUSR1.",
    )
    record.add_argument("files", nargs="+", metavar="FILE", help="rtp_record_*.bin of all ranks, or folders of them")
    record.add_argument("--json", action="store_true", help=_JSON)
    record.set_defaults(run=_record, parser=record)

    bench = commands.add_parser(
        "bench",
        help="measure what rotation hides and exposes on this machine, in under three minutes",
        description="Time one linear layer at several numbers of tokens, and a few training steps. Prints a verdict.",
    )
    bench.add_argument("--ranks", type=_at_least_one, metavar="R", help="default: the GPUs; 4 on one GPU; 2 on a CPU")
    bench.add_argument("--tokens", type=_at_least_one, nargs="+", metavar="T", help="local tokens of the layer")
    bench.add_argument("--seconds", type=_duration, metavar="S", help="time for each quantity, at least")
    bench.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs if there are any")
    bench.add_argument("--travel", choices=get_args(Travel), help="dtype in which weights travel")
    bench.add_argument("--gradient-route", choices=get_args(GradientRoute), help="default: as the ring chooses")
    bench.add_argument(
        "--gradient-travel", choices=get_args(GradientTravel), help="dtype in which gradients travel, on route direct"
    )
    bench.add_argument(
        "--reduce-dtype", choices=("float32", "bfloat16"), help="floating-point dtype in which gradients travel"
    )
    bench.add_argument("--json", action="store_true", help=_JSON)
    bench.set_defaults(run=_bench, parser=bench)

    complete = commands.add_parser(
        "completion",
        help="print the script that makes a shell complete these commands",
        description="Print a script for a shell to read: `source <(rtp-ext completion bash)`.",
    )
    complete.add_argument("shell", choices=SHELLS)
    complete.set_defaults(run=_completion, parser=complete)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, or 1 where it failed. Wrong arguments exit with 2."""
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options, options.parser)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130  # as a shell counts it
    except BrokenPipeError:
        if not _reader_has_ended():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 141  # as a shell counts it


def _reader_has_ended() -> bool:
    """Whether the output has lost its reader, as before `| head`."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in watch.poll(0))


if __name__ == "__main__":
    sys.exit(main())
