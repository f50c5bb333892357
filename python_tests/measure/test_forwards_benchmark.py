"""benchmarks/forwards.py at small sizes: every strategy computes the same, and the tables say what was measured."""

import json
import sys

import forwards
import plot
import pytest
import report
from forwards import surprises
from shared.table import read_lines


def test_the_whole_command(tmp_path, monkeypatch, capsys):
    file = tmp_path / "m" / "forwards.jsonl"
    monkeypatch.setattr(sys, "argv", ["forwards.py", "--quick", "--rates", "local", "--output", str(file)])
    forwards.main()
    lines = read_lines(file)
    equal, unequal = ([line for line in lines if line["work"] == work] for work in ("equal", "unequal"))
    strategies = ["none", *forwards.USUAL]
    assert [(line["tokens"], line["strategy"]) for line in equal] == [(t, s) for t in (8, 32) for s in strategies]
    assert [line["strategy"] for line in unequal] == ["none", "rtp-shm", "rtp-tcp", "fsdp2"]
    for line in equal:
        assert line["tokens_per_s"] == pytest.approx(2e3 * line["tokens"] / line["step_ms"])
        assert line["roof_ms"] == line["reference_ms"] > 0 and line["difference"] < 1e-5
    kept = {line["strategy"]: line["kept_bytes"] for line in equal}
    norms = 2 * 2 * 64 * 4
    cut = kept["none"] - norms
    assert kept["rtp-shm"] == cut // 2 + norms
    assert kept["pipeline"] == kept["fsdp2"] == kept["none"] // 2
    slot = 2 * 64 * 128 * 4 // 2 + 512  # weights of a bundle, and its biases
    assert kept["rtp-shm"] < kept["rtp-tcp"] <= kept["rtp-shm"] + 2 * slot
    assert [line["alone_ms"] is None for line in unequal] == [False, False, False, True]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(last["cases"]) == len(lines) and last["unexpected"] == surprises(lines)

    tables = [report.block(f"m forwards {work}", tmp_path) for work in ("equal", "unequal")]
    assert "of the roof" in tables[0] and "of that rank alone" not in tables[0] and "MiB that leave" not in tables[0]
    assert "of that rank alone" in tables[1] and tables[1].count("\n| one host") == 4
    with pytest.raises(ValueError, match="expected forwards equal or forwards unequal"):
        report.block("m forwards", tmp_path)
    assert report.block("nothing forwards equal", tmp_path) == "\n"
    plot.main(["forwards", str(file), "--uncommitted", "--output", str(tmp_path / "figure")])
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_surprises_name_what_is_slower_than_expected():
    fast = {"tokens": 64, "rate": "1gbit", "step_ms": 105.0, "reference_ms": 100.0, "roof_ms": 100.0}
    alone = {"tokens": 64, "strategy": "rtp-tcp", "work": "unequal", "fast_ms": 100.0, "alone_ms": 100.0}
    alone |= {"reference_ms": 90.0, "reference_alone_ms": 95.0}
    rows = [fast | {"strategy": name, "work": "equal"} for name in ("none", "rtp-shm", "rtp-tcp", "fsdp2")]
    assert surprises([*rows, alone]) == []
    slower = [row | {"step_ms": 111.0} for row in rows]
    texts = surprises([*slower, alone | {"fast_ms": 106.0}])
    assert texts == [
        "rtp-shm, 64 tokens, 1gbit: 1.11 of no communication, at most 1.05 expected",
        "rtp-tcp, 64 tokens, 1gbit: 1.11 of the roof, at most 1.10 expected",
        "rtp-tcp, 64 tokens, one host: 1.06 of the rank alone, at most 1.05 expected",
    ]
    assert surprises([alone | {"fast_ms": 106.0, "reference_ms": 97.0}]) == [], "ranks share memory"
    assert len(surprises([rows[2] | {"step_ms": float("nan")}])) == 1


@pytest.mark.parametrize("difference", [1e-3, float("nan")])
def test_wrong_outputs_are_an_error(difference):
    forwards.expect_close("fsdp2", 1e-5)
    with pytest.raises(RuntimeError, match=r"fsdp2, 64 tokens: the output differs by .* from that of the plain model"):
        forwards.expect_close("fsdp2, 64 tokens", difference)
