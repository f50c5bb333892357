"""Trains a small model with every optimizer of pytorch_optimizer, as it is and by `on_shards`, and compares.

    pip install pytorch_optimizer
    python benchmarks/compatibility/third_party_optimizers.py            # all, on 2 and 3 ranks; some minutes
    python benchmarks/compatibility/third_party_optimizers.py --only lion,lamb --ranks 2 --quick

Five steps in float64 of a model with layers of every kind, whose sizes do not divide, against the plain model in one
process. A run is right where no parameter is off by more than 1e-4 of the way that it went. One JSON line for each
optimizer and number of ranks is appended to results/MACHINE/third_party_optimizers.jsonl, unless --quick; the table of
docs/optimizers.md shows the last of each. Exit status 1 if a run by `on_shards` is wrong.
"""

import argparse
import contextlib
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import rtp_ext

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import add_output_options, append_line, complete_output, environment_card, result_line
from shared.launch import Place, launch
from shared.table import Row, Table, last_of_each, told

PACKAGE = "pytorch_optimizer"
CLOSE = 1e-4
STEPS, LIMIT = 5, 20.0  # LIMIT: seconds that a rank waits for the others
ARGUMENTS = {"ranger21": {"num_iterations": STEPS}, "bsam": {"num_data": 15}}  # that have no default


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            self.table = nn.Embedding(9, 5)
            self.up, self.norm, self.gate = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1)
            self.mix, self.head = nn.Conv1d(7, 4, 3, padding=1), nn.Linear(4, 9)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.up(self.table(tokens)))
        hidden = torch.tanh(hidden * self.gate(hidden)).transpose(1, 2)
        return self.head(self.mix(hidden).transpose(1, 2))


def loss_of(model: nn.Module, ranks: Sequence[int], step: int) -> Tensor:
    losses = []
    for rank in ranks:
        tokens = torch.randint(9, (3, 5), generator=torch.Generator().manual_seed(100 * rank + step))
        losses.append(nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    return torch.stack(losses).mean()


def build(make: Callable[..., Any], name: str, model: nn.Module) -> Any:
    """Returns the optimizer with a learning rate of 0.01, or its default where it takes none; those of the kind of Muon
    get matrices and others in two groups."""
    arguments = ARGUMENTS.get(name, {})
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if (p.dim() == 2) == muon], "use_muon": muon} for muon in (True, False)]
    try:
        return _with_rate(make, parameters, arguments)
    except (ValueError, RuntimeError) as error:
        if "use_muon" not in str(error) and "__contains__" not in str(error):  # asked of a tensor instead of a group
            raise
        return _with_rate(make, groups, arguments)


def _with_rate(make: Callable[..., Any], given: Any, arguments: dict[str, Any]) -> Any:
    try:
        return make(given, lr=0.01, **arguments)
    except (TypeError, ValueError) as error:
        if "'lr'" not in str(error):
            raise
        return make(given, **arguments)


def train(model: nn.Module, optimizer: Any, ranks: Sequence[int]) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            with torch.enable_grad():  # some steps call it without
                optimizer.zero_grad()
                loss = loss_of(model, ranks, step)
                loss.backward()
            return loss

        torch.manual_seed(step)
        closure()
        try:
            optimizer.step()
        except Exception as error:
            if "closure" not in str(error):
                raise
            optimizer.step(closure)


def whole(parameter: Tensor) -> Tensor:
    return parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def off(model: nn.Module, plain: nn.Module) -> float:
    """Returns the largest error of a parameter, relative to the way that it went."""
    worst = 0.0
    for found, expected, before in zip(model.parameters(), plain.parameters(), Model().parameters(), strict=True):
        error = (whole(found) - expected.detach()).abs().max().item()
        way = (expected - before).abs().max().item()
        worst = max(worst, error / way if way else (float("inf") if error else 0.0))
    return worst


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def alike(texts: Sequence[str]) -> str:
    """Returns what the first rank said that failed, or '' if none did."""
    return next(filter(None, texts), "")


def attempt(place: Place, name: str, plain: nn.Module, make: Callable[..., Any]) -> dict[str, Any]:
    """Returns how a converted model trains: `built` and `trained` are errors of any rank, or ''."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    model = rtp_ext.fully_rotate(Model(), mesh=DeviceMesh.from_group(group, "cpu"), timeout=LIMIT)
    found: dict[str, Any] = {"built": "", "trained": "", "off": None}
    for stage in ("built", "trained"):
        problem, texts = "", [""] * place.ranks
        try:
            if stage == "built":
                torch.manual_seed(0)
                optimizer = build(make, name, model)
            else:
                train(model, optimizer, [place.rank])
        except Exception as error:
            problem = said(error)
        dist.all_gather_object(texts, problem)
        found[stage] = alike(texts)
        if found[stage]:
            return found
    found["off"] = off(model, plain)
    rtp_ext.ring_of(model).close()
    return found


def work(place: Place, args: argparse.Namespace) -> list[dict[str, Any]]:
    import pytorch_optimizer

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for name in args.names:
        cls = pytorch_optimizer.load_optimizer(name)
        row: dict[str, Any] = {"optimizer": name, "class": cls.__name__, "plain": ""}
        rows.append(row)
        plain = Model()
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                torch.manual_seed(0)
                train(plain, build(cls, name, plain), range(place.ranks))
            except Exception as error:
                row["plain"] = said(error)
            else:
                row["as_is"] = attempt(place, name, plain, cls)
                row["on_shards"] = attempt(place, name, plain, partial(rtp_ext.optim.on_shards, cls))
        if place.rank == 0:
            print(json.dumps(row), flush=True)
    return rows


# -- the table of docs/optimizers.md -----------------------------------------------------------------------------------

# What became of an optimizer as it is, and by on_shards: rows and columns.
AS_IS = ("right", "an error", "wrong numbers")
ON_SHARDS = ("right", "refused", "an error", "wrong numbers")


def outcome(found: Row) -> str:
    """Returns `right`, `refused` by on_shards, `an error`, or `wrong numbers`."""
    if found["built"] or found["trained"]:
        return "refused" if "on_shards: " in found["built"] else "an error"
    return "right" if found["off"] <= CLOSE else "wrong numbers"


def outcomes(rows: list[Row]) -> list[Row]:
    """One line for each pair of outcomes; of several numbers of ranks, the worse."""
    by_class: dict[str, list[Row]] = {}
    for row in rows:
        by_class.setdefault(row["class"], []).append(row)
    cells: dict[tuple[str, str], list[str]] = {}
    failing = []
    for name, lines in sorted(by_class.items(), key=lambda item: item[0].lower()):
        if any(line["plain"] for line in lines):
            failing.append(name)
            continue
        as_is, on_shards = (
            max((outcome(line[way]) for line in lines), key=order.index)
            for way, order in (("as_is", AS_IS), ("on_shards", ON_SHARDS))
        )
        cells.setdefault((as_is, on_shards), []).append(name)
    found = [
        {"as they are": as_is, "by `on_shards`": on_shards, "": len(names), "classes": ", ".join(names)}
        for (as_is, on_shards), names in sorted(cells.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    fail = "fail on the plain model as they are called here: " + ", ".join(failing)
    return [*found, {"as they are": "", "by `on_shards`": "", "": len(failing), "classes": fail}]


def _note(rows: list[Row]) -> str:
    packages = ", ".join(dict.fromkeys(row["package"] for row in rows))
    return f", {packages}, on {' and '.join(map(str, sorted({row['ranks'] for row in rows})))} ranks."


TABLE = Table(
    "third_party_optimizers",
    {heading: told(heading) for heading in ("as they are", "by `on_shards`", "", "classes")},
    lambda lines, _: last_of_each(lines, lambda line: (line["optimizer"], line["ranks"])),
    _note,
    machine=False,
    shown=outcomes,
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Optimizers of pytorch_optimizer. See the top of the file.")
    parser.add_argument("--only", help="names of load_optimizer, with commas between them")
    parser.add_argument("--ranks", default="2,3")
    add_output_options(parser, quick="append nothing to the results")
    parser.set_defaults(device="cpu", threads=1)
    args = parser.parse_args()
    import pytorch_optimizer

    args.names = args.only.split(",") if args.only else pytorch_optimizer.get_supported_optimizers()
    complete_output(args, "third_party_optimizers", parser.error)
    wrong = []
    card = environment_card(torch.device("cpu"), args.command)
    for ranks in map(int, args.ranks.split(",")):
        for row in launch(work, args, ranks):
            known = row.get("on_shards", {}).get("off")
            wrong += [row["optimizer"]] if known is not None and not known <= CLOSE else []
            line = {"case": row["optimizer"], "ranks": ranks, "package": f"{PACKAGE} {version(PACKAGE)}", **row}
            append_line(args.output, result_line(card, benchmark="third_party_optimizers", **line))
    print(f"wrong by on_shards: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
