"""Whether strategies of other packages run here and compute the same as a plain model: tried before they are timed."""

import argparse
import operator
from collections.abc import Callable
from typing import Any

from torch.multiprocessing import ProcessRaisedException

from shared.agreement import tolerances
from shared.launch import Worker, launch
from shared.models import WORKLOADS
from shared.strategies import STRATEGIES

PLAIN = "single"
STEPS = 3
TOKENS = 64  # at least


def failures(race: Worker, args: argparse.Namespace, ranks: int, start: Callable[..., Any] = launch) -> dict[str, str]:
    """Returns why a strategy of another package is not timed, by its name; nothing about one that is.

    They take a few steps beside one process with the batches of all ranks, in processes of their own on this host: all
    together, and each alone if that fails.

    race: returns the rows of a run of `args`. start: as `launch`. Under torchrun an error in a rank ends the run.
    """
    packages = [strategy for strategy in args.strategies if STRATEGIES[strategy].package is not None]
    if not packages or _failure(packages, race, args, ranks, start) is None:
        return {}
    found = {strategy: _failure([strategy], race, args, ranks, start) for strategy in packages}
    return {strategy: error for strategy, error in found.items() if error is not None}


def _failure(
    strategies: list[str], race: Worker, args: argparse.Namespace, ranks: int, start: Callable[..., Any]
) -> str | None:
    seq = WORKLOADS[args.model].seq
    asked = {"strategies": [*strategies, PLAIN], "tokens": [-(-TOKENS // seq) * seq], "steps": STEPS, "warmup": 0}
    alone = argparse.Namespace(**{**vars(args), **asked, "network": None, "trace": None, "failures": {}})
    try:
        rows = start(race, alone, ranks)
    except ProcessRaisedException as problem:
        return str(problem).strip().splitlines()[-1]
    for row in rows:
        spreads = row["loss_spread"], row["gradient_spread"]
        if not all(map(operator.le, spreads, tolerances(row))):  # NaN is wrong
            differ = "losses differ from those of one process by {:.0e}, gradients by {:.0e}".format(*spreads)
            return f"it computes something else: {differ}"
    return None
