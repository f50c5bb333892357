"""The page: its fields, its sections, and the server that answers them."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dash
from dash import Dash, Input, Output, State, dcc, html
from werkzeug.serving import BaseWSGIServer, make_server

from rtp_ext.command_line import PROGRAM, in_words
from rtp_ext.gpu_rates import LINKS
from rtp_ext.host import loopback
from rtp_ext.planner.app import figures
from rtp_ext.planner.app.settings import (
    CLUSTER,
    COMPARED,
    FIELDS,
    MODEL,
    SEARCHED,
    SWITCHES,
    Settings,
    arguments,
    refilled,
)
from rtp_ext.planner.app.view import compared, found, passes_of, view_of
from rtp_ext.planner.constants import constants
from rtp_ext.planner.specs.strategy import DTYPE_BYTES, RECIPES_OF_RINGS, RECOMPUTE, STACKS

_REFUSALS = (ValueError, TypeError, ImportError, OSError)
_FILLED = ("plans", "global_batch")
_CHOICES = {
    "model": [("", "from config.json or sizes")],
    "gpu": [("", "from a file of --cluster")],
    "link": [("", "that of the GPU"), *((link, link) for link in LINKS)],
    "recompute": [("", "by plan"), *((mode, mode) for mode in RECOMPUTE)],
    "param_dtype": [("", "bf16"), *((dtype, dtype) for dtype in DTYPE_BYTES if dtype != "bf16")],
    "reduce_dtype": [("", "fp32"), *((dtype, dtype) for dtype in DTYPE_BYTES if dtype != "fp32")],
    "stack": [("", "by plan"), *((stack, stack) for stack in STACKS if stack != "auto")],
    "recipe": [("", "no"), *((name, name) for name in RECIPES_OF_RINGS[1:])],
}
_LABELS = {
    "model": "Model",
    "hf_config": "Hugging Face config.json",
    "seq": "Tokens of a sample",
    "gpu": "GPU",
    "gpus": "GPUs",
    "gpus_per_node": "GPUs of a node",
    "link": "Link inside a node",
    "global_batch": "Global batch",
    "recompute": "Checkpointing",
    "param_dtype": "Compute dtype",
    "reduce_dtype": "Reduce dtype",
    "stack": "Software stack",
    "recipe": "Products in 8 bits",
    "fused_loss": "fused loss",
    "compiled": "torch.compile",
    "fused_norm": "fused norms",
    "plans": "Plans, one a line",
    "more": "Further options",
}
_HINTS = {
    "hf_config": "path on this machine",
    "seq": "model's own",
    "gpus_per_node": "8",
    "global_batch": "samples",
    "more": "such as --reduce-dtype bf16",
}


def server(settings: Settings, host: str, port: int, token: str) -> BaseWSGIServer:
    """Returns a server that listens already, and answers what begins with /TOKEN.

    Raises:
        OSError: it cannot listen on `host` and `port`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    made = make_server(host, listening.getsockname()[1], app(settings, host, token).server, True, fd=listening.detach())
    return made


def app(settings: Settings, host: str, token: str) -> Dash:
    """Returns the page with its callbacks, below /TOKEN. settings: what the fields have at first."""
    made = Dash(
        PROGRAM,
        title="RTP planner",
        update_title="",
        serve_locally=True,
        assets_folder="none",
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
        index_string=_index(),
        routes_pathname_prefix="/",
        requests_pathname_prefix=f"/{token}/",
    )
    made.server.wsgi_app = _guarded(made.server.wsgi_app, token, loopback(host))  # type: ignore[method-assign]
    made.layout = _layout(settings)
    _connect(made)
    return made


def _guarded(answer: Callable[..., Iterable[bytes]], token: str, local: bool) -> Callable[..., Iterable[bytes]]:
    """Returns a WSGI application that passes on what the page asks for, without the token, and refuses all else: other
    local users, and web sites whose names lead to this machine. local: refuse names that are not this machine's."""

    def application(request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        host, origin = request.get("HTTP_HOST", ""), request.get("HTTP_ORIGIN")
        given, _, path = request.get("PATH_INFO", "").removeprefix("/").partition("/")
        known = secrets.compare_digest(given.encode(), token.encode())
        if not known or (local and not loopback(_name(host))) or origin not in (None, f"http://{host}"):
            start("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"Open the whole address that rtp-ext plan --app printed.\n"]
        return answer({**request, "PATH_INFO": f"/{path}"}, start)

    return application


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _index() -> str:
    style = Path(__file__).with_name("page.css").read_text()
    return (
        "<!DOCTYPE html><html lang='en'><head>{%metas%}<link rel='icon' href='data:,'>"
        + "<title>{%title%}</title>{%css%}<style>"
        + style
        + "</style></head><body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body></html>"
    )


# -- layout ------------------------------------------------------------------------------------------------------------


def _layout(settings: Settings) -> html.Div:
    intro = "Memory, step time and the fastest plans of a training run, by arithmetic: nothing here is measured."
    form = html.Div(
        [
            _group("Model", settings, *MODEL),
            _group("Cluster", settings, *CLUSTER),
            _group(
                "Training", settings, "global_batch", "recompute", "param_dtype", "reduce_dtype", "stack", "switches"
            ),
            _group("Plans to compare", settings, "plans", "more"),
        ],
        className="form",
    )
    sections = [
        _section("Memory of the GPU that holds most", dcc.Loading(html.Div(id="memory"), **_WAIT)),
        _section("Time of a step", html.Div(id="time")),
        _section("Fastest plans that fit", dcc.Loading(html.Div(id="search"), **_WAIT), _copies("search")),
        _section("Rotation on one rank", _field("operation", [("", "")], ""), html.Div(id="timeline")),
        _section(
            "When rotation wins",
            html.P("On these GPUs, over links and tokens of a GPU.", className="note"),
            html.Button("Compare", id="compare"),
            dcc.Loading(html.Div(id="when"), **_WAIT),
            _copies("when"),
        ),
        _section("The same without this page", _copies("plans")),
    ]
    main = html.Div(
        [
            html.Div(id="error", role="alert"),
            html.Div([html.Div(id="verdict"), *sections], id="shown", hidden=True),
        ],
        className="main",
    )
    filled = {name: settings[name] for name in _FILLED}
    return html.Div(
        [
            html.Header([html.H1("RTP planner"), html.P(intro)]),
            html.Div([form, main], className="columns"),
            dcc.Store(id="filled", data=filled),
            dcc.Store(id="arguments"),
        ]
    )


_WAIT: dict[str, Any] = {"type": "dot", "delay_show": 300, "color": "#2f7ed8"}


def _group(title: str, settings: Settings, *names: str) -> html.Fieldset:
    fields: list[Any] = []
    for name in names:
        if name == "switches":
            chosen = [each for each in SWITCHES if settings[each]]
            choices = [{"value": each, "label": _LABELS[each]} for each in SWITCHES]
            fields.append(html.Div(dcc.Checklist(choices, chosen, id=name), className="field whole"))
        elif name in ("plans", "more"):
            text = dcc.Textarea(
                id=name, value=settings[name], placeholder=_HINTS.get(name, ""), rows=2 + 3 * (name == "plans")
            )
            fields.append(html.Div([html.Label(_LABELS[name], htmlFor=name), text], className="field whole"))
        elif name in _CHOICES:
            known = {"model": "models", "gpu": "gpus"}
            more = [(each, each) for each in constants()[known[name]]] if name in known else []
            fields.append(_field(name, [*more, *_CHOICES[name]], settings[name], _LABELS[name]))
        else:
            box = dcc.Input(id=name, value=settings[name], type="text", debounce=True, placeholder=_HINTS.get(name, ""))
            wide = " whole" if name == "hf_config" else ""
            fields.append(
                html.Div([html.Label(_LABELS[name], htmlFor=name), box], className=f"field{wide}", id=f"of-{name}")
            )
    if "plans" in names:
        fields.insert(1, html.Button("The usual plans", id="usual"))
    return html.Fieldset([html.Legend(title), *fields])


def _field(name: str, choices: list[tuple[str, str]], value: str, label: str = "") -> html.Div:
    options = [{"value": each, "label": text} for each, text in choices]
    menu = dcc.Dropdown(options, value, id=name, clearable=False, searchable=len(options) > 8)
    wide = " whole" if name in ("model", "gpu", "link", "stack") else ""
    return html.Div(
        [*([html.Label(label, htmlFor=name)] if label else []), menu], className=f"field{wide}", id=f"of-{name}"
    )


def _section(title: str, *parts: Any) -> html.Section:
    return html.Section([html.H2(title), *parts])


def _copies(name: str) -> html.Div:
    """A command line and a Python program, each with a button that copies it."""
    parts = []
    for kind, title in (("command", "Command"), ("python", "Python")):
        code = html.Pre(id=f"{name}-{kind}")
        button = dcc.Clipboard(target_id=f"{name}-{kind}", title=f"copy: {title}", className="copy")
        parts.append(html.Div([html.Div([title, button], className="title"), code], className="code"))
    return html.Div(parts, className="copies", id=f"{name}-copies")


# -- callbacks ---------------------------------------------------------------------------------------------------------


def _settings(values: Mapping[str, Any]) -> Settings:
    chosen = values["switches"] or []
    return {name: name in chosen if name in SWITCHES else values[name] or "" for name in FIELDS}


def _connect(made: Dash) -> None:
    names = [name for name in FIELDS if name not in SWITCHES]
    fields = {name: Input(name, "value") for name in [*names, "switches"]}
    titles = ("error", "verdict", "memory", "time", "plans-command", "plans-python")

    @made.callback(
        output={
            **{name: Output(name, "children") for name in titles},
            **{name: Output(name, "value") for name in _FILLED},
            "hidden": Output("shown", "hidden"),
            "hf_hidden": Output("of-hf_config", "hidden"),
            "filled": Output("filled", "data"),
            "arguments": Output("arguments", "data"),
            "operations": Output("operation", "options"),
            "operation": Output("operation", "value"),
        },
        inputs={"values": fields, "usual": Input("usual", "n_clicks")},
        state={"filled": State("filled", "data"), "operation": State("operation", "value")},
    )
    def show(values: dict[str, Any], usual: Any, filled: dict[str, str], operation: str) -> dict[str, Any]:
        settings = _settings(values)
        if dash.ctx.triggered_id == "usual":
            filled = {**filled, "plans": settings["plans"]}
        if dash.ctx.triggered_id not in (None, *_FILLED):
            before = settings
            settings = refilled(settings, filled)
            filled = {name: settings[name] if settings[name] != before[name] else filled[name] for name in _FILLED}
        told: dict[str, Any] = dict.fromkeys(titles, "")
        told |= {name: settings[name] for name in _FILLED}
        told |= {"filled": filled, "hf_hidden": bool(settings["model"]), "arguments": None, "hidden": True}
        told |= {"operations": [], "operation": ""}
        try:
            words = arguments(settings)
            view = view_of(words)
            passes = next(
                (found for row in view.rows if (found := passes_of(view.model, view.cluster, row.strategy))), []
            )
        except _REFUSALS as error:
            return {**told, "error": figures.sentence(in_words(error))}
        operations = list(dict.fromkeys(each.operation for each in passes))
        largest = max(passes, key=lambda each: each.step_seconds if "layer" in each.operation else 0, default=None)
        told |= {
            "hidden": False,
            "verdict": [
                html.H2(view.verdict),
                html.P(view.detail),
                figures.cards(view),
                html.P(figures.sentence(view.unlike), className="note"),
            ],
            "memory": figures.memory(view),
            "time": figures.time(view),
            "plans-command": view.command,
            "plans-python": view.python,
            "arguments": {
                "plans": words,
                "search": [*arguments(settings, SEARCHED), *view.sizes],
                "when": [*arguments(settings, COMPARED), *view.sizes],
            },
            "operations": [{"value": each, "label": each} for each in operations],
            "operation": operation if operation in operations else largest.operation if largest else "",
        }
        return told

    @made.callback(
        output=[Output(name, "children") for name in ("search", "search-command", "search-python")],
        inputs=[Input("arguments", "data")],
    )
    def look(words: dict[str, list[str]] | None) -> list[Any]:
        if words is None:
            return ["", "", ""]
        try:
            result = found(tuple(words["search"]))
        except _REFUSALS as error:
            return [html.P(in_words(error), className="note"), "", ""]
        return [figures.plans(result), result.command, result.python]

    @made.callback(Output("timeline", "children"), Input("arguments", "data"), Input("operation", "value"))
    def rotate(words: dict[str, list[str]] | None, operation: str) -> Any:
        if words is None:
            return ""
        view = view_of(words["plans"])
        rings = [row for row in view.rows if row.strategy.rtp > 1]
        for row in rings:
            every = passes_of(view.model, view.cluster, row.strategy)
            if shown := [each for each in every if each.operation == operation]:
                about = (
                    f"{row.title}: what rank 0 computes, sends and receives; all ranks do the same at the same time."
                )
                return [html.P(about, className="note"), figures.timeline(shown)]
        why = "A ring this large is not drawn." if rings else "No plan rotates."
        return html.P(why, className="note")

    @made.callback(
        output=[Output(name, "children") for name in ("when", "when-command", "when-python")],
        inputs=[Input("arguments", "data"), Input("compare", "n_clicks")],
    )
    def compare(words: dict[str, list[str]] | None, clicks: Any) -> list[Any]:
        if words is None or dash.ctx.triggered_id != "compare":
            return ["", "", ""]
        try:
            cells, command, python = compared(tuple(words["when"]))
        except _REFUSALS as error:
            return [html.P(in_words(error), className="note"), "", ""]
        return [figures.comparison(cells), command, python]
