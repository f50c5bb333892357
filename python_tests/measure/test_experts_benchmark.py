"""benchmarks/experts.py at small sizes: every way computes the same, and the table says what was measured."""

import argparse
import json
import sys

import experts
import plot
import pytest
import report
import torch


def test_every_way_computes_the_same(tmp_path, monkeypatch, capsys):
    file = tmp_path / "m" / "experts.jsonl"
    monkeypatch.setattr(sys, "argv", ["experts.py", "--quick", "--no-memory", "--output", str(file)])
    experts.main()
    rows = {row["strategy"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert tuple(rows) == experts.WAYS and all(row["difference"] < experts.CLOSE for row in rows.values())
    ring, divided, both = (rows[name] for name in experts.WAYS[:3])
    assert ring["rows"] == 1 < both["rows"] < divided["rows"]
    assert ring["token_bytes"] == 0 < both["token_bytes"] < divided["token_bytes"]
    part = 4 * 3 * 32 * 64 * 8 // 4 * 2  # of a rank, in two layers; it sends each of its hops three times
    assert ring["shard_bytes"] - divided["shard_bytes"] == 3 * 3 * part
    assert both["shard_bytes"] - divided["shard_bytes"] == 3 * part
    text = report.block("m experts", tmp_path)
    assert text.count("| one host |") == 6 and "Zipf exponent 1" in text
    pytest.importorskip("matplotlib")
    between = [row | {"rate": "1gbit", "hosts": 2, "ranks_per_host": 2} for row in rows.values()]
    file.write_text("\n".join(map(json.dumps, [*rows.values(), *between])))
    plot.main(["experts", str(file), "--output", str(tmp_path / "f"), "--uncommitted"])
    drawn = (tmp_path / "f.svg").read_text()
    assert all(f"milliseconds a step, {where}" in drawn for where in ("one host", "2 hosts of 2, 1gbit"))
    assert all(drawn.count(f"<!-- {name} -->") == 2 for name in experts.WAYS), "a bar of each way in both panels"


def test_a_wrong_loss_is_an_error(monkeypatch):
    monkeypatch.setattr(experts, "gather", lambda value, place: torch.as_tensor(value))
    way = argparse.Namespace(name="rtp-2x2")
    losses = {experts.WAYS[0]: [1.0, 0.9], "rtp-2x2": [1.0, 0.91]}
    with pytest.raises(RuntimeError, match="rtp-2x2: losses differ by 1"):
        experts._row(argparse.Namespace(), None, way, {}, losses, 1.0, {}, {}, {})
