"""Checks the ranks that errors of the fault matrix name; rtp_ext/ring/links/failure_report.py writes these errors."""

from __future__ import annotations

import re

WHO = re.compile(r"(?:who failed: global ranks?|the first error was that of global rank) (\d+(?:, \d+)*)")


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
