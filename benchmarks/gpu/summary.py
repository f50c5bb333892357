"""What benchmarks/gpu/first_day.sh has found so far, each figure beside its prediction: `summary.py OUT [LOGS]`.

OUT has what the steps write: results.jsonl and facts.jsonl (lines of results), card.json, steps.tsv. LOGS, by default
OUT/logs, has a log for each step and JUnit files of tests. Files that are missing, and lines that were cut off, are
left out. The page goes to stdout; tests that failed or were skipped go to OUT/tests.jsonl. Predictions and what to
change where a figure is worse: expected.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from gpu import expected
from gpu.expected import Expected

Row = dict[str, Any]
CARD = ("device", "driver", "cuda", "torch", "nccl", "nccl_compiled", "cores", "cpu", "commit", "date")
SANITIZED = ("memcheck", "racecheck", "memcheck_layer")
KINDS = (("failure", "failed"), ("error", "error"), ("skipped", "skipped"))  # JUnit's names and ours
SHOWN = 25  # failures


def json_lines(path: Path) -> list[Row]:
    """The lines of a file that are JSON: the writer of the last one may have been stopped."""
    found = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


class Figures:
    """Lines of figures with their verdicts, and what to change for those that are worse."""

    def __init__(self) -> None:
        self.worse: dict[str, int] = {}

    def compared(self, name: str, value: float | None, prediction: Expected | None, digits: int = 2) -> str:
        """`value (predicted, verdict)`; `name`: a key of CHANGES. Without a prediction the value alone."""
        if value is None or prediction is None:
            return number(value, digits)
        verdict = prediction.verdict(value)
        if verdict.startswith("worse"):
            self.worse[name] = self.worse.get(name, 0) + 1
        return f"{number(value, digits)} ({prediction.text(digits)}, {verdict})"

    def changes(self) -> list[str]:
        return [f"  {name}, {count} worse: {expected.CHANGES[name]}" for name, count in self.worse.items()]


# -- steps and tests ---------------------------------------------------------------------------------------------------


def of_card(out: Path) -> Iterator[str]:
    if (out / "card.json").exists():
        card = json.loads((out / "card.json").read_text())
        yield ", ".join(f"{name} {card.get(name)}" for name in CARD)


def of_steps(out: Path) -> Iterator[str]:
    path = out / "steps.tsv"
    yield "step             status  seconds (limit)"
    for text in path.read_text().splitlines() if path.exists() else ():
        name, status, seconds, most = text.split("\t")
        yield f"{name:<16} {status:<7} {seconds} ({most})"


def tests_of(log: Path) -> Iterator[tuple[str, str, str]]:
    """Kind, name and message of each test: of the JUnit file where pytest came to its end, else of its log."""
    report = log.with_suffix(".xml")
    root = None
    with contextlib.suppress(OSError, ET.ParseError):  # none, or one that was being written
        root = ET.parse(report).getroot()
    if root is not None:
        for case in root.iter("testcase"):
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            children = {child.tag: child for child in case}
            found = [(kind, children[tag]) for tag, kind in KINDS if tag in children]
            for kind, child in found:
                yield kind, name, f"{child.get('message') or ''}\n{child.text or ''}"
            if not found:
                yield "passed", name, ""
        return
    told = r"(?:\[gw\d+\] \[ *\d+%\] )?\b(PASSED|FAILED|ERROR|SKIPPED)\s+(\S+::\S+)"
    after = r"^(\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED)\b"  # without workers pytest names the test first
    text = log.read_text(errors="replace")
    for kind, name in [
        *re.findall(told, text),
        *((kind, name) for name, kind in re.findall(after, text, re.MULTILINE)),
    ]:
        yield kind.lower(), name, "see the log"


def of_tests(out: Path, logs: Path) -> Iterator[str]:
    yield "tests"
    failures = []
    for log in sorted(logs.glob("*.log")):
        counts: dict[str, int] = {}
        for kind, name, message in tests_of(log):
            counts[kind] = counts.get(kind, 0) + 1
            if kind != "passed":
                failures.append({"kind": kind, "step": log.stem, "test": name, "text": message[-6000:]})
        if counts:
            stopped = "" if log.with_suffix(".xml").exists() else " (stopped)"
            yield f"  {log.stem:<14} {', '.join(f'{count} {kind}' for kind, count in counts.items())}{stopped}"
    (out / "tests.jsonl").write_text("".join(json.dumps(each) + "\n" for each in failures))
    for each in [each for each in failures if each["kind"] != "skipped"][:SHOWN]:
        first = next((part for part in each["text"].splitlines() if part.strip()), "")
        yield f"  {each['kind'].upper()} {each['step']} {each['test']}: {first[:160]}"
    for name in SANITIZED:
        if (logs / f"{name}.log").exists():
            pattern = r"=+ (ERROR SUMMARY.*|RACECHECK SUMMARY.*|.*(?:Invalid|hazard).*)"
            said = re.findall(pattern, (logs / f"{name}.log").read_text(errors="replace"))
            yield f"  {name}: {said[-1] if said else 'no summary'}"


# -- figures -----------------------------------------------------------------------------------------------------------


def of_host(rows: list[Row], facts: list[Row], figures: Figures) -> Iterator[str]:
    keys = ("gpu_us_per_hop", "host_us_forward", "host_us_step", "graph_us_forward", "graph_us_step", "plain_us")
    if rows:
        yield f"host, us, emulated: link, hop (predicted), {', '.join(keys)}, replayed, GB/s of a hop"
    for row in rows:
        if "refused" in row:
            yield f"  {row['link']:<12} {row['refused'][:100]}"
            continue
        hop = figures.compared("host", row["host_us_per_hop"], expected.hop_us(row["link"]), 1)
        others = " ".join(number(row.get(key), 1) for key in keys)
        yield f"  {row['link']:<12} {hop} {others} {row.get('replayed')} {number(row.get('gigabytes_per_s'), 0)}"
    for fact in facts:
        if "host_us_per_hop" in fact:
            prediction = expected.hop_us(str(fact.get("transport", "")))
            told = figures.compared("host", fact["host_us_per_hop"], prediction, 1)
            yield f"  ranks on one GPU over {fact.get('transport')}: {told}"
        elif "completes" in fact or "hidden" in fact:
            yield f"  {json.dumps(fact)[:150]}"


def of_sums(rows: list[Row], cluster: Any, figures: Figures) -> Iterator[str]:
    if rows:
        yield "float32 sums: case, beta = 1 over beta = 0 (predicted), us of beta 0, 1, elsewhere, torch, torch added, "
        yield "  16 bits; TFLOP/s of beta 0, 1; GB/s of what beta = 1 reads more"
    for row in rows:
        known = cluster is not None and row["shape"] == "{}x{}".format(*expected.SUM_SHAPE)
        ratio = figures.compared("sums", row["ratio"], expected.sum_ratio(cluster, row["k"]) if known else None)
        names = ("beta0", "beta1", "elsewhere", "torch", "torch_add", "16_bits")
        times = " ".join(number(row.get(f"t_{name}_us"), 0) for name in names)
        rates = " ".join(number(row.get(key), 0) for key in ("tflops_beta0", "tflops_beta1", "extra_gb_per_s"))
        yield f"  {row['case']:<20}{ratio}  {times}; {rates}"


def hop_bytes_per_s(row: Row) -> float | None:
    """The rate of a hop without products beside it, of a forward: in a backward two kinds of hop share the link."""
    if row["direction"] != "forward" or not row["t_c_us"]:
        return None
    return (row["ranks"] - 1) * row["weight_hop_bytes"] / row["t_c_us"] * 1e6


def of_overlap(rows: list[Row], cluster: Any, figures: Figures) -> Iterator[str]:
    if rows:
        yield "overlap: case, link, T_gR / T_g1, E_hide, roofline (predicted at the link's rate), roofline with these"
        yield "  products at NVLink's rate, E_ECT, T_c / T_gR, GB/s of a hop, TFLOP/s, spread, MHz, two streams"
    rates = {(row["link"], row["shape"], row["tokens"], row["ranks"]): hop_bytes_per_s(row) for row in rows
             if row["direction"] == "forward"}  # fmt: skip
    for row in rows:
        rate = rates.get((row["link"], row["shape"], row["tokens"], row["ranks"]))
        told: dict[str, Expected] = {}
        at_nvlink = None
        if cluster is not None:
            layer = (cluster, row["n"], row["k"], row["tokens"], row["ranks"], row["direction"])
            told = expected.overlap(*layer, rate)
            at_nvlink = expected.overlap(*layer)["roofline"]
        values = {"split": row["t_gr_us"] / row["t_g1_us"], "hidden": row["e_hide"], "roofline": row["roofline"]}
        compared = " ".join(figures.compared(name, value, told.get(name)) for name, value in values.items())
        model = figures.compared("roofline", row.get("model_roofline"), at_nvlink)
        graph = " graph" if row["graph"] else ""
        yield (
            f"  {row['case']:<32}{row['link'] or row['transport']}{graph} {compared} {model} {number(row['e_ect'])} "
            f"{number(row['t_c_us'] / row['t_gr_us'])} {number(rate and rate / 1e9, 0)} {number(row['tflops'], 0)} "
            f"{number(row['spread'])} {row.get('sm_clock_mhz')} {row['two_lanes']}"
        )


def of_emulated_steps(rows: list[Row], hosts: list[Row], cluster: Any, figures: Figures) -> Iterator[str]:
    if rows:
        yield "a step of a rank of 8 on its own tokens: case, tokens, over plain (predicted), ms of both passes"
        yield "  (p20 to p80), of the host; passes replayed"
    rates = {row["link"]: 1e9 * row["gigabytes_per_s"] for row in hosts if row.get("gigabytes_per_s")}
    for row in rows:
        if "refused" in row:
            yield f"  {row['case']:<28}{row['refused'][:120]}"
            continue
        prediction = None
        predicted = row["strategy"] in expected.STRATEGIES and row["shape"].startswith("block4")
        if cluster is not None and predicted:
            sizes = row["layers"], row["vocabulary"], row["tokens"]
            prediction = expected.step_ratio(cluster, row["strategy"], *sizes, rates.get(row["link"]), row["group"])
        ratio = figures.compared("step", row["ratio"], prediction)
        low, middle, high = (row[f"forward_backward{key}_ms"] for key in ("_p20", "", "_p80"))
        yield (
            f"  {row['case']:<28}{row['tokens']:<7}{ratio}  {number(middle)} ({number(low)} to {number(high)}) "
            f"{number(row['host_ms'])} {row.get('graphs_replayed', '')}"
        )


def of_memory(rows: list[Row], cluster: Any, figures: Figures) -> Iterator[str]:
    if rows:
        yield "memory of one rank, GiB: case, peak (predicted), reserved, transient, slots"
    for row in rows:
        whole = row["layers"] == row["full_layers"] and row["ranks"] == 8 and row["case"].startswith("llama3-8b")
        plain = row["parameter_dtype"] == "float32" and not row["checkpoint"]
        told = None
        if cluster is not None and whole and plain and row["strategy"] in expected.STRATEGIES:
            peak = expected.peak_bytes(cluster, row["strategy"], row["tokens"]).most / 2**30
            told = Expected(peak, peak)
        sizes = [row[f"{name}_bytes"] for name in ("reserved", "transient", "slot")]
        others = " ".join(number(None if size is None else size / 2**30) for size in sizes)
        yield f"  {row['case']:<34}{figures.compared('memory', row['peak_bytes'] / 2**30, told, 1)} {others}"


def of_kernels(rows: list[Row], cluster: Any, figures: Figures) -> Iterator[str]:
    if rows:
        yield f"kernels: GB/s (predicted), us, fraction of the copy's {rows[0]['copy_gb_per_s']:.0f} GB/s"
    told = None if cluster is None else expected.kernel_gb_per_s(cluster)
    for row in rows:
        rate = figures.compared("kernels", row["gb_per_s"], told, 0)
        yield f"  {row['kernel']:<18}{row['case']:<28}{row['dtype']:<9}{rate} {row['t_us']:.1f} {row['fraction']:.2f}"


def of_training(compared: list[Row], language: list[Row], figures: Figures) -> Iterator[str]:
    if compared or language:
        yield "a training step: strategy, over plain (predicted on one rank), ms (p20 to p80), forward and backward, "
        yield "  optimizer, loss spread"
    single = {row["tokens"]: row["step_ms"] for row in compared if row["strategy"] == "single"}
    for row in compared:
        ratio = row["step_ms"] / single[row["tokens"]] if row["tokens"] in single else None
        one = row["ranks"] == 1 and row["strategy"].startswith("rtp")
        told = figures.compared("train", ratio, expected.TRAIN if one else None)
        step, low, high, passes, optimizer = (
            number(row[f"{name}_ms"]) for name in ("step", "p20", "p80", "forward_backward", "optimizer")
        )
        spread = row.get("loss_spread")
        yield f"  {row['strategy']:<14}{told}  {step} ({low} to {high}) {passes} {optimizer} {spread}"
    for row in language:
        losses = row["losses"]
        yield (
            f"  train_lm {row['strategy']:<8}{number(row['tokens_per_s'], 0)} tokens/s, "
            f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
        )


def whole(part: Iterable[str]) -> list[str]:
    """The lines of a part. A line of results that lacks a key ends its part, not the page."""
    lines: list[str] = []
    try:
        lines.extend(part)
    except Exception as problem:  # of any kind: the other parts count more than this one
        lines.append(f"  the rest of this part cannot be read: {type(problem).__name__} {problem}")
    return lines


def page(out: Path, logs: Path) -> str:
    """The page, for a person to read."""
    rows, facts, figures = json_lines(out / "results.jsonl"), json_lines(out / "facts.jsonl"), Figures()
    of = {
        name: [row for row in rows if row.get("benchmark") == name] for name in {row.get("benchmark") for row in rows}
    }
    device = next((row["device"] for row in rows if row.get("device")), "")
    cluster = expected.cluster_of(device)
    known = (
        [] if cluster is not None or not rows else [f"no rates of {device} are known: nothing is predicted but calls"]
    )
    parts = [
        of_card(out),
        of_steps(out),
        of_tests(out, logs),
        known,
        of_host(of.get("host_times", []), facts, figures),
        of_sums(of.get("sums", []), cluster, figures),
        of_overlap(of.get("overlap", []), cluster, figures),
        of_emulated_steps(of.get("emulated_step", []), of.get("host_times", []), cluster, figures),
        of_memory(of.get("memory_per_rank", []), cluster, figures),
        of_kernels(of.get("kernels", []), cluster, figures),
        of_training(of.get("compare", []), of.get("train_lm", []), figures),
    ]
    texts = ["\n".join(lines) for part in parts if (lines := whole(part))]
    if worse := figures.changes():
        texts.append("\n".join(["figures that are worse than predicted, and what to change:", *worse]))
    return "\n\n".join(texts)


def main() -> None:
    out = Path(sys.argv[1])
    print(page(out, Path(sys.argv[2]) if len(sys.argv) > 2 else out / "logs"))


if __name__ == "__main__":
    main()
