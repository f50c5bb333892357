"""Trains a small model with every optimizer of pytorch_optimizer, as it is and by `on_shards`, and compares.

    pip install pytorch_optimizer
    python benchmarks/compatibility/third_party_optimizers.py            # all, on 2 and 3 ranks; some minutes
    python benchmarks/compatibility/third_party_optimizers.py --only lion,lamb --ranks 2 --quick
    python benchmarks/compatibility/third_party_optimizers.py --page     # run nothing: write the table

Five steps in float64 of a model with layers of every kind, whose sizes do not divide, against the plain model in one
process. A run is right where no parameter is off by more than 1e-4 of the way that it went. One JSON line for each
optimizer and number of ranks is appended to results/MACHINE/third_party_optimizers.jsonl, unless --quick; the table of
docs/optimizers.md shows the last of each (--page). Exit status 1 if a run by `on_shards` is wrong.
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

from shared.card import (
    RESULTS,
    append_line,
    command_line,
    environment_card,
    machine_name,
    refusal_to_write,
    result_line,
)
from shared.launch import Place, launch

from compatibility.third_party_table import CLOSE, page

PACKAGE = "pytorch_optimizer"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Optimizers of pytorch_optimizer. See the top of the file.")
    parser.add_argument("--only", help="names of load_optimizer, with commas between them")
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--quick", action="store_true", help="append nothing to the results")
    parser.add_argument("--page", action="store_true", help="run nothing: write the table of docs/optimizers.md")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(PAGE.read_text(), RESULTS))
        return 0
    import pytorch_optimizer

    args.names = args.only.split(",") if args.only else pytorch_optimizer.get_supported_optimizers()
    args.device, args.threads, command = "cpu", 1, command_line()
    path = RESULTS / machine_name(torch.device("cpu")) / "third_party_optimizers.jsonl"
    if not args.quick and (refusal := refusal_to_write(path)) is not None:
        parser.error(refusal)
    wrong = []
    card = environment_card(torch.device("cpu"), command)
    for ranks in map(int, args.ranks.split(",")):
        for row in launch(work, args, ranks):
            known = row.get("on_shards", {}).get("off")
            wrong += [row["optimizer"]] if known is not None and not known <= CLOSE else []
            if not args.quick:
                line = {"package": f"{PACKAGE} {version(PACKAGE)}", **row}
                append_line(
                    path,
                    result_line(card, benchmark="third_party_optimizers", case=row["optimizer"], ranks=ranks, **line),
                )
    print(f"wrong by on_shards: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
