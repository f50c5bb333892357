"""Measured step times, and the calibration of the time model by them."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_ext.command_line import in_words
from rtp_ext.planner.constants import TimeConstants
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import Strategy
from rtp_ext.planner.time.estimate import estimate_time

# -- measured steps ----------------------------------------------------------------------------------------------------

# Columns of VIA-Research/vTrain@f8dda84, data/ground_truth_*.csv, and the settings of all runs (config/validation).
_VTRAIN = {
    "# GPUs": "gpus",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "seq",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
    "iteration time (ms)": "step_ms",
    "source": "source",
}
VTRAIN = {
    "family": "gpt",
    "vocab": 51200,  # Megatron-LM's padded vocabulary; the runs do not state it
    "gpu": "a100-80gb",
    "nic_bytes_per_s": 12.5e9,  # inter_node_bandwidth 800 Gb/s a node of 8
    "recompute": "full",  # use_checkpoint
    "flash_attention": False,
    "reduce_dtype": "fp16",
}


@dataclass(frozen=True)
class Measurement:
    """A measured step."""

    model: ModelSpec
    cluster: Cluster
    strategy: Strategy
    global_batch: int
    step_seconds: float
    source: str = ""

    def predicted_s(self, constants: TimeConstants | None = None) -> float:
        return estimate_time(
            self.model, self.cluster, self.strategy, self.global_batch, constants=constants
        ).step_seconds


def read_measurements(file: str | Path) -> list[Measurement]:
    """Reads JSON lines (`*.jsonl`) or a CSV with the same columns.

    Columns: `model` (a preset) or `family`, `layers`, `hidden`, `heads` and further sizes; `gpu` (a preset), `gpus`,
    `gpus_per_node`, `nic_bytes_per_s`; any field of Strategy; `global_batch`; `step_ms` or `step_seconds`; `source`.
    Empty cells are ignored. The tables of VIA-Research/vTrain are read unchanged. JSON lines without a step time or a
    model (other benchmarks) are skipped.

    Raises:
        ValueError: an unreadable file or a wrong line, by number.
    """
    path, rows = Path(file), []
    try:
        with path.open(newline="") as stream:
            if path.suffix == ".jsonl":
                rows = [json.loads(line) for line in stream if line.strip()]
            else:
                rows = list(csv.DictReader(stream))
    except (OSError, ValueError) as error:
        raise ValueError(f"measurements {path}: {in_words(error).removeprefix(f'{path}: ')}") from error
    columns = {key for row in rows if isinstance(row, dict) for key in row}
    if not {"step_ms", "step_seconds", "iteration time (ms)"} & columns:
        got = f"the columns {', '.join(sorted(map(str, columns))[:8])}" if columns else "none"
        raise ValueError(
            f"measurements {path}: expected a CSV, or JSON lines in a file named *.jsonl, of timed steps with step_ms "
            f"or step_seconds, gpu, gpus, global_batch, and model or layers, hidden and heads; got {got}"
        )
    found = []
    for number, row in enumerate(rows, 1):
        given = {key: value for key, value in row.items() if value not in (None, "")}
        if "iteration time (ms)" in given:
            given = {**VTRAIN, **{_VTRAIN[key]: value for key, value in given.items() if key in _VTRAIN}}
        timed = {"step_ms", "step_seconds"} & set(given)
        if path.suffix == ".jsonl" and not (timed and {"model", "hidden"} & set(given)):
            continue
        try:
            found.append(_measurement(given))
        except KeyError as error:
            raise ValueError(f"measurements {path}, row {number}: expected {error.args[0]}, got none") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"measurements {path}, row {number}: {error}") from error
    return found


def _measurement(given: Mapping[str, Any]) -> Measurement:
    def typed(kind: type, names: Iterable[str]) -> dict[str, Any]:
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
        return {name: _like(given[name], defaults.get(name, 0)) for name in names if name in given}

    sizes = typed(ModelSpec, ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "experts_per_token"))
    seq = int(given["seq"]) if "seq" in given else None
    if "model" in given:
        model = ModelSpec.preset(str(given["model"]), seq=seq)
    else:
        sizes |= {} if seq is None else {"seq": seq}
        model = {"gpt": ModelSpec.gpt, "llama": ModelSpec.llama}[str(given.get("family", "gpt"))](**sizes)
    per_node = int(given["gpus_per_node"]) if "gpus_per_node" in given else None
    cluster = Cluster.preset(str(given["gpu"]), gpus=int(given["gpus"]), gpus_per_node=per_node)
    if "nic_bytes_per_s" in given:
        cluster = dataclasses.replace(cluster, nic_bytes_per_s=float(given["nic_bytes_per_s"]))
    strategy = Strategy(**typed(Strategy, [field.name for field in dataclasses.fields(Strategy)]))
    seconds = float(given["step_seconds"]) if "step_seconds" in given else float(given["step_ms"]) / 1e3
    batch = int(given["global_batch"])
    strategy.check(model, cluster, batch)
    if not 0 < seconds < math.inf:
        raise ValueError(f"expected a positive step time, got {seconds}")
    return Measurement(model, cluster, strategy, batch, seconds, str(given.get("source", "")))


def _like(value: Any, default: Any) -> Any:
    """Converts a cell of a CSV to the type of its field's default."""
    if not isinstance(value, str) or default is None:
        return value
    if isinstance(default, bool):
        return {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}.get(value.lower(), value)
    return int(value) if isinstance(default, int) or not isinstance(default, str) else value


# -- calibration -------------------------------------------------------------------------------------------------------

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
