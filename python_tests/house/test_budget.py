"""Lines of code by folder. A change that needs more raises the budget of its folder here, in the same commit."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".sh", ".h", ".cpp", ".cu", ".cuh"}
SLACK = 60  # lines that a budget may exceed its folder by: code that goes takes its budget along

BUDGET = {
    "csrc/base": 800,
    "csrc/compute": 1700,
    "csrc/device": 1170,
    "csrc/engine": 3500,
    "csrc/kernels": 1330,
    "csrc/ops": 1970,
    "csrc/python": 1390,
    "csrc/schedule": 1810,
    "csrc/transport": 5570,
    "rtp_ext/convert": 6900,
    "rtp_ext/families": 1010,
    "rtp_ext/functional": 3210,
    "rtp_ext/inference": 970,
    "rtp_ext/integrations": 740,
    "rtp_ext/measure": 1070,
    "rtp_ext/nn": 1740,
    "rtp_ext/observe": 1980,
    "rtp_ext/optim": 1650,
    "rtp_ext/outer": 3650,
    "rtp_ext/parameters": 2410,
    "rtp_ext/planner": 7860,
    "rtp_ext/ring": 5240,
    "python_tests/convert": 6730,
    "python_tests/engine": 2750,
    "python_tests/examples": 740,
    "python_tests/families": 2990,
    "python_tests/functional": 1990,
    "python_tests/gpu": 1860,
    "python_tests/hosts": 440,
    "python_tests/house": 2010,
    "python_tests/inference": 2360,
    "python_tests/integrations": 770,
    "python_tests/kernels": 2120,
    "python_tests/measure": 2180,
    "python_tests/meshes": 1770,
    "python_tests/nn": 2000,
    "python_tests/observe": 1540,
    "python_tests/optim": 1420,
    "python_tests/optimizers": 660,
    "python_tests/outer": 4150,
    "python_tests/parameters": 2380,
    "python_tests/planner": 3450,
    "python_tests/ring": 3820,
    "python_tests/schedule": 2290,
    "python_tests/simulators": 5380,
    "python_tests/support": 4260,
    "python_tests/transport": 3070,
    "benchmarks/compatibility": 1750,
    "benchmarks/gpu": 2350,
    "benchmarks/growth": 310,
    "benchmarks/overheads": 190,
    "benchmarks/planner": 1760,
    "benchmarks/reliability": 1700,
    "benchmarks/shared": 3990,
}


def lines_of(folder: Path) -> int:
    """Lines of the code in a folder and below."""
    files = (file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    return sum(file.read_text().count("\n") for file in files)


def folders(top: str) -> list[str]:
    return sorted(
        f"{top}/{each.name}"
        for each in (ROOT / top).iterdir()
        if each.is_dir() and any(file.suffix in SUFFIXES for file in each.rglob("*"))
    )


def outside_budget(counted: dict[str, int], budget: dict[str, int]) -> list[str]:
    wrong = [f"{name}: no budget" for name in counted.keys() - budget.keys()]
    wrong += [f"{name}: no such folder" for name in budget.keys() - counted.keys()]
    for name in counted.keys() & budget.keys():
        over = counted[name] - budget[name]
        if over > 0:
            wrong.append(f"{name}: {counted[name]} lines, {over} above its budget")
        if over < -SLACK:
            wrong.append(f"{name}: {counted[name]} lines, lower its budget of {budget[name]}")
    return sorted(wrong)


def test_folders_stay_within_their_budgets():
    counted = {
        name: lines_of(ROOT / name)
        for top in ("csrc", "rtp_ext", "python_tests", "benchmarks")
        for name in folders(top)
    }
    assert counted["rtp_ext/ring"] > 1000 and outside_budget(counted, BUDGET) == []


def test_what_is_outside_is_found():
    counted = {"a": 110, "b": 100, "c": 100 - SLACK - 1, "d": 1}
    budget = {"a": 100, "b": 100, "c": 100, "e": 5}
    assert outside_budget(counted, budget) == [
        "a: 110 lines, 10 above its budget",
        f"c: {100 - SLACK - 1} lines, lower its budget of 100",
        "d: no budget",
        "e: no such folder",
    ]
