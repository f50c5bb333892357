"""Whether strategies of other packages run here and compute the same as a plain model: tried before they are timed."""

import argparse
import operator
from collections.abc import Callable
from typing import Any

from torch.multiprocessing import ProcessRaisedException

from shared.agreement import tolerances
from shared.launch import Worker, launch
from shared.strategies import STRATEGIES

PLAIN = "single"
STEPS = 3


def failures(race: Worker, args: argparse.Namespace, ranks: int, start: Callable[..., Any] = launch) -> dict[str, str]:
    """Returns why a strategy of another package is not timed, by its name; nothing about one that is.

    Each takes a few steps beside one process with the batches of all ranks, in processes of its own on this host.

    race: returns the rows of a run of `args`. start: as `launch`. Under torchrun an error in a rank ends the run.
    """
    found = {}
    for strategy in args.strategies:
        if STRATEGIES[strategy].package is None:
            continue
        asked = {"strategies": [strategy, PLAIN], "tokens": args.tokens[:1], "steps": STEPS, "warmup": 0}
        alone = argparse.Namespace(**{**vars(args), **asked, "network": None, "trace": None, "failures": {}})
        try:
            (row, _) = start(race, alone, ranks)
        except ProcessRaisedException as problem:
            found[strategy] = str(problem).strip().splitlines()[-1]
            continue
        spreads = row["loss_spread"], row["gradient_spread"]
        if not all(map(operator.le, spreads, tolerances(row))):  # NaN is wrong
            differ = "losses differ from those of one process by {:.0e}, gradients by {:.0e}".format(*spreads)
            found[strategy] = f"it computes something else: {differ}"
    return found
