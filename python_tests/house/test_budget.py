"""Lines of code by folder. A change that needs more raises the budget of its folder here, in the same commit."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".sh", ".h", ".cpp", ".cu", ".cuh"}
SLACK = 60  # lines that a budget may exceed its folder by: code that goes takes its budget along

BUDGET = {
    "csrc/base": 1011,
    "csrc/compute": 2531,
    "csrc/device": 1266,
    "csrc/engine": 4285,
    "csrc/kernels": 1757,
    "csrc/ops": 2828,
    "csrc/python": 1529,
    "csrc/schedule": 2258,
    "csrc/transport": 5902,
    "rtp_ext/convert": 7558,
    "rtp_ext/families": 1178,
    "rtp_ext/functional": 4115,
    "rtp_ext/inference": 966,
    "rtp_ext/integrations": 729,
    "rtp_ext/measure": 1053,
    "rtp_ext/nn": 1855,
    "rtp_ext/observe": 2014,
    "rtp_ext/optim": 1634,
    "rtp_ext/outer": 3645,
    "rtp_ext/parameters": 2549,
    "rtp_ext/planner": 9422,
    "rtp_ext/ring": 5836,
    "python_tests/convert": 8463,
    "python_tests/engine": 3240,
    "python_tests/examples": 750,
    "python_tests/families": 2962,
    "python_tests/functional": 3683,
    "python_tests/gpu": 2018,
    "python_tests/hosts": 429,
    "python_tests/house": 2030,
    "python_tests/inference": 2588,
    "python_tests/integrations": 796,
    "python_tests/kernels": 3089,
    "python_tests/measure": 2219,
    "python_tests/meshes": 3196,
    "python_tests/nn": 2007,
    "python_tests/observe": 1573,
    "python_tests/optim": 1409,
    "python_tests/optimizers": 651,
    "python_tests/outer": 4134,
    "python_tests/parameters": 2368,
    "python_tests/planner": 4380,
    "python_tests/ring": 4140,
    "python_tests/schedule": 2589,
    "python_tests/simulators": 5627,
    "python_tests/support": 4567,
    "python_tests/transport": 3188,
    "benchmarks/compatibility": 1731,
    "benchmarks/gpu": 2808,
    "benchmarks/growth": 293,
    "benchmarks/overheads": 176,
    "benchmarks/planner": 2007,
    "benchmarks/reliability": 1685,
    "benchmarks/shared": 4040,
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
