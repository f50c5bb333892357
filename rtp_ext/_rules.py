"""Loads the rules of the engine that need no torch: schedules, memory of rotation, waves of tiles."""

from __future__ import annotations

try:
    from rtp_ext import _R  # type: ignore[attr-defined]
    from rtp_ext._R import *  # type: ignore[import-not-found]  # noqa: F403
except ImportError as error:
    raise ImportError(
        f"rtp_ext: the compiled rules could not be loaded ({error}). Build the package: "
        "pip install --no-build-isolation --force-reinstall --no-deps ."
    ) from error

GEMM_TILES: tuple[tuple[int, int], ...] = _R.gemm_tiles
SLOT_CAP: int = _R.slot_cap  # default of a ring, in bytes


def __getattr__(name):  # for mypy, to which the extension has no types
    raise AttributeError(f"rtp_ext: the compiled rules have no {name}")
