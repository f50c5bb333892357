"""The command `rtp-ext plan`: arguments and output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from rtp_ext import command_line
from rtp_ext.command_line import Parser, in_words, progress, wrapped
from rtp_ext.gpu_rates import LINKS
from rtp_ext.planner.constants import constants
from rtp_ext.planner.display import text
from rtp_ext.planner.measured import fitted_and_errors, read_measurements
from rtp_ext.planner.memory.estimate import estimate_memory
from rtp_ext.planner.memory.report import MemoryReport
from rtp_ext.planner.plan_text import changes_of, name_of, numbers
from rtp_ext.planner.plans import forwards, when
from rtp_ext.planner.plans.differences import differences, differences_line
from rtp_ext.planner.plans.search import search, smallest_cluster
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import FAMILIES, ModelSpec
from rtp_ext.planner.specs.strategy import (
    BUFFERS,
    COLLECTIVE,
    DTYPE_BYTES,
    FP8_SCALINGS,
    FROZEN,
    GRADIENT_ROUTES,
    GRADIENT_TRAVELS,
    LOSSES,
    OPTIMIZER_MOMENTS,
    OUTER,
    RECIPES_OF_RINGS,
    RECOMPUTE,
    ROUTES,
    SCHEDULES,
    STACKS,
    TOPOLOGIES,
    TRAVELS,
    Strategy,
    in_eight_bits,
)
from rtp_ext.planner.time.estimate import estimate_time
from rtp_ext.planner.time.explain import explain_time
from rtp_ext.planner.time.report import TimeReport

PROGRAM = f"{command_line.PROGRAM} plan"
_FLAGS = (
    *("sequence_parallel", "in_place", "fused_loss", "flash_attention", "fp8"),
    *("symm_mem", "offload", "compiled", "fused_norm", "cp_balanced"),
)
_BUNDLE = {"yes": True, "no": False, "recompute": "recompute"}
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "experts_per_token")
_DEGREES = {
    "dp": "data-parallel replicas; default: all remaining GPUs",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "cp": "context-parallel ranks",
    "ep": "ranks that share the experts",
    "rtp": "ranks of a rotation ring",
    "micro_batch": "samples of one forward",
    "interleave": "model chunks of a stage",
    "period": "steps between outer steps of replicas",
    "replicate": "groups of zero=3 that each hold all shards",
    "lora_rank": "of adapters around all linear layers, which alone are trained",
    "late_gradients": "passes of a rotation whose gradients may arrive during the next one; 1, with lean buffers 0",
}


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command to its parser."""
    parser.words = {"--model": [*constants()["models"]], "--gpu": [*constants()["gpus"]]}
    model = parser.add_argument_group("model: a preset, a Hugging Face configuration, or sizes")
    model.add_argument("--model", metavar="NAME", help=f"one of {', '.join(constants()['models'])}")
    model.add_argument("--hf-config", metavar="PATH", help="a config.json, or the directory that holds it")
    model.add_argument("--family", choices=FAMILIES, default="llama", help="of a model given by its sizes")
    for size in SIZES:
        model.add_argument(f"--{size.replace('_', '-')}", type=int, metavar="N")
    model.add_argument("--seq", type=int, metavar="N", help="tokens of a sample; default: the model's own")

    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpu", default=None, metavar="NAME", help=f"one of {', '.join(constants()['gpus'])}")
    cluster.add_argument("--link", choices=LINKS, help="between the GPUs of a node; default: that of the GPU")
    cluster.add_argument("--cluster", metavar="FILE", help="a JSON file with the fields of rtp_ext.planner.Cluster")
    cluster.add_argument("--gpus", type=int, metavar="N", help="default: 8, or the file's value")
    cluster.add_argument("--gpus-per-node", type=int, metavar="N", help="default: 8, or the file's value")

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
    for dtype in ("--param-dtype", "--reduce-dtype"):
        plan.add_argument(dtype, type=command_line.short_dtype_name, choices=tuple(DTYPE_BYTES))
    plan.add_argument("--optimizer", choices=tuple(OPTIMIZER_MOMENTS))
    plan.add_argument("--stack", choices=STACKS, help="software stack whose allocations are predicted")
    plan.add_argument("--loss", choices=LOSSES)
    plan.add_argument("--fp8-scaling", choices=FP8_SCALINGS)
    plan.add_argument(
        "--recipe", choices=RECIPES_OF_RINGS[1:], help="products in 8 bits: of rings; of other plans --fp8"
    )
    plan.add_argument("--route", choices=ROUTES, help="of rotation")
    plan.add_argument("--gradient-route", choices=GRADIENT_ROUTES, help="of rotation")
    plan.add_argument("--travel", choices=TRAVELS[1:], help="of rotating weights")
    plan.add_argument("--gradient-travel", choices=GRADIENT_TRAVELS[1:])
    plan.add_argument("--buffers", choices=BUFFERS, help="of rotation")
    plan.add_argument("--group", type=int, metavar="N", help="of rotation: shards in a product; 0: the fastest number")
    plan.add_argument("--collective", choices=COLLECTIVE, help="of rotation: one gather for each operation")
    plan.add_argument(
        "--to-come", metavar="NAMES", help="joined by +, or all: what rings may use that is NOT BUILT yet"
    )
    plan.add_argument("--frozen", choices=FROZEN[1:], help="frozen weights of a ring")
    plan.add_argument("--outer", choices=OUTER, help="outer policy between the replicas of a ring")
    for stages in ("stage-layers", "stage-recompute"):
        plan.add_argument(f"--{stages}", type=numbers, metavar="N+N+...", help="of every pipeline stage")
    plan.add_argument("--topology", choices=TOPOLOGIES, help="of gossip")
    for flag in _FLAGS:
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

    asked = parser.add_argument_group("questions; without a plan the fastest plans that fit are searched for")
    asked.add_argument("--top", type=int, default=10, metavar="N", help="plans to show of a search; default: 10")
    asked.add_argument("--uneven", action="store_true", help="search: also the best uneven pipeline stages (scipy)")
    asked.add_argument("--min-gpus", action="store_true", help="the fewest GPUs on which some plan fits")
    asked.add_argument(
        "--when", action="store_true", help="when rotation wins; with --frozen: from how many tokens; --recipe"
    )
    asked.add_argument("--forwards", action="store_true", help="from how many tokens forwards alone hide their pulls")
    asked.add_argument("--calibrate", metavar="FILE", help="fit the time model to a CSV or JSON lines of timed steps")

    output = parser.add_argument_group("output")
    form = output.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--csv", action="store_true", help="print a line for each stage")
    form.add_argument("--explain", action="store_true", help="print every formula with its numbers filled in")
    output.add_argument(
        "--plot", metavar="FILE", help="draw memory and time of all plans as bars, for example into a PNG"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns 0; 1 if no plan fits or a file could not be written; 2 for invalid arguments."""
    try:
        _check_form(options)
        if options.calibrate is not None:
            return _calibrate(options)
        if options.when:
            return _when(options)
        if options.forwards:
            cells = forwards.forwards_cells() if options.json else None
            print(json.dumps(cells, indent=2) if cells else forwards.forwards_table())
            return 0
        model, cluster = model_of(options), cluster_of(options)
        if options.min_gpus:
            return _fewest(options, model, cluster)
        if not planned(options):
            return _search(options, model, cluster)
        return _estimate(options, model, cluster)
    except (ImportError, ValueError, TypeError) as error:
        print(f"{PROGRAM}: error: {in_words(error)}", file=sys.stderr)
        return 2


def _check_form(options: argparse.Namespace) -> None:
    """Raises ValueError for an output format that a question does not support."""
    forms = ("json", "csv", "explain", "plot")
    drawn = ("json",) if options.frozen or options.lora_rank else ("json", "plot")
    had = {"calibrate": ("json",), "when": drawn, "forwards": ("json",), "min_gpus": ("json",)}
    asked = [question for question in had if getattr(options, question)]
    if len(asked) > 1:
        raise ValueError(f"expected one of {', '.join('--' + name.replace('_', '-') for name in asked)}, got several")
    for question in asked:
        if wrong := [form for form in forms if getattr(options, form) and form not in had[question]]:
            raise ValueError(f"--{question.replace('_', '-')} has no --{wrong[0]}")
    for question, names in _unread(options).items():
        if getattr(options, question) and (given := [name for name in names if _is_given(options, name)]):
            raise ValueError(f"--{question.replace('_', '-')} has no --{given[0].replace('_', '-')}")


def _unread(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Returns the arguments that a question answers nothing about, by question."""
    fields = tuple(field.name for field in dataclasses.fields(Strategy))
    plans = (*fields, "plan", "trace_module", "global_batch")
    cluster = ("link", "cluster", "gpus_per_node")
    forwards = ("model", "hf_config", *SIZES, "seq", "gpu", "gpus", *cluster, *plans)
    hidden = ("seq", "global_batch", *cluster, "trace_module") if options.frozen or options.lora_rank else ()
    return {"forwards": forwards, "min_gpus": ("gpus", *plans), "when": hidden}  # `when_cells` refuses others


def _is_given(options: argparse.Namespace, name: str) -> bool:
    return getattr(options, name) is not None


def planned(options: argparse.Namespace) -> bool:
    """Returns whether the arguments contain a plan, so that no search is needed."""
    fields = [field.name for field in dataclasses.fields(Strategy)]
    return bool(options.plan or options.trace_module) or any(_is_given(options, name) for name in fields)


def _estimate(options: argparse.Namespace, model: ModelSpec, cluster: Cluster) -> int:
    strategies = strategies_of(options, cluster)
    traced = None
    if options.trace_module:
        from rtp_ext.planner.memory.saved_tensors import load_and_trace

        traced = load_and_trace(options.trace_module)
    with progress("estimating plans"):
        reports, times = estimates(model, cluster, strategies, options.global_batch, traced)
    names = [name_of(strategy) for strategy in strategies]
    if options.json:
        plans = [
            {"plan": name, **report.to_dict(), "time": time.to_dict()}
            for name, report, time in zip(names, reports, times, strict=True)
        ]
        print(_json(model, cluster, plans, strategies))
    elif options.csv:
        print(text.csv_text(names, reports, times).rstrip("\n"))
    elif options.explain:
        result = zip(names, reports, strategies, times, strict=True)
        print(
            "\n\n".join(
                f"{text.explain(name, report)}\n\n{explain_time(model, cluster, plan, time)}"
                for name, report, plan, time in result
            )
        )
    else:
        print(text.table(names, reports, model.parameters, times))
        if unlike := differences_line(strategies):
            print("\n" + "\n".join(wrapped(unlike)))
    return _plot(options.plot, "plot_plans", names, reports, times)


def estimates(
    model: ModelSpec, cluster: Cluster, plans: Sequence[Strategy], batch: int | None, traced: Any = None
) -> tuple[list[MemoryReport], list[TimeReport]]:
    """Returns memory and time of every plan. traced: bytes of a layer's activations, in place of the planner's."""
    reports = [estimate_memory(model, cluster, plan, batch, layer_activation_bytes=traced) for plan in plans]
    return reports, [estimate_time(model, cluster, plan, batch) for plan in plans]


def _search(options: argparse.Namespace, model: ModelSpec, cluster: Cluster) -> int:
    if options.top < 1:
        raise ValueError(f"expected --top of at least 1, got {options.top}")
    batch = cluster.gpus if options.global_batch is None else options.global_batch
    with progress("searching for plans"):
        plans = search(model, cluster, global_batch=batch, top=options.top, uneven=options.uneven)
    if not plans:
        print(f"{PROGRAM}: {text.no_plan_fits(model, cluster, batch)}", file=sys.stderr)
        return 1
    names = [name_of(plan.strategy) for plan in plans]
    memory, times = [plan.memory for plan in plans], [plan.time for plan in plans]
    title = (
        f"{model.name}, {model.parameters / text.GB:.2f}e9 parameters, {model.seq} tokens a sample; {cluster.gpus} x "
        f"{cluster.name}; global batch {batch} samples; predicted"
    )
    if options.json:
        dicts = [{"plan": name, **plan.to_dict()} for name, plan in zip(names, plans, strict=True)]
        print(_json(model, cluster, dicts, [plan.strategy for plan in plans]))
    elif options.csv:
        print(text.csv_text(names, memory, times).rstrip("\n"))
    else:
        print(text.search_table(names, plans, title))
        if not any(plan.strategy.rtp > 1 for plan in plans):
            print("\n".join(wrapped(text.why_no_ring(model, cluster, batch, plans[0]))))
        if options.explain:
            first = plans[0]
            result = explain_time(model, cluster, first.strategy, first.time)
            print(f"\n{text.explain(names[0], first.memory)}\n\n{result}")
    return _plot(options.plot, "plot_plans", names, memory, times)


def _fewest(options: argparse.Namespace, model: ModelSpec, cluster: Cluster) -> int:
    with progress("searching for plans"):
        sized, strategy = smallest_cluster(model, cluster)
        report = estimate_memory(model, sized, strategy)
    name = name_of(strategy)
    if options.json:
        print(_json(model, sized, [{"plan": name, **report.to_dict()}], [strategy]))
    else:
        print(f"{model.name}: {sized.gpus} x {sized.name}, with {name}\n{text.verdict_line(report)}")
    return 0


def _when(options: argparse.Namespace) -> int:
    if options.frozen or options.lora_rank:
        if len(options.plan or []) > 1:
            raise ValueError("--when has no second --plan")
        plan = strategies_of(options, cluster_of(options))[0]
        asked = (model_of(options), plan.gpus, options.gpu or when.BASE, plan)
        print(json.dumps(when.hidden_tokens(*asked), indent=2) if options.json else when.hidden_table(*asked))
        return 0
    cells, base = when_cells(options)
    print(json.dumps([cell.to_dict() for cell in cells], indent=2) if options.json else when.when_table(cells, base))
    if options.recipe and not options.json:
        print(f"\n{when.recipe_table(models_of(options), base, options.recipe)}")
    return _plot(options.plot, "plot_when", cells, base)


def when_cells(options: argparse.Namespace) -> tuple[list[when.Cell], str]:
    """Returns the comparison of all families of plans for the model of the arguments, or for several, and its GPU."""
    beside = ("cluster", "link", "gpus_per_node", "seq", "global_batch")
    asked = argparse.Namespace(**{**vars(options), "recipe": None})
    if planned(asked) or any(getattr(options, name) is not None for name in beside):
        raise ValueError(
            "--when compares plans over links and tokens: expected a model, --gpu, --gpus and --recipe at most"
        )
    models = models_of(options)
    base = options.gpu or when.BASE
    with progress("comparing plans"):
        return when.grid(models, base=base, recipe=options.recipe), base


def models_of(options: argparse.Namespace) -> Sequence[tuple[str | ModelSpec, int]]:
    """Returns the models that --when compares plans for, and the GPUs of each."""
    if options.model or options.hf_config or options.layers:
        return [(options.model or model_of(options), cluster_of(options).gpus)]
    if options.gpus is not None:
        raise ValueError("--when --gpus needs a model: expected --model, --hf-config or its sizes too")
    return when.MODELS


def _calibrate(options: argparse.Namespace) -> int:
    measured = read_measurements(options.calibrate)
    with progress("fitting constants"):
        result = fitted_and_errors(measured)
    print(json.dumps(result, indent=2))
    return 0


def _json(model: ModelSpec, cluster: Cluster, plans: list[dict[str, Any]], strategies: Sequence[Strategy]) -> str:
    """Formats plans as JSON. `differences`: the settings in which plans differ other than the layout."""
    result = {"model": model.to_dict(), "cluster": cluster.to_dict(), "plans": plans}
    return json.dumps({**result, "differences": differences(strategies)}, indent=2)


def _plot(file: str | None, kind: str, *shown: Any) -> int:
    if file is None:
        return 0
    from rtp_ext.planner.display import plot

    try:
        getattr(plot, kind)(file, *shown)
    except (ImportError, OSError, ValueError) as error:
        print(f"{PROGRAM}: cannot draw {file}: {in_words(error)}", file=sys.stderr)
        return 1
    print(f"plot: {file}", file=sys.stderr)
    return 0


def model_of(options: argparse.Namespace) -> ModelSpec:
    """Returns the model named by the arguments. Raises ValueError if they name none or several."""
    sizes = {size: getattr(options, size) for size in SIZES if getattr(options, size) is not None}
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
    """Returns the cluster named by the arguments; by default H100 with 80 GB."""
    if options.gpu is not None and options.cluster is not None:
        raise ValueError("expected --gpu or --cluster, not both")
    if options.link is not None and options.cluster is not None:
        raise ValueError("expected the link in the file of --cluster, or --gpu with --link")
    if options.cluster is not None:
        cluster = Cluster.from_json(options.cluster, gpus=options.gpus)
    else:
        gpus = 8 if options.gpus is None else options.gpus
        cluster = Cluster.preset(options.gpu or "h100-80gb", gpus=gpus, link=options.link)
    if options.gpus_per_node is not None:
        cluster = dataclasses.replace(cluster, gpus_per_node=options.gpus_per_node)
    return cluster


def strategies_of(options: argparse.Namespace, cluster: Cluster) -> list[Strategy]:
    """Returns the plan of the arguments, or one plan per --plan option."""
    fields = [field.name for field in dataclasses.fields(Strategy)]
    given = {name: getattr(options, name) for name in fields if getattr(options, name) is not None}
    if "bundle" in given:
        given["bundle"] = _BUNDLE[given["bundle"]]
    return [_strategy({**given, **changes_of(plan)}, cluster) for plan in options.plan or [""]]


def _strategy(given: dict[str, Any], cluster: Cluster) -> Strategy:
    if given.get("recipe"):
        given = {**given, "recipe": None, **in_eight_bits(given["recipe"], given.get("rtp", 1))}
    if "dp" not in given:
        rest = Strategy(**{**given, "dp": given.get("ep", 1)}).gpus // given.get("ep", 1)
        if cluster.gpus % rest:
            raise ValueError(
                f"strategy: expected a number of GPUs divisible by tp * pp * cp * rtp = {rest}, got {cluster.gpus}"
            )
        given = {**given, "dp": cluster.gpus // rest}
    return Strategy(**given)
