"""Whom errors of the fault matrix name: see rtp_ext/ring/links/failure_report.py, which words them."""

from __future__ import annotations

import re

WHO = re.compile(r"(?:who failed: global ranks?|the first error was that of global rank) (\d+(?:, \d+)*)")


def names(text: str) -> set[int]:
    """The global ranks of which an error says that they failed."""
    found = WHO.search(text)
    return {int(rank) for rank in found[1].split(", ")} if found else set()


def wrong_names(fault: str, lost: set[int], text: str) -> str | None:
    """What is wrong with whom an error names: it has to name a rank that was lost, and no other. Of a connection that
    broke both ends may be meant."""
    named = names(text)
    link = fault == "lost socket" and named >= lost and len(named) == 2
    return None if link or (named and named <= lost) else f"expected {sorted(lost)} to be named, got {sorted(named)}"
