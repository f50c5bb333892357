"""The command `python -m rtp_ext plan`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any, NoReturn

from rtp_ext.planner import text
from rtp_ext.planner.cluster import Cluster
from rtp_ext.planner.constants import constants
from rtp_ext.planner.memory import estimate_memory
from rtp_ext.planner.model import FAMILIES, ModelSpec
from rtp_ext.planner.report import MemoryReport
from rtp_ext.planner.strategy import DTYPE_BYTES, LOSSES, OPTIMIZER_MOMENTS, RECOMPUTE, SCHEDULES, STACKS, Strategy

PROGRAM = "rtp_ext plan"
_BUNDLE = {"yes": True, "no": False, "recompute": "recompute"}
_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "experts_per_token")
_DEGREES = {
    "dp": "data-parallel replicas; default: what is left of the GPUs",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "cp": "context-parallel ranks",
    "ep": "ranks that share the experts",
    "rtp": "ranks of a rotation ring",
    "micro_batch": "samples of one forward",
    "interleave": "model chunks of a stage",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to its parser."""
    model = parser.add_argument_group("model: a preset, a Hugging Face configuration, or sizes")
    model.add_argument("--model", metavar="NAME", help=f"one of {', '.join(constants()['models'])}")
    model.add_argument("--hf-config", metavar="PATH", help="a config.json, or the directory that holds it")
    model.add_argument("--family", choices=FAMILIES, default="llama", help="of a model given by its sizes")
    for size in _SIZES:
        model.add_argument(f"--{size.replace('_', '-')}", type=int, metavar="N")
    model.add_argument("--seq", type=int, metavar="N", help="tokens of a sample; default: the model's own")

    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpu", default=None, metavar="NAME", help=f"one of {', '.join(constants()['gpus'])}")
    cluster.add_argument("--cluster", metavar="FILE", help="a JSON file with the fields of rtp_ext.planner.Cluster")
    cluster.add_argument("--gpus", type=int, metavar="N", help="default: 8, or what the file says")
    cluster.add_argument("--gpus-per-node", type=int, metavar="N", help="default: 8, or what the file says")

    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--global-batch", type=int, metavar="N", help="samples of a step; default: one micro-batch a stage"
    )
    for degree, what in _DEGREES.items():
        plan.add_argument(f"--{degree.replace('_', '-')}", type=int, metavar="N", help=what)
    plan.add_argument("--zero", type=int, metavar="STAGE", help="0 to 3; 3 is fully_shard")
    plan.add_argument("--schedule", choices=SCHEDULES)
    plan.add_argument("--recompute", choices=RECOMPUTE)
    plan.add_argument("--bundle", choices=tuple(_BUNDLE))
    plan.add_argument("--param-dtype", choices=tuple(DTYPE_BYTES))
    plan.add_argument("--reduce-dtype", choices=tuple(DTYPE_BYTES))
    plan.add_argument("--optimizer", choices=tuple(OPTIMIZER_MOMENTS))
    plan.add_argument("--stack", choices=STACKS, help="whose allocations")
    plan.add_argument("--loss", choices=LOSSES)
    for flag in ("sequence_parallel", "in_place", "fused_loss", "flash_attention"):
        plan.add_argument(f"--{flag.replace('_', '-')}", action=argparse.BooleanOptionalAction, default=None)
    plan.add_argument(
        "--plan",
        action="append",
        metavar="KEY=VALUE,...",
        help="fields that differ in one of several plans, such as zero=3,recompute=full; give it several times",
    )
    plan.add_argument(
        "--trace-module",
        metavar="MODULE:FUNCTION",
        help="replace the activations of a layer by those of the meta module and inputs that FUNCTION returns",
    )

    output = parser.add_argument_group("output")
    form = output.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--csv", action="store_true", help="print a line for each stage")
    form.add_argument("--explain", action="store_true", help="print every formula with its numbers filled in")
    output.add_argument("--plot", metavar="FILE", help="draw the memory of all plans as bars, for example into a PNG")


def one_line_errors(parser: argparse.ArgumentParser) -> None:
    """Has a parser report wrong arguments in one line, without its usage."""

    def error(message: str) -> NoReturn:
        print(f"{PROGRAM}: error: {message}", file=sys.stderr)
        raise SystemExit(2)

    parser.error = error  # type: ignore[method-assign]


def run(options: argparse.Namespace) -> int:
    """Estimates and prints. Returns 0, 1 where a file could not be written, or 2 for a plan that makes no sense."""
    try:
        model, cluster = model_of(options), cluster_of(options)
        strategies = strategies_of(options, cluster)
        traced = None
        if options.trace_module:
            from rtp_ext.planner.trace import load_and_trace

            traced = load_and_trace(options.trace_module)
        reports = [
            estimate_memory(model, cluster, strategy, options.global_batch, layer_activation_bytes=traced)
            for strategy in strategies
        ]
    except (ValueError, TypeError) as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    names = [name_of(strategy) for strategy in strategies]
    print(_printed(options, model, cluster, names, reports))
    return 0 if options.plot is None else _plot(options.plot, names, reports)


def _printed(
    options: argparse.Namespace, model: ModelSpec, cluster: Cluster, names: list[str], reports: list[MemoryReport]
) -> str:
    if options.json:
        plans = [{"plan": name, **report.to_dict()} for name, report in zip(names, reports, strict=True)]
        return json.dumps({"model": model.to_dict(), "cluster": cluster.to_dict(), "plans": plans}, indent=2)
    if options.csv:
        return text.csv_text(names, reports).rstrip("\n")
    if options.explain:
        return "\n\n".join(text.explain(name, report) for name, report in zip(names, reports, strict=True))
    return text.table(names, reports, model.parameters)


def _plot(file: str, names: list[str], reports: list[MemoryReport]) -> int:
    from rtp_ext.planner.plot import plot_memory

    try:
        plot_memory(file, names, reports)
    except (ImportError, OSError, ValueError) as error:
        print(f"{PROGRAM}: cannot draw {file}: {error}", file=sys.stderr)
        return 1
    print(f"plot: {file}", file=sys.stderr)
    return 0


def model_of(options: argparse.Namespace) -> ModelSpec:
    """The model that the arguments name. Raises ValueError where they name none, or more than one."""
    sizes = {size: getattr(options, size) for size in _SIZES if getattr(options, size) is not None}
    ways = [options.model is not None, options.hf_config is not None, bool(sizes)]
    if sum(ways) != 1:
        raise ValueError("expected one of --model, --hf-config, or the sizes --layers, --hidden and --heads")
    if options.model is not None:
        return ModelSpec.preset(options.model, seq=options.seq)
    if options.hf_config is not None:
        return ModelSpec.from_hf_config(options.hf_config, seq=options.seq)
    missing = [f"--{size}" for size in ("layers", "hidden", "heads") if size not in sizes]
    if missing:
        raise ValueError(f"a model given by its sizes also needs {', '.join(missing)}")
    if options.seq is not None:
        sizes["seq"] = options.seq
    return ModelSpec.gpt(**sizes) if options.family == "gpt" else ModelSpec.llama(**sizes)


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the arguments name; H100 of 80 GB if none."""
    if options.gpu is not None and options.cluster is not None:
        raise ValueError("expected --gpu or --cluster, not both")
    if options.cluster is not None:
        cluster = Cluster.from_json(options.cluster, gpus=options.gpus)
    else:
        cluster = Cluster.preset(options.gpu or "h100-80gb", gpus=8 if options.gpus is None else options.gpus)
    if options.gpus_per_node is not None:
        cluster = dataclasses.replace(cluster, gpus_per_node=options.gpus_per_node)
    return cluster


def strategies_of(options: argparse.Namespace, cluster: Cluster) -> list[Strategy]:
    """One plan of the arguments alone, or one for every --plan on top of them."""
    fields = [field.name for field in dataclasses.fields(Strategy)]
    given = {name: getattr(options, name) for name in fields if getattr(options, name) is not None}
    if "bundle" in given:
        given["bundle"] = _BUNDLE[given["bundle"]]
    return [_strategy({**given, **_changes(plan)}, cluster) for plan in options.plan or [""]]


def _strategy(given: dict[str, Any], cluster: Cluster) -> Strategy:
    if "dp" not in given:
        rest = Strategy(**{**given, "dp": given.get("ep", 1)}).gpus // given.get("ep", 1)
        if cluster.gpus % rest:
            raise ValueError(
                f"strategy: expected a number of GPUs divisible by tp * pp * cp * rtp = {rest}, got {cluster.gpus}"
            )
        given = {**given, "dp": cluster.gpus // rest}
    return Strategy(**given)


def _changes(plan: str) -> dict[str, Any]:
    """The fields of one --plan, each read as the default of its field is."""
    defaults = {field.name: field.default for field in dataclasses.fields(Strategy)}
    changes: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in plan.split(","))):
        key, equals, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if key not in defaults:
            raise ValueError(f"--plan: unknown field {key!r}: expected one of {', '.join(defaults)}")
        changes[key] = _value(key, value.strip() if equals else "yes", defaults[key])
    return changes


def _value(key: str, value: str, default: Any) -> Any:
    words = {"yes": True, "true": True, "no": False, "false": False}
    if key == "bundle" and value == "recompute":
        return value
    if isinstance(default, bool):
        if value.lower() not in words:
            raise ValueError(f"--plan: expected {key} to be yes or no, got {value!r}")
        return words[value.lower()]
    if isinstance(default, int):
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"--plan: expected {key} to be a whole number, got {value!r}") from None
    return value


def name_of(strategy: Strategy) -> str:
    """What differs from the defaults, such as `dp=2 tp=4 zero=1`."""
    shown = []
    for field in dataclasses.fields(strategy):
        value = getattr(strategy, field.name)
        if value == field.default:
            continue
        shown.append(f"{field.name}={'yes' if value is True else 'no' if value is False else value}")
    return " ".join(shown) or "one GPU"
