"""Tables of pages that are of one run: which lines of the results, in which columns, with what below the command."""

from collections.abc import Callable
from typing import Any

from shared.card import last_command
from shared.reports.runs.calls_report import CALLS, calls_note
from shared.reports.runs.forwards_report import FORWARDS, forwards_note, last_forwards
from shared.reports.runs.growth_report import GROWTH, growth_note, growth_rows
from shared.reports.runs.muon_report import MUON, last_muon_runs, muon_note
from shared.reports.runs.outer_report import OUTER, last_outer_run, outer_note
from shared.reports.runs.overheads_report import OVERHEADS, overheads_note
from shared.reports.runs.where_report import WHERE, last_where, where_note

Row = dict[str, Any]

# By the TABLE of a marker; `rows` gets the lines and the WORDS, and returns none where there is no such run.
OF_A_RUN: dict[str, tuple[Callable[..., list[Row]], dict[str, Callable[[Row], str | None]], Callable[..., str]]] = {
    "outer": (last_outer_run, OUTER, outer_note),
    "muon": (last_muon_runs, MUON, muon_note),
    "forwards": (last_forwards, FORWARDS, forwards_note),
    "growth": (growth_rows, GROWTH, growth_note),
    "where": (last_where, WHERE, where_note),
    "calls": (lambda lines, _: last_command(lines), CALLS, calls_note),
    "overheads": (lambda lines, _: last_command(lines), OVERHEADS, overheads_note),
}
