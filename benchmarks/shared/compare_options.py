"""The options of the comparison of strategies. Impossible combinations are refused here, before anything starts."""

import argparse
import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shared.card import add_output_options, complete_output
from shared.hosts import add_host_options, complete_hosts
from shared.launch import add_launch_options, repetition, under_torchrun
from shared.models import WORKLOADS
from shared.optimizers import OPTIMIZERS
from shared.recording import add_trace_option
from shared.strategies import DTYPES, STRATEGIES


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare strategies step by step. See the top of compare.py.")
    add = parser.add_argument
    numbers = {"type": lambda text: [int(part) for part in text.split(",")], "metavar": "N[,N...]"}
    add("--model", choices=WORKLOADS, default="mlp")
    add("--strategies", type=lambda text: text.split(","), help="separated by commas (default: all that the model can)")
    add("--ranks", **numbers, help="a run of its own for each (default: 2, or those of --hosts)")
    add("--tokens", **numbers, default=[1024], help="per rank")
    add("--steps", type=int, default=20, help="timed steps of each strategy")
    add("--warmup", type=int, default=3, help="further steps before the timed ones")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="muon: for hidden matrices, with AdamW for the rest")
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="train adapters of this rank around frozen weights (models of transformers)",
    )
    add("--dtype", choices=DTYPES, default="float32", help="of the computation; parameters stay float32")
    add("--travel", choices=("bfloat16", "int8"), help="what weights travel in (rtp; default: as computed with)")
    add("--gradient-route", choices=("auto", "chain", "direct"), help="of gradients (rtp; default: the ring's)")
    add("--gradient-travel", choices=("int8",), help="their format on the ring (rtp; default: --reduce-dtype)")
    add("--reduce-dtype", choices=DTYPES, default="float32", help="of gradients, where a policy says it (rtp, fsdp2)")
    add("--lr", type=float, help="default: 1e-4, with --optimizer muon 5e-3")
    add("--seed", type=int, default=0)
    add("--upstream", type=Path, metavar="FOLDER", help="the code of the paper's authors, for the strategy upstream")
    add_output_options(parser)
    add_trace_option(parser, "one more step of every rtp strategy")
    add("--no-memory", dest="memory", action="store_false", help="measure times only")
    add("--where", type=int, default=0, metavar="N", help="record where the time of N more steps goes (where.jsonl)")
    add_launch_options(parser)
    add_host_options(parser)
    parser.set_defaults(threads=1)
    args = parser.parse_args(argv)
    complete(args, parser.error)
    return args


def complete(args: argparse.Namespace, error: Callable[[str], Any]) -> None:
    """Fills in what depends on the machine; what cannot be run is an error."""
    workload = WORKLOADS[args.model]
    complete_hosts(args, error)
    on_hosts = [args.network.ranks] if args.network else None
    args.ranks = args.ranks or on_hosts or [2]
    if on_hosts and args.ranks != on_hosts:
        error(f"--hosts and --ranks-per-host make {on_hosts[0]} ranks, got --ranks {args.ranks}")
    otherwise = args.reduce_dtype != "float32" or any((args.travel, args.gradient_route, args.gradient_travel))
    if args.strategies is None:
        args.strategies = [
            name
            for name, kind in STRATEGIES.items()
            if kind.refusal(workload.make, args.optimizer, args.lora) is None and kind.replicas == 1
            if kind.package is None
            if args.travel is None or name != "rtp-inplace"
            if otherwise or not kind.exact or (kind.ways and args.lora)
        ]
    for strategy in args.strategies:
        if strategy not in STRATEGIES:
            error(f"unknown strategy {strategy!r}, expected some of {','.join(STRATEGIES)}")
        if (refusal := STRATEGIES[strategy].refusal(workload.make, args.optimizer, args.lora)) is not None:
            error(f"--model {args.model} cannot be trained with {strategy}: {refusal}")
    if args.optimizer == "muon" and (otherwise or args.dtype != "float32"):
        error("--optimizer muon: expected float32 in everything, got another dtype, route or format")
    if args.lora is not None:
        _check_adapters(args, error)
    args.lr = {"adamw": 1e-4, "muon": 5e-3}[args.optimizer] if args.lr is None else args.lr
    if all(STRATEGIES[strategy].alone or STRATEGIES[strategy].package for strategy in args.strategies):
        error("--strategies: expected one in which ranks train together, of torch or rtp")
    _check_packages(args, error)
    for name in ("travel", "gradient_route", "gradient_travel"):
        option = getattr(args, name)
        if option is not None and not any(strategy.startswith("rtp") for strategy in args.strategies):
            error(f"--{name.replace('_', '-')} {option}: expected an rtp strategy, got {','.join(args.strategies)}")
    if args.travel is not None and "rtp-inplace" in args.strategies:
        error(f"--travel {args.travel}: expected strategies that send copies of weights, got rtp-inplace")
    lists = {"--strategies": args.strategies, "--ranks": args.ranks, "--tokens": args.tokens}
    if (refusal := repetition(lists)) is not None:
        error(refusal)
    if min(*args.ranks, *args.tokens, args.steps) < 1 or min(args.warmup, args.where) < 0:
        error("--ranks, --steps and --tokens must be at least 1, --warmup and --where at least 0")
    if args.steps + args.warmup < 2:
        error("--steps and --warmup: expected at least 2 steps together: the first loss says nothing of gradients")
    if not 0 < args.lr < math.inf:
        error(f"--lr must be positive and finite, got {args.lr}")
    if not 0 <= args.seed < 2**31:
        error(f"--seed must be in [0, 2^31), got {args.seed}")
    for tokens in args.tokens:
        if tokens % workload.seq:
            error(f"--tokens {tokens} is not a multiple of the sequences of {workload.seq} of {args.model}")
    for strategy in args.strategies:
        replicas = STRATEGIES[strategy].replicas
        for ranks in args.ranks:
            if ranks % replicas:
                error(f"{strategy} cannot be run on {ranks} ranks: expected a multiple of {replicas} replicas")
    for name in workload.cut if any(STRATEGIES[strategy].whole_batch for strategy in args.strategies) else ():
        for ranks in args.ranks:
            if workload.sizes[name] % ranks:
                error(f"tensor parallelism cannot cut {name} {workload.sizes[name]} for {ranks} ranks")
    if args.device == "cuda" and not torch.cuda.is_available():
        error("--device cuda: no GPU is available")
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    if under_torchrun() and args.ranks != [int(os.environ["WORLD_SIZE"])]:
        error(f"torchrun started {os.environ['WORLD_SIZE']} processes, got --ranks {args.ranks}")
    if on_gpu and not under_torchrun() and max(args.ranks) > torch.cuda.device_count():
        error(f"{max(args.ranks)} ranks need as many GPUs, this machine has {torch.cuda.device_count()}")
    args.device = "cuda" if on_gpu else "cpu"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    file = "muon" if args.optimizer == "muon" else "lora" if args.lora else "hosts" if on_hosts else "compare"
    file = "recompute" if args.model == "llama-again" else file
    if any(STRATEGIES[strategy].package is not None for strategy in args.strategies):
        file = "peers"
    complete_output(args, file, error, device)


def _check_packages(args: argparse.Namespace, error: Callable[[str], Any]) -> None:
    args.failures = {}
    if (args.upstream is not None) != ("upstream" in args.strategies):
        error("--upstream FOLDER and the strategy upstream: expected both or neither")
    if args.upstream is not None and not (args.upstream / "rtp" / "rotated_tensor_parallel.py").exists():
        error(f"--upstream {args.upstream}: expected a folder with rtp/rotated_tensor_parallel.py")
    others = [strategy for strategy in args.strategies if STRATEGIES[strategy].package is not None]
    if others and {args.dtype, args.reduce_dtype} != {"float32"}:
        error(
            f"{others[0]}: expected float32 in everything, got --dtype {args.dtype} and {args.reduce_dtype} gradients"
        )


def _check_adapters(args: argparse.Namespace, error: Callable[[str], Any]) -> None:
    if args.lora < 1:
        error(f"--lora must be at least 1, got {args.lora}")
    if not getattr(WORKLOADS[args.model].make, "causal_head", False):
        error(f"--lora: expected a model of the transformers package, got {args.model}")
    if args.optimizer == "muon":
        error("--lora: expected --optimizer adamw, got muon: adapters are not hidden matrices")
    if importlib.util.find_spec("peft") is None:
        error("--lora needs the package peft")


def describe(args: argparse.Namespace) -> str:
    """All options, and their meaning for each strategy."""
    options = " ".join(f"{name}={value}" for name, value in vars(args).items() if name != "command")
    if args.dtype == "float32":
        return f"options: {options}"
    casts = {True: "a mixed-precision policy", False: "autocast"}
    how = ", ".join(f"{name} by {casts[STRATEGIES[name].follows_policy]}" for name in args.strategies)
    return f"options: {options}\ncompute in {args.dtype}, parameters in float32: {how}"
