"""What the package logs."""

import logging
from collections.abc import Callable
from typing import Any


def logged(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, list[tuple[str, str]]]:
    """Calls a function. Returns its result, and level and text of each line that rtp_ext logs, from INFO on."""
    found: list[tuple[str, str]] = []
    handler, logger = logging.Handler(), logging.getLogger("rtp_ext")
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return function(*arguments, **options), found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
