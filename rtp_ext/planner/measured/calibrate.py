"""Calibration: fits the constants of the time model to measured step times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rtp_ext.planner.constants import TimeConstants
from rtp_ext.planner.measured.measurements import Measurement

FITTED = ("gemm_fraction", "hbm_fraction", "host_s")
_LARGEST = {name: 1.0 for name in FITTED if name.endswith("fraction")}
_MIN_MEASUREMENTS = 10  # for a separate test set
_ROUNDS, _FIRST_STEP, _LAST_STEP = 40, 1.5, 1.005


@dataclass(frozen=True)
class Calibration:
    """Constants, and the error `|predicted / measured - 1|` of every measurement."""

    constants: TimeConstants
    errors: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        return sum(self.errors) / len(self.errors)

    @property
    def median_error(self) -> float:
        middle = sorted(self.errors)
        return (middle[(len(middle) - 1) // 2] + middle[len(middle) // 2]) / 2

    @property
    def largest_error(self) -> float:
        return max(self.errors)

    def to_dict(self) -> dict[str, Any]:
        return {
            "constants": dataclasses.asdict(self.constants),
            "measurements": len(self.errors),
            "mean_error": self.mean_error,
            "median_error": self.median_error,
            "largest_error": self.largest_error,
        }


def errors_of(measurements: Iterable[Measurement], constants: TimeConstants | None = None) -> Calibration:
    """Returns the errors of the model on the measurements."""
    constants = TimeConstants.default() if constants is None else constants
    return Calibration(constants, tuple(abs(m.predicted_s(constants) / m.step_seconds - 1) for m in measurements))


def calibrate(
    measurements: Sequence[Measurement], *, start: TimeConstants | None = None, names: Sequence[str] = FITTED
) -> Calibration:
    """Fits constants to measurements: least mean `|log(predicted / measured)|`, by a pattern search that changes one
    constant at a time with shrinking steps (Hooke and Jeeves, JACM 8(2), 1961).

    Args:
        start: initial constants; default: those of constants.json.
        names: constants to fit; the others stay fixed.

    Raises:
        ValueError: nothing to fit, or unknown names.
    """
    constants = TimeConstants.default() if start is None else start
    known = [field.name for field in dataclasses.fields(TimeConstants)]
    unknown = [name for name in names if name not in known]
    if unknown or not measurements:
        raise ValueError(
            f"calibrate: unknown constants {', '.join(unknown)}: expected some of {', '.join(known)}"
            if unknown
            else "calibrate: expected at least one measurement, got none"
        )

    def loss(candidate: TimeConstants) -> float:
        ratios = (m.predicted_s(candidate) / m.step_seconds for m in measurements)
        return sum(abs(math.log(ratio)) for ratio in ratios) / len(measurements)

    best, step = loss(constants), _FIRST_STEP
    for _ in range(_ROUNDS):
        before = best
        for name in names:
            for factor in (step, 1 / step):
                value = min(getattr(constants, name) * factor, _LARGEST.get(name, math.inf))
                candidate = dataclasses.replace(constants, **{name: value})
                found = loss(candidate)
                if found < best:
                    best, constants = found, candidate
                    break
        if best > before - 1e-4:
            step = math.sqrt(step)
            if step < _LAST_STEP:
                break
    return errors_of(measurements, constants)


def fitted_and_errors(measured: Sequence[Measurement]) -> dict[str, Any]:
    """Fits to every second measurement and returns the errors on the others next to them. With few measurements, fits
    to all of them, and returns the leave-one-out errors."""
    few = len(measured) < _MIN_MEASUREMENTS
    found = calibrate(measured if few else measured[::2])
    if few:
        apart = [
            calibrate([*measured[:i], *measured[i + 1 :]]).constants for i in range(len(measured) * (len(measured) > 1))
        ]
        off = [errors_of([run], one).mean_error for run, one in zip(measured, apart, strict=False)]
        kept = {"mean_error": sum(off) / len(off), "largest_error": max(off), "measurements": len(off)} if off else None
    else:
        kept = errors_of(measured[1::2], found.constants).to_dict()
    return {"fitted": found.to_dict(), "kept_back": kept, "before": errors_of(measured).to_dict()}
