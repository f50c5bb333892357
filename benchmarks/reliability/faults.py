"""Plants faults at every place of a training step and judges what the other ranks say of them.

    python benchmarks/reliability/faults.py                                    # the whole matrix: an hour and more
    python benchmarks/reliability/faults.py --ranks 2 --faults kill,exception  # a part of it
    make faults                                                                # and the tables of docs/reliability.md

A cell is a fault at a place on a kind of ring: see `FAULTS`, `PLACES`, `TRANSPORTS`; impossible combinations are
listed with the reason. In every cell small ranks train, one of them (rank 1) has the fault in the fourth step, and

    where it is lost   every other rank ends with an error that names the operation, the hop and the rank that was lost,
                       and no other, within the timeout and a second
    where it is not    all go on, and the losses are those of one process, to 1e-9
    always             no process, no shared memory and no descriptor is left

Results are appended to benchmarks/results/MACHINE/faults.jsonl; the table has the last line of each cell. Lost hosts
need root: shared/hosts.py. Exit status 1 where a cell fails. The tables of sanitize.py, soak.py and recovery.py, on the
same page, are here too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import add_output_options, append_line, complete_output, environment_card
from shared.hosts import Hosts, Links, refusal
from shared.table import Row, Table, last_of_each, number, read_lines, today, told

from reliability.fault_ranks import FAULT_STEP, VICTIM, Cell, entry, reference

LOST = ("kill", "stop", "stop for good", "exception", "wrong shape", "out of memory", "lost socket", "lost host")
NAMED = (*LOST, "full shared memory")  # errors must name the rank that had the fault
HARMFUL = (*NAMED, "skipped layer")  # no rank can continue
FAULTS = (*HARMFUL, "exception on all", "NaN", "late rank")
PLACES = ("forward", "backward", "prefetch", "between steps", "optimizer", "outer reduction", "save")
TRANSPORTS = ("shm", "c10d", "tcp", "two-level")
RANKS = (2, 3, 4)
SLACK = 1.0  # seconds that a rank may take beyond the timeout
START = 120.0  # seconds until the fault
STARTS = 3  # of a cell whose ranks fail before the fault: they had to wait for a processor longer than their timeout
NOT_REACHED = "the fault was not reached"
WHO = re.compile(r"(?:who failed: global ranks?|the first error was that of global rank) (\d+(?:, \d+)*)")

# Where a fault can be: everywhere unless it is here.
WHERE = {
    "NaN": ("forward", "backward"),
    "wrong shape": ("forward", "backward"),
    "skipped layer": ("forward",),
    "full shared memory": ("forward", "backward"),
    "out of memory": ("forward", "backward"),
    "lost host": ("forward", "backward", "between steps", "save"),
    "exception on all": ("forward", "backward", "between steps", "optimizer"),
}
WHY = {
    "NaN": "the place passes no value to other ranks",
    "wrong shape": "the place takes no tensor of the caller",
    "skipped layer": "only forwards call layers",
    "full shared memory": "only passes allocate slots",
    "out of memory": "the place allocates no large memory",
    "lost host": "a host fails at a time, not at a line of code: three times are enough",
    "exception on all": "an exception of the caller there interrupts a collective of torch, or a running hop",
}


def nonsense(cell: Cell) -> str | None:
    """Why a cell makes no sense; None: it does."""
    if cell.place not in WHERE.get(cell.fault, PLACES):
        return WHY[cell.fault]
    if cell.transport == "two-level" and cell.ranks != 4:
        return "two hosts of two ranks are the smallest"
    if cell.fault == "full shared memory" and cell.transport in ("c10d", "tcp"):
        return "it takes no shared memory"
    if cell.fault == "lost socket" and cell.transport == "shm" and cell.place not in ("outer reduction", "save"):
        return "its hops take no socket"
    if cell.fault == "lost host" and cell.transport == "shm":
        return "it has one host"
    if cell.place == "outer reduction" and cell.transport == "two-level":
        return "eight ranks are more than this machine has room for"
    return None


def judges_names(fault: str, place: str) -> bool:
    """Whether errors have to name the rank: those of torch's own collectives, which save, cannot."""
    return fault in NAMED and place != "save"


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    wanted = itertools.product(args.faults, args.places, args.transports, args.ranks)
    for fault, place, transport, ranks in wanted:
        yield Cell(fault, place, transport, ranks, args.timeout, args.pause)


# -- running one -------------------------------------------------------------------------------------------------------


def run(cell: Cell) -> dict[str, Any]:
    """Runs a cell and judges it."""
    with tempfile.TemporaryDirectory(prefix="rtp_faults_") as name:
        folder = Path(name)
        started = time.monotonic()
        ended = _on_hosts(cell, folder) if cell.fault == "lost host" else _here(cell, folder)
        reports = {
            rank: json.loads(file.read_text())
            for rank in range(cell.processes)
            if (file := folder / f"rank{rank}.json").exists()
        }
        times = [float(file.read_text()) for file in folder.glob("fault*") if file.read_text()]
        notes = {rank: (folder / f"stderr{rank}").read_text()[-1500:] for rank in range(cell.processes)
                 if (folder / f"stderr{rank}").exists()}  # fmt: skip
    problems, seconds, text = judge(cell, reports, min(times, default=None), ended)
    row = {"benchmark": "faults", **dataclasses.asdict(cell), "verdict": "fail" if problems else "pass"}
    row |= {
        "seconds": seconds,
        "problems": problems,
        "message": _without_folders(text),
        **({"named": not problems} if judges_names(cell.fault, cell.place) else {}),
        "took": time.monotonic() - started,
    }
    if problems:
        notes |= {f"trace{rank}": each.get("trace", "")[-600:] for rank, each in reports.items()}
        row["notes"] = {key: _without_folders(note) for key, note in notes.items()}
    return row


def _without_folders(text: str) -> str:
    """Returns a trace, or its end, with file names relative to the package."""
    return re.sub(r"[^\s\"]*/(?=(rtp_ext|torch|benchmarks|lib)/)", "", text)


def _here(cell: Cell, folder: Path) -> dict[str, Any]:
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=entry, args=(rank, cell, folder), name=f"rank {rank}") for rank in range(cell.processes)
    ]
    for process in processes:
        process.start()
    pids = [process.pid or 0 for process in processes]
    deadline = time.monotonic() + START
    mark = folder / f"fault{VICTIM}"
    while not mark.exists() and time.monotonic() < deadline and any(each.is_alive() for each in processes):
        time.sleep(0.01)
    hanging = []
    if mark.exists():
        if cell.fault == "stop":
            time.sleep(cell.pause)
            os.kill(pids[VICTIM], signal.SIGCONT)
        others = [each for rank, each in enumerate(processes) if cell.fault != "stop for good" or rank != VICTIM]
        deadline = time.monotonic() + 4 * cell.timeout + 20
        for process in others:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, each in enumerate(processes) if each in others and each.is_alive()]
    for rank in hanging:
        os.kill(pids[rank], signal.SIGUSR2)  # writes its stack
    time.sleep(0.5 if hanging else 0.0)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    left = [f"process {pid}" for pid in _members(pids)]
    left += [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]
    return {"hanging": hanging, "left": left}


def _members(groups: list[int]) -> list[int]:
    """Processes of the process groups that the ranks led."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) in groups and fields[0] != "Z":
            found.append(int(file.parent.name))
    return found


def _on_hosts(cell: Cell, folder: Path) -> dict[str, Any]:
    """Runs a cell on two hosts, or three for three ranks, and ends the victim's host."""
    per_host = 2 if cell.ranks == 4 else 1
    (folder / "cell").write_text(json.dumps(dataclasses.asdict(cell)))
    place = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])}
    with Hosts(Links(cell.ranks // per_host, per_host, pin=False)) as hosts:
        started = hosts.start_ranks(["-m", "reliability.fault_ranks", str(folder)], place)
        mark, deadline = folder / f"fault{VICTIM}", time.monotonic() + START
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        lost = VICTIM // per_host
        at = time.monotonic()
        hosts.kill(lost)
        mark.write_text(str(at))
        survivors = [rank for rank in range(cell.ranks) if rank // per_host != lost]
        deadline = time.monotonic() + 4 * cell.timeout + 20
        hanging = []
        for rank in survivors:
            try:
                started[rank].wait(max(0.1, deadline - time.monotonic()))
            except Exception:
                hanging.append(rank)
    return {"hanging": hanging, "left": [], "survivors": survivors}


# -- judging -----------------------------------------------------------------------------------------------------------


def judge(
    cell: Cell, reports: dict[int, dict[str, Any]], fault: float | None, ended: dict[str, Any]
) -> tuple[list[str], float | None, str]:
    """Returns what is wrong, the seconds from the fault to the last rank's error, and the message of one rank."""
    problems = [f"rank {rank} hung" for rank in ended["hanging"]] + [f"left: {each}" for each in ended["left"]]
    if fault is None:
        return [*problems, NOT_REACHED], None, ""
    others = ended.get("survivors", [rank for rank in range(cell.processes) if rank != VICTIM])
    if cell.fault in HARMFUL:
        more, seconds, text = _judge_errors(cell, reports, fault, others)
    else:
        more, seconds, text = _judge_numbers(cell, reports)
    for rank in others:
        if reports.get(rank, {}).get("descriptors", 0) > 0:
            more.append(f"rank {rank} has {reports[rank]['descriptors']} descriptors more")
    return problems + more, seconds, text


def _judge_errors(
    cell: Cell, reports: dict[int, dict[str, Any]], fault: float, others: list[int]
) -> tuple[list[str], float | None, str]:
    problems, latest, text, lost = [], 0.0, "", {*range(cell.processes)} - {*others}
    for rank in others:
        each = reports.get(rank, {})
        if each.get("ended") != "error":
            problems.append(f"rank {rank}: expected an error, got {each.get('ended', 'nothing')}")
            continue
        seconds = each["at"] - fault
        latest, text = max(latest, seconds), text or each["text"]
        if seconds > cell.timeout + SLACK:
            problems.append(f"rank {rank}: {seconds:.1f} s, expected {cell.timeout + SLACK}")
        if cell.place != "save" and not re.search(r"\w+ (forward|backward)|exchange|all_|replicas", each["text"]):
            problems.append(f"rank {rank}: no operation in {each['text'][:200]!r}")
        named = judges_names(cell.fault, cell.place)
        if named and not re.search(r"hop \d", each["text"]):
            problems.append(f"rank {rank}: no hop in {each['text'][:200]!r}")
        if named and (wrong := wrong_names(cell.fault, lost, each["text"])):
            problems.append(f"rank {rank}: {wrong} in {each['text'][-300:]!r}")
        if cell.place != "save" and each["kind"] not in ("RingTimeout", "RotationError"):
            problems.append(f"rank {rank}: {each['kind']}: {each['text'][:200]!r}")
    if cell.fault == "stop":  # it comes back, and hears of it
        back = reports.get(VICTIM, {})
        if back.get("ended") != "error" or back["at"] - fault > cell.pause + cell.timeout + SLACK:
            problems.append(f"rank {VICTIM} came back: expected an error, got {back.get('ended', 'nothing')}")
    return problems, round(latest, 3), re.sub(r"; what (it|this rank) did last[^;]*", "", text)[:600]


def _judge_numbers(cell: Cell, reports: dict[int, dict[str, Any]]) -> tuple[list[str], float | None, str]:
    left_out = FAULT_STEP if cell.fault != "late rank" else None
    expected = reference(cell.processes, left_out)
    problems = []
    found = [reports.get(rank, {}) for rank in range(cell.processes)]
    for rank, each in enumerate(found):
        if each.get("ended") != "done":
            problems.append(f"rank {rank}: expected to go on, got {each.get('kind')}: {each.get('text', '')[:200]}")
        elif each.get("left out") != left_out:
            problems.append(f"rank {rank}: expected to leave out step {left_out}, got {each.get('left out')}")
    if not problems:
        means = [sum(losses) / len(found) for losses in zip(*(each["losses"] for each in found), strict=True)]
        apart = max(abs(a - b) for a, b in zip(means, expected, strict=True))
        if apart > 1e-9:
            problems.append(f"losses are {apart:.3g} from those of one process")
    return problems, None, ""


# -- the ranks that errors name; rtp_ext/ring/links/failure_report.py writes these errors ------------------------------


def names(text: str) -> set[int]:
    """Returns the global ranks that an error reports as failed."""
    found = WHO.search(text)
    return {int(rank) for rank in found[1].split(", ")} if found else set()


def wrong_names(fault: str, lost: set[int], text: str) -> str | None:
    """Returns what is wrong with the ranks that an error names: it has to name a lost rank and no other. An error about
    a broken connection may name both ends."""
    named = names(text)
    link = fault == "lost socket" and named >= lost and len(named) == 2
    return None if link or (named and named <= lost) else f"expected {sorted(lost)} to be named, got {sorted(named)}"


# -- the tables of docs/reliability.md ---------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """Counts the cells that passed among those that ran, by their last lines, with the time of the slowest rank."""
    last = {(row["fault"], row["place"], row["transport"], row["ranks"]): row for row in rows}
    lines = ["| fault | " + " | ".join(PLACES) + " |", "|---" * (len(PLACES) + 1) + "|"]
    for fault in FAULTS:
        texts = []
        for place in PLACES:
            here = [row for key, row in last.items() if key[:2] == (fault, place)]
            ran = [row for row in here if row["verdict"] != "no sense"]
            if not ran:
                texts.append("-" if here else "not run")
                continue
            slowest = max((row["seconds"] or 0.0 for row in ran), default=0.0)
            good = sum(row["verdict"] == "pass" for row in ran)
            texts.append(f"{good}/{len(ran)}" + (f", {slowest:.1f} s" if slowest else ""))
        lines.append(f"| {fault} | " + " | ".join(texts) + " |")
    ran = [row for row in last.values() if row["verdict"] != "no sense"]
    good = sum(row["verdict"] == "pass" for row in ran)
    possible = [cell for cell in _every() if nonsense(cell) is None]
    head = f"{good} of {len(ran)} cells that have run passed. "
    head += f"Of {len(_every())} combinations {len(possible)} are possible.\n"
    one_rank = [row for row in ran if judges_names(row["fault"], row["place"])]
    judged = [row for row in one_rank if "named" in row]
    again = sum(row.get("starts", 1) > 1 for row in ran)
    head += f"In {sum(row['named'] for row in judged)} of {len(judged)} cells judged, of {len(one_rank)} in training "
    head += "with a fault of one rank,\nthe error of every survivor names that rank, its own operation and the hop.\n"
    head += f"{again or 'None'} of the cells needed a second start because its ranks waited too long for a processor."
    for row in ran:
        if row["verdict"] == "fail":
            cell = f"{row['fault']} in {row['place']}, {row['transport']}, R = {row['ranks']}"
            lines += ["", f"Failed: {cell}: {row['problems'][0][:160].replace('|', '/')}"]
    return "\n".join([head, "", *lines, "", "Combinations that are left out:", "", reasons(), ""])


def _every() -> list[Cell]:
    return [Cell(*each) for each in itertools.product(FAULTS, PLACES, TRANSPORTS, RANKS)]


def reasons() -> str:
    """Lists the combinations that are left out, with the reasons."""
    found: dict[str, set[str]] = {}
    for cell in _every():
        if why := nonsense(cell):
            what = cell.fault if why in WHY.values() or "it" in why.split()[0] else cell.transport
            found.setdefault(why, set()).add(what)
    return "\n".join(f"- {', '.join(sorted(what))}: {why}." for why, what in sorted(found.items()))


class _Matrix(Table):
    def page(self, rows: list[Row]) -> str:
        return table(rows)


def _tests(row: Row) -> set[str]:
    """The files that a command names; none where it takes all."""
    return {word for word in row["command"].split() if word.endswith(".py") and "/test_" in word}


def _under_sanitizers(lines: list[Row], _: list[str]) -> list[Row]:
    """Returns the last runs of each build: those with tests that no later run repeated."""
    rows: list[Row] = []
    for row in last_of_each(lines, lambda row: (row["sanitizers"], row["date"])):
        again = _tests(row)
        replaced = [
            other
            for other in rows
            if other["sanitizers"] == row["sanitizers"] and (not again or (_tests(other) and _tests(other) <= again))
        ]
        rows = [other for other in rows if other not in replaced] + [row]
    return sorted(rows, key=lambda row: (row["sanitizers"], row["date"]))


def _grown(key: str, unit: int = 1) -> Callable[[Row], str]:
    """Of the rank that grew most."""

    def cell(row: Row) -> str:
        most = max((each[key] for each in row["added"]), default=0)
        return "-" if not row["steps"] else str(most) if unit == 1 else f"{most / unit:.1f}"

    return cell


_minutes = number("seconds", 0, 60)
TABLES = {
    "faults": _Matrix("faults", {}),
    "sanitize": Table(
        "sanitize",
        {
            "sanitizers": told("sanitizers"),
            "files": lambda row: (
                ", ".join(sorted(Path(test).stem.removeprefix("test_") for test in _tests(row))) or "all"
            ),
            **{key: told(key) for key in ("tests", "skipped", "failed", "reports")},
            "minutes": _minutes,
        },
        _under_sanitizers,
        lambda rows: ".",
        machine=False,
    ),
    "soak": Table(
        "soak",
        {
            **{key: told(key) for key in ("programs", "actions", "failed")},
            "steps with delays": told("steps"),
            "memory added, MiB": _grown("resident_kib", 1024),
            "descriptors": _grown("descriptors"),
            "threads": _grown("threads"),
            "minutes": _minutes,
        },
        lambda lines, _: last_of_each(lines, lambda row: today(row["command"])),
        lambda rows: ". The growth columns are of the rank that grew most, from a fifth of the steps on.",
        machine=False,
    ),
    "recovery": Table(
        "recovery",
        {
            **{key: told(key) for key in ("ranks", "steps", "lives")},
            "effective time": number("effective_time", 2),
            "loss differs by": number("loss_difference", ".0e"),
            "then with ranks": told("fewer_ranks"),
            "loss differs by ": number("fewer_loss_difference", ".0e"),
        },
        lambda lines, _: lines[-1:],
        lambda rows: ". Effective time: share of the time spent on steps that were not lost.",
        machine=False,
    ),
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A matrix of faults. See the top of the file.")
    for name, every in (("faults", FAULTS), ("places", PLACES), ("transports", TRANSPORTS), ("ranks", RANKS)):
        parser.add_argument(f"--{name}", default=",".join(map(str, every)), help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=2.0, help="of the rings, in seconds; default: %(default)s")
    parser.add_argument("--pause", type=float, default=10.0, help="of a rank that stops; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell later than this")
    parser.add_argument("--missing", action="store_true", help="only cells that the results do not have as passed")
    add_output_options(parser)
    args = parser.parse_args(argv)
    complete_output(args, "faults", parser.error)
    for name, every in (("faults", FAULTS), ("places", PLACES), ("transports", TRANSPORTS), ("ranks", RANKS)):
        known = {str(each): each for each in every}
        wanted = getattr(args, name).split(",")
        if unknown := [each for each in wanted if each not in known]:
            parser.error(f"argument --{name}: expected some of {', '.join(known)}, got {unknown[0]}")
        setattr(args, name, [known[each] for each in wanted])
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    card = environment_card(torch.device("cpu"), args.command)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["reliability.fault_ranks", "torch._dynamo"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    known = [row for row in (read_lines(args.output) if args.missing else ()) if row["verdict"] != "fail"
             and ({"named", "reason"} & row.keys() or not judges_names(row["fault"], row["place"]))]  # fmt: skip
    passed = {(row["fault"], row["place"], row["transport"], row["ranks"]) for row in known}
    no_hosts, end, failed, ran = refusal(), time.monotonic() + 60 * args.minutes, 0, 0

    def one(cell: Cell) -> dict[str, Any] | None:
        if why := nonsense(cell):
            return {"benchmark": "faults", **dataclasses.asdict(cell), "verdict": "no sense", "reason": why}
        if time.monotonic() > end or (cell.fault == "lost host" and no_hosts is not None):
            return None
        for start in range(1, STARTS + 1):
            row = run(cell) | {"starts": start}
            if NOT_REACHED not in row["problems"]:
                break
        return row

    wanted = [c for c in cells(args) if (c.fault, c.place, c.transport, c.ranks) not in passed]
    with ThreadPoolExecutor(args.jobs) as pool:
        for cell, row in zip(wanted, pool.map(one, wanted), strict=True):
            if row is None:
                continue
            append_line(args.output, {**row, **card})
            if row["verdict"] != "no sense":
                ran += 1
                failed += row["verdict"] == "fail"
                after = f"{row['seconds']} s after the fault" if row["seconds"] else "went on"
                print(f"{row['verdict']}  {cell.name}: {after}", *row["problems"], sep="\n      ", flush=True)
    print(f"{ran - failed} of {ran} cells passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
