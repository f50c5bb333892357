"""Measured step times, for calibration and validation of the time model."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_ext.command_line import in_words
from rtp_ext.planner.constants import TimeConstants
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import Strategy
from rtp_ext.planner.time.estimate import estimate_time

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
