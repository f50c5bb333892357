"""Recorded commands as they are typed today: a script that they name may have moved since."""

import functools
import re
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2]
_SCRIPT = re.compile(r"(?<!\S)(?:\.{1,2}/)*((?:[\w-]+/)*)([\w-]+\.py)(?!\S)")  # its folder, its name


@functools.cache
def _places(benchmarks: Path) -> dict[str, list[str]]:
    """Returns the scripts of each name; shared/ contains no scripts."""
    found: dict[str, list[str]] = {}
    for file in sorted(benchmarks.rglob("*.py")):
        place = file.relative_to(benchmarks)
        if place.parts[0] != "shared":
            found.setdefault(file.name, []).append(f"benchmarks/{place}")
    return found


def today(command: str, benchmarks: Path = BENCHMARKS) -> str:
    """Rewrites the scripts of a command to their current paths from the root of the project. The command may name them
    relative to the root, to benchmarks/ or to their own folder. Names of no script, or of several, are not changed."""

    def place(found: re.Match[str]) -> str:
        folder, name = found.groups()
        places = _places(benchmarks).get(name, [])
        named = folder == "" or folder.startswith("benchmarks/") or [f"benchmarks/{folder}{name}"] == places
        return places[0] if named and len(places) == 1 else found[0]

    return _SCRIPT.sub(place, command)
