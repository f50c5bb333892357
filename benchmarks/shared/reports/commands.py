"""Recorded commands as they are typed today: a script that they name may have moved since."""

import functools
import re
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2]
_SCRIPT = re.compile(r"(?<!\S)(?:\.{1,2}/)*((?:[\w-]+/)*)([\w-]+\.py)(?!\S)")  # its folder, its name


@functools.cache
def _places(benchmarks: Path) -> dict[str, list[str]]:
    """Of each name the scripts that have it; in shared/ lies none."""
    found: dict[str, list[str]] = {}
    for file in sorted(benchmarks.rglob("*.py")):
        place = file.relative_to(benchmarks)
        if place.parts[0] != "shared":
            found.setdefault(file.name, []).append(f"benchmarks/{place}")
    return found


def today(command: str, benchmarks: Path = BENCHMARKS) -> str:
    """A command in which scripts of benchmarks/ are named by where they lie now, from the root of the project; in the
    command they may be named from there, from benchmarks/ or from their own folder. What no script is called, or more
    than one, stays as it is."""

    def place(found: re.Match[str]) -> str:
        folder, name = found.groups()
        places = _places(benchmarks).get(name, [])
        named = folder == "" or folder.startswith("benchmarks/") or [f"benchmarks/{folder}{name}"] == places
        return places[0] if named and len(places) == 1 else found[0]

    return _SCRIPT.sub(place, command)
