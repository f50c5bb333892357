"""Fields of the page, and the arguments of the command that they stand for."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import Any, NoReturn

from rtp_ext.command_line import Parser
from rtp_ext.planner import cli
from rtp_ext.planner.memory.estimate import estimate_memory
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.time.estimate import estimate_time

Settings = dict[str, Any]

# Fields that have an option of their own, in the order of the page. Switches are True or False, all others text; an
# empty text leaves the option out. `plans` has a plan a line, `more` further options as on a command line.
MODEL = ("model", "hf_config", "seq")
CLUSTER = ("gpu", "gpus", "gpus_per_node", "link")
BATCH = ("global_batch",)
TRAINING = ("recompute", "param_dtype", "reduce_dtype", "stack", "recipe")
SWITCHES = ("fused_loss", "fused_norm", "compiled")
FIELDS = (*MODEL, *CLUSTER, *BATCH, *TRAINING, *SWITCHES, "plans", "more")
SEARCHED = (*MODEL, *CLUSTER, *BATCH)  # options that a search takes
COMPARED = ("model", "hf_config", "gpu", "gpus")  # ... and `--when`
_START: Settings = {"model": "llama-3-8b", "gpu": "h100-80gb", "gpus": "8"}
_OTHER = (
    "json",
    "csv",
    "explain",
    "plot",
    "min_gpus",
    "when",
    "forwards",
    "calibrate",
    "trace_module",
    "uneven",
    "top",
)
_SHOWN = {"top": 10}


class _Parser(Parser):
    """The command's parser, whose errors are raised rather than printed."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> _Parser:
    parser = _Parser(prog=cli.PROGRAM, add_help=False, allow_abbrev=False)
    cli.add_arguments(parser)
    return parser


_RECOMPUTE = ("", ",recompute=selective", ",recompute=full")  # from the fastest to the smallest
_RING_RECOMPUTE = ("", ",bundle=recompute", *_RECOMPUTE[1:])
_LARGEST_RING = 64


def default_plans(options: argparse.Namespace) -> list[str]:
    """Returns rotation, fully_shard, data and tensor parallelism on all GPUs of the arguments, in the format of --plan;
    each with the least recomputation that fits below the line, unless the arguments say which. Of rings, from one node
    on, it is the fastest that fits."""
    model, cluster = cli.model_of(options), cli.cluster_of(options)
    gpus, node = cluster.gpus, min(cluster.gpus, cluster.gpus_per_node)
    tensor = max((tp for tp in (2, 4, 8) if node % tp == 0 and model.kv_heads % tp == 0), default=1)
    others = ["zero=3", "zero=0"]
    if tensor > 1 and gpus % tensor == 0:
        others.append(f"tp={tensor},sequence_parallel{',zero=1' if gpus > tensor else ''}")
    rings, ring = [], node
    while 1 < ring <= min(gpus, _LARGEST_RING) and gpus % ring == 0:
        seconds, plan = _fitting(f"rtp={ring}", options, model, cluster)
        rings.append((seconds, -ring, plan))  # where none fits, the largest is nearest to it
        ring *= 2
    fastest = [min(rings)[2]] if rings else []
    return [*fastest, *(_fitting(plan, options, model, cluster)[1] for plan in others)]


def _fitting(plan: str, options: argparse.Namespace, model: ModelSpec, cluster: Cluster) -> tuple[float, str]:
    """Returns the plan with the least recomputation that fits, and its seconds; infinity where none does."""
    modes = ("",) if options.recompute else _RING_RECOMPUTE if plan.startswith("rtp") else _RECOMPUTE
    for more in modes:
        given = argparse.Namespace(**{**vars(options), "plan": [f"{plan}{more}"]})
        strategies, batch = cli.strategies_of(given, cluster), options.global_batch
        if estimate_memory(model, cluster, strategies[0], batch).verdict == "fits":
            return estimate_time(model, cluster, strategies[0], batch).step_seconds, f"{plan}{more}"
    return float("inf"), f"{plan}{modes[-1]}"


def settings_of(options: argparse.Namespace) -> Settings:
    """Returns the fields for arguments of the command. Raises ValueError for options that the page does not have."""
    _check(options, "--app")
    given, more = Settings(), list[str]()
    for action in _parser()._actions:
        value = getattr(options, action.dest)
        if value is None or value == action.default or action.dest == "plan":
            continue
        if action.dest in FIELDS and not (action.dest in SWITCHES and value is False):
            given[action.dest] = value if action.dest in SWITCHES else str(value)
        else:
            more += _words(action, value)
    settings: Settings = {name: False if name in SWITCHES else "" for name in FIELDS}
    if options.cluster is None:
        settings |= {"gpu": _START["gpu"], "gpus": _START["gpus"]}
    if not any(getattr(options, name) for name in ("model", "hf_config", "layers", "hidden", "heads")):
        settings["model"] = _START["model"]
    settings |= {**given, "more": shlex.join(more), "plans": "\n".join(options.plan or [])}
    if cli.planned(options):  # shown as without the page
        return settings
    settings |= {"stack": "torch", "fused_loss": True}
    return refilled(settings, {"plans": "", "global_batch": ""})


def _words(action: argparse.Action, value: Any) -> list[str]:
    """Returns an option as words of a command line."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return [action.option_strings[0 if value else -1]]
    text = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return [action.option_strings[0], text]


def with_default_plans(settings: Mapping[str, Any], batch: bool = True) -> Settings:
    """Returns the fields with the plans that suit their cluster and, with `batch`, a sample for each GPU; unchanged
    where they name no valid cluster or model."""
    try:
        gpus = cli.cluster_of(parsed(arguments({**settings, "plans": "", "global_batch": ""}))).gpus
        new = {**settings, "global_batch": str(gpus)} if batch else dict(settings)
        return {**new, "plans": "\n".join(default_plans(parsed(arguments({**new, "plans": ""}))))}
    except (ValueError, TypeError):
        return dict(settings)


def refilled(settings: Mapping[str, Any], filled: Mapping[str, Any]) -> Settings:
    """Returns the fields for a changed model or cluster: what still has its default value gets its new one. filled: the
    default values of `plans` and `global_batch` before."""
    new = with_default_plans(settings, settings["global_batch"] == filled.get("global_batch"))
    return {**settings, **{name: new[name] for name, old in filled.items() if settings[name] == old}}


def arguments(settings: Mapping[str, Any], names: tuple[str, ...] = FIELDS) -> list[str]:
    """Returns the arguments that the fields stand for. names: of the fields that are of interest.

    Raises:
        ValueError: further options in which a quotation mark is missing.
    """
    words: list[str] = []
    for name in names:
        value = settings[name]
        flag = f"--{name.replace('_', '-')}"
        if name == "plans":
            for line in filter(None, map(str.strip, value.splitlines())):
                words += ["--plan", line]
        elif name == "more":
            words += _split(value)
        elif name in SWITCHES:
            words += [flag] if value else []
        elif str(value or "").strip():
            words += [flag, str(value).strip()]
    return words


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"further options: expected words of a command line, got {error}") from None


def parsed(words: list[str]) -> argparse.Namespace:
    """Returns the arguments as the command understands them.

    Raises:
        ValueError: what the command refuses, in its words; options that ask for another output than the page.
    """
    options = _parser().parse_args(words)
    _check(options, "the page")
    return options


def _check(options: argparse.Namespace, asked: str) -> None:
    """Raises ValueError for options that ask for another output than plans."""
    if wrong := [name for name in _OTHER if getattr(options, name) not in (None, False, _SHOWN.get(name))]:
        raise ValueError(f"{asked} shows plans: expected no --{wrong[0].replace('_', '-')} beside it")
