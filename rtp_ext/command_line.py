"""What all commands share: a parser whose errors are one line, errors of files in words, lines that fit a terminal,
progress, shell completion."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

__all__ = [
    "PROGRAM",
    "SHELLS",
    "WIDTH",
    "Parser",
    "completion",
    "did_you_mean",
    "in_words",
    "markdown",
    "progress",
    "wrapped",
]

PROGRAM = "rtp-ext"
SHELLS = ("bash", "zsh")
WIDTH = 100  # columns of a terminal, which no line exceeds unless one word does
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # either name of a dtype is understood
PATIENCE = 2.0  # seconds without a sign of progress


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean X?` with the nearest of the `known` words, or an empty text where none is near."""
    exact = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), exact, n=1, cutoff=0.5)
    return f"; did you mean {exact[near[0]]}?" if near else ""


def in_words(error: Exception) -> str:
    """Returns the message of an error in one line. Those of files name the file first, and have no number."""
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror[0].lower() + error.strerror[1:]
        return reason if error.filename is None else f"{error.filename}: {reason}"
    if isinstance(error, UnicodeDecodeError):
        return "expected text, got binary data"
    if isinstance(error, json.JSONDecodeError):
        return f"expected JSON, got other text ({error.msg}, line {error.lineno})"
    return " ".join(str(error).split())


def dtype_name(text: str) -> str:
    """Returns torch's name of a dtype that may have its short one."""
    return DTYPES.get(text, text)


def short_dtype_name(text: str) -> str:
    return next((short for short, name in DTYPES.items() if name == text), text)


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises ValueError for an unreadable file, another JSON value, and nesting that
    the interpreter cannot follow."""
    try:
        settings = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} {path}: {in_words(error).removeprefix(f'{path}: ')}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{what} {path}: expected a JSON object, got {type(settings).__name__}")
    return settings


def wrapped(text: str, first: str = "", then: str = "  ") -> list[str]:
    """Returns the lines of a text, of at most WIDTH columns. `first`, `then`: their beginnings."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table with aligned columns. The first row has their names."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one line: the error, the nearest right word, and where help is.

    Attributes:
        words: known values of options that take other ones too, or that are checked later; shells complete them.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.words: dict[str, Sequence[str]] = {}

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # of each subparser, too
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            near = did_you_mean(flag, self._option_string_actions) if flag.startswith("-") else ""
            self.error(f"unknown argument {unknown[0]}{near}")
        return options, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [*map(str, action.choices)]
            text = f"invalid choice: {value!r} (choose from {', '.join(known)}){did_you_mean(str(value), known)}"
            raise argparse.ArgumentError(action, text)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Shows `what` and the seconds so far on standard error while the body runs, from two seconds on. Shows nothing
    where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        begun = time.monotonic()
        if done.wait(PATIENCE):
            return
        while True:
            print(f"\r{what}: {time.monotonic() - begun:.0f} s", end="", file=sys.stderr, flush=True)
            if done.wait(1.0):
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
                return

    shown = threading.Thread(target=show, daemon=True)
    shown.start()
    try:
        yield
    finally:
        done.set()
        shown.join()


# -- completion --------------------------------------------------------------------------------------------------------

_BASH = """\
_rtp_ext() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words
  case "${{COMP_WORDS[1]}} $previous" in
{values}
    *) case "$COMP_CWORD ${{COMP_WORDS[1]}}" in
      "1 "*) words="{commands}" ;;
{flags}
    esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _rtp_ext {program}
"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U compinit && compinit -i }
autoload -U +X bashcompinit && bashcompinit
"""


def completion(parser: Parser, shell: str) -> str:
    """Returns the script that makes `shell` complete the commands of `parser`, their options, and the options' values.
    After an option that takes any text, the shell completes names of files."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    values, flags = [], []
    for name, command in commands.choices.items():
        assert isinstance(command, Parser), "subparsers have the class of their parser"
        positional = [*map(str, next((a.choices for a in command._actions if not a.option_strings and a.choices), ()))]
        flags.append(f'      *" {name}") words="{" ".join([*positional, *sorted(command._option_string_actions)])}" ;;')
        for flag, action in sorted(command._option_string_actions.items()):
            if action.nargs != 0:
                known = command.words.get(flag, action.choices or ())
                words = " ".join(str(word) for word in known if " " not in str(word))
                values.append(f'    "{name} {flag}") words="{words}" ;;')
    top = " ".join([*commands.choices, *sorted(parser._option_string_actions)])
    script = _BASH.format(values="\n".join(values), flags="\n".join(flags), commands=top, program=PROGRAM)
    return (_ZSH if shell == "zsh" else "") + script
