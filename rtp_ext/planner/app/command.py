"""`rtp-ext plan --app`: its arguments, and the server that it starts."""

from __future__ import annotations

import argparse
import secrets
import sys

from rtp_ext.command_line import in_words
from rtp_ext.host import loopback
from rtp_ext.planner import cli
from rtp_ext.planner.app.settings import settings_of

HOST, PORT = "127.0.0.1", 8050


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --app, --host and --port to the arguments of the command."""
    group = parser.add_argument_group("page")
    group.add_argument(
        "--app", action="store_true", help="show the planner as a page for a browser; other options fill it"
    )
    group.add_argument(
        "--host", metavar="NAME", help=f"where the page listens; default: {HOST}, for this machine alone"
    )
    group.add_argument("--port", type=int, metavar="N", help=f"of the page; 0: a free one; default: {PORT}")


def run(options: argparse.Namespace) -> int:
    """Serves the page until it is interrupted. Returns 2 for invalid arguments, 1 where it cannot listen."""
    host = options.host or HOST
    port = PORT if options.port is None else options.port
    token = secrets.token_urlsafe(24)
    try:
        if not 0 <= port < 65536:
            raise ValueError(f"expected --port of 0 to 65535, got {port}")
        settings = settings_of(options)
        try:
            from rtp_ext.planner.app import page
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("dash", "flask", "plotly", "werkzeug"):
                raise
            raise ImportError("--app needs Dash: pip install 'rtp-ext[app]'") from None
        server = page.server(settings, host, port, token)
    except OSError as error:
        why = in_words(error).partition(" (while")[0]  # of socket.create_server, which repeats the address
        print(f"{cli.PROGRAM}: cannot listen on {host}, port {port}: {why}; see --port", file=sys.stderr)
        return 1
    except (ImportError, ValueError, TypeError) as error:
        print(f"{cli.PROGRAM}: error: {in_words(error)}", file=sys.stderr)
        return 2
    if not loopback(host):
        print(f"{cli.PROGRAM}: warning: others can read the address of this page on its way to {host}", file=sys.stderr)
    shown = f"[{host}]" if ":" in host else host
    print(f"planner: http://{shown}:{server.port}/{token}/ (Ctrl-C ends it)", flush=True)
    server.serve_forever()
    return 0
