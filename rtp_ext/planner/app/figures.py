"""Figures of the page as HTML: bars, tables, timelines. Sizes are shares of a figure's width; text is text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dash import html

from rtp_ext.observe.timeline import Event
from rtp_ext.planner.app.view import Found, Pass, Row, View
from rtp_ext.planner.display.text import GB
from rtp_ext.planner.memory.report import COMPONENTS, OUTSIDE_THE_ALLOCATOR
from rtp_ext.planner.plans.when import Cell
from rtp_ext.planner.time.report import TIME_COMPONENTS

_GROUPS = ("compute", "exposed communication", "bubble")
_SHORTEST = 1e-4  # share of a step below which the CLI leaves a component out, too
_FIRST, _LAST = 0.4, 0.85  # shares before and after which a label does not fit to the left and right of its line
_BADGES = {"fits": "good", "tight": "close", "out of memory": "bad"}
_FINER = ("compute", "exposed", "bubble", "of the line")  # columns that a telephone leaves out
_LANES = {
    "compute": "computes",
    "side": "computes, second stream",
    "weight": "hops of weights",
    "gradient": "hops of gradients",
    "outer weight": "weights between nodes",
    "outer gradient": "gradients between nodes",
}
_KINDS = {
    "forward": "product of forward",
    "dgrad": "gradient of the input",
    "wgrad": "gradient of the weight",
    "copy": "copy",
    "add": "addition",
    "weight": "hop of a weight",
    "gradient": "hop of a gradient",
    "outer weight": "hop of a weight between nodes",
    "outer gradient": "hop of a gradient between nodes",
}


def cards(view: View) -> html.Div:
    """One card for each plan: memory against the line, time of a step, verdict."""
    return html.Div([_card(row) for row in view.rows], className="cards", id="cards")


def _card(row: Row) -> html.Div:
    held, limit = row.memory.peak_allocated_bytes, row.memory.limit_bytes
    badge = html.Span(row.memory.verdict, className=f"badge {_BADGES[row.memory.verdict]}")
    numbers = [
        _number("Memory", f"{held / GB:.1f}", f"/ {limit / GB:.1f} GB", held, "bytes"),
        _number("Step", f"{row.time.step_seconds:.4g}", "s", row.time.step_seconds, "seconds"),
        _number("Each GPU", f"{row.time.tokens_per_second_per_gpu:,.0f}", "tokens/s"),
    ]
    return html.Div(
        [
            html.Div([html.H3(row.title), badge], className="head"),
            html.Div(numbers, className="numbers"),
            html.Code(row.own, title=row.name),
        ],
        className=f"card{' ours' if row.strategy.rtp > 1 else ''}",
    )


def _number(what: str, value: str, unit: str, exact: float | None = None, kind: str = "") -> html.Div:
    more: dict[str, Any] = {} if exact is None else {f"data-{kind}": repr(exact), "title": f"{exact!r} {kind}"}
    return html.Div([html.Small(what), html.Span([html.Strong(value, **more), f" {unit}"])], className="number")


# -- bars --------------------------------------------------------------------------------------------------------------


def memory(view: View) -> html.Div:
    """Bars of memory by component in GB, with both lines, and the table of their numbers."""
    rows = view.rows
    top = 1.02 * max(*(sum(row.memory.components.values()) for row in rows), rows[0].memory.memory_bytes)
    first = rows[0].memory
    marks = [
        (first.limit_bytes / top, f"{100 * first.safe_fraction:.0f} %: {first.limit_bytes / GB:.4g} GB", "safe"),
        (first.memory_bytes / top, f"{first.memory_bytes / GB:.4g} GB", "full"),
    ]
    parts = [{name: row.memory.components[name] / top for name in COMPONENTS} for row in rows]
    used = [name for name in COMPONENTS if any(row.memory.components[name] for row in rows)]
    bars = _bars(rows, parts, marks, lambda row, name: f"{row.memory.components[name] / GB:.2f} GB")
    values = {name: [row.memory.components[name] / GB for row in rows] for name in used}
    total = ("allocated", [row.memory.peak_allocated_bytes / GB for row in rows])
    return html.Div([bars, _values(rows, values, total, "GB", ".2f")])


def time(view: View) -> html.Div:
    """Bars of compute, exposed communication and bubble in seconds, and the table of all components."""
    rows = view.rows
    top = 1.02 * max(row.time.step_seconds for row in rows)
    parts = [{name: row.time.groups[name] / top for name in _GROUPS} for row in rows]
    bars = _bars(rows, parts, [], lambda row, name: f"{row.time.groups[name]:.4g} s")
    values = {name: [row.time.groups[name] for row in rows] for name in _GROUPS}
    total = ("step", [row.time.step_seconds for row in rows])
    inner = {
        name: [row.time.components[name] for row in rows]
        for name in TIME_COMPONENTS
        if any(row.time.components[name] >= _SHORTEST * row.time.step_seconds for row in rows)
    }
    fine = html.Details([html.Summary("By component"), _values(rows, inner, total, "s", ".4g", swatches=False)])
    return html.Div([bars, _values(rows, values, total, "s", ".4g"), fine])


def _bars(rows: Sequence[Row], parts: Sequence[dict[str, float]], marks: Sequence[Any], text: Any) -> html.Div:
    drawn = []
    for row, shares in zip(rows, parts, strict=True):
        boxes = [
            html.Div(
                className=f"part {_class(name)}", style={"width": f"{100 * share:.4f}%"}, title=_tip(row, name, text)
            )
            for name, share in shares.items()
            if share > 0
        ]
        lines = [html.Div(className=f"mark {kind}", style={"left": f"{100 * at:.4f}%"}) for at, _, kind in marks]
        drawn += [html.Div(row.title, className="what"), html.Div([*boxes, *lines], className="bar")]
    if marks:
        (safe, *_), (full, *_) = marks
        sides = {"safe": {"right": f"{100 - 100 * safe:.4f}%"}, "full": {"left": f"{100 * full:.4f}%"}}
        if full > _LAST:
            sides["full"] = {"right": f"{100 - 100 * full:.4f}%"}
        labels = [html.Span(label, className="label", style=sides[kind]) for _, label, kind in marks]
        if safe < _FIRST:  # both to the right of the second line
            labels = [html.Span(", ".join(label for _, label, _ in marks), className="label", style=sides["full"])]
        drawn = [html.Div(className="what"), html.Div(labels, className="axis"), *drawn]
    return html.Div(drawn, className="bars")


def _tip(row: Row, name: str, text: Any) -> str:
    return f"{name.replace('_', ' ')}: {text(row, name)}"


def _class(name: str) -> str:
    return name.replace("_", "-").replace(" ", "-")


def _values(
    rows: Sequence[Row],
    values: dict[str, list[float]],
    total: tuple[str, list[float]],
    unit: str,
    form: str,
    swatches: bool = True,
) -> html.Div:
    """A table of numbers by component and plan, which is the legend of the bars as well."""
    head = html.Tr([html.Th(unit), *(html.Th(row.title) for row in rows)])
    body = []
    for name, numbers in values.items():
        swatch = [html.Span(className=f"swatch {_class(name)}")] if swatches else []
        note = " (outside the allocator)" if name == OUTSIDE_THE_ALLOCATOR else ""
        cells = [html.Td(format(number, form) if number else "-") for number in numbers]
        body.append(html.Tr([html.Th([*swatch, name.replace("_", " ") + note]), *cells]))
    sums = [html.Td(format(number, form)) for number in total[1]]
    body.append(html.Tr([html.Th(total[0]), *sums], className="total"))
    return html.Div(html.Table([html.Thead(head), html.Tbody(body)]), className="wide")


# -- search ------------------------------------------------------------------------------------------------------------


def plans(found: Found) -> Any:
    """The plans of a search, fastest first."""
    if not found.plans:
        return html.P(sentence(found.message), className="note")
    titles = ("rank", "plan, and what binds it", "step", "compute", "exposed", "bubble", "memory", "of the line")
    body: list[html.Tr] = []
    for plan in found.plans:
        seconds = [f"{value:.3g} s" for value in plan.time.groups.values()]
        share = plan.memory.peak_allocated_bytes / plan.memory.limit_bytes
        fields = [field for field in found.names[len(body)].split() if not field.startswith("fused_loss")]
        body.append(
            html.Tr(
                [
                    html.Td(f"{plan.rank}{' =' if plan.tied else ''}"),
                    html.Td([*map(html.Code, fields), html.Small(plan.binding)], className="fields"),
                    html.Td(f"{plan.step_seconds:.4g} s", **{"data-seconds": repr(plan.step_seconds)}),
                    *(html.Td(text, className="more") for text in seconds),
                    html.Td(f"{plan.memory.peak_allocated_bytes / GB:.1f} GB"),
                    html.Td(f"{100 * share:.0f} %", className="more"),
                ],
                className="ours" if plan.strategy.rtp > 1 else "",
            )
        )
    head = [html.Th(title, className="more" if title in _FINER else "") for title in titles]
    table = html.Table([html.Thead(html.Tr(head)), html.Tbody(body)])
    notes = "All fuse the vocabulary head and the loss, and have the recomputation and micro-batch that are fastest."
    if any(plan.tied for plan in found.plans):
        notes += " = : within the error of the model from others of that rank."
    unlike = f"{sentence(found.unlike)} " if found.unlike else ""
    return html.Div(
        [
            html.P(sentence(found.message)),
            html.Div(table, className="wide plans"),
            html.P(unlike + notes, className="note"),
        ]
    )


def sentence(text: str) -> str:
    """Returns a message with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""


# -- rotation ----------------------------------------------------------------------------------------------------------


def timeline(passes: Sequence[Pass]) -> html.Div:
    """The streams of one rank in both passes of one operation, on one time scale."""
    longest = max(each.seconds for each in passes)
    kinds = dict.fromkeys(kind for each in passes for kind in each.kinds)
    legend = [
        html.Span([html.Span(className=f"swatch step-{_class(kind)}"), _KINDS[kind]])
        for kind in _KINDS
        if kind in kinds
    ]
    return html.Div([*(_pass(each, longest) for each in passes), html.Div(legend, className="legend")])


def _pass(shown: Pass, longest: float) -> html.Div:
    drawn = []
    for name, text in _LANES.items():
        boxes = [
            _step(event, kind, longest)
            for event, kind in zip(shown.events, shown.kinds, strict=True)
            if event.lane == name
        ]
        if boxes:
            drawn += [html.Div(text, className="what"), html.Div(boxes, className="lane")]
    again = f", {shown.chunks} times, chunk by chunk" if shown.chunks > 1 else ""
    title = html.H4(
        [
            shown.pass_.capitalize(),
            html.Small(
                f" {1e3 * shown.seconds:.3g} ms{again}; in the step {1e3 * shown.step_seconds:.3g} ms; with a whole "
                f"weight {1e3 * shown.unsplit_seconds:.3g} ms"
            ),
        ]
    )
    return html.Div([title, html.Div(drawn, className="bars lanes")])


def _step(event: Event, kind: str, longest: float) -> html.Div:
    width = (event.end - event.start) / longest
    return html.Div(
        html.Span(_short(event.label)),
        className=f"step step-{_class(kind)}",
        style={"left": f"{100 * event.start / longest:.4f}%", "width": f"{100 * width:.4f}%"},
        title=f"{event.label}: {1e6 * event.start:.1f} to {1e6 * event.end:.1f} µs",
    )


def _short(label: str) -> str:
    """Returns the shard of a product, or the one that arrives."""
    return re.findall(r"[WG]\w*|$", label)[-2 if re.search(r"[WG]\w*", label) else -1]


# -- comparison --------------------------------------------------------------------------------------------------------


def comparison(cells: Sequence[Cell]) -> html.Div:
    """A map of the fastest family of plans, over links and tokens of a GPU."""
    tokens = list(dict.fromkeys(cell.tokens for cell in cells))
    body = []
    for link in dict.fromkeys(cell.link for cell in cells):
        row = [_cell(cell) for cell in cells if cell.link == link]
        body.append(html.Tr([html.Th(link), *row]))
    head = html.Tr([html.Th("tokens of a GPU"), *(html.Th(f"{size:,}") for size in tokens)])
    table = html.Table([html.Thead(head), html.Tbody(body)], className="map")
    note = (
        f"{cells[0].model} on {cells[0].gpus} GPUs: the fastest kind of plan, and the step time of the best plan "
        "without rotation divided by that of the best with it; above 1, rotation wins. Tie: within the error of the "
        "model."
    )
    return html.Div([html.Div(table, className="wide"), html.P(note, className="note")])


def _cell(cell: Cell) -> html.Td:
    ratio = cell.advantage
    text = "only RTP fits" if ratio == float("inf") else "RTP does not fit" if ratio == 0 else f"{ratio:.2f}"
    kind = "none" if ratio != ratio else "tie" if cell.winner == "tie" else "wins" if ratio > 1 else "loses"
    parts = [html.Strong(cell.winner)] + ([] if ratio != ratio else [html.Span(text)])
    tip = "; ".join(f"{name} {plan.step_seconds:.4g} s" for name, plan in cell.plans.items() if plan)
    return html.Td(parts, className=kind, title=tip)
