"""The comparison of strategies with Muon: optimizers against torch's in one process, bytes, checks and tables."""

import contextlib
import json
from types import SimpleNamespace

import compare
import pytest
import report
import torch
from harness import Cases, run_ranks
from matrix_optimizers import Muon as Stock
from reference import full
from shared import card, compare_options
from shared.models import WORKLOADS
from shared.optimizers import MUONS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rtp_ext.optim import matrices

COMPARE = report.ROOT / "benchmarks" / "results" / "cpu-2core" / "compare.jsonl"
OPTIONS = ["--device", "cpu", "--model", "mlp-tiny", "--tokens", "16", "--optimizer", "muon", "--output", "/dev/null"]
SHARDED = ("rtp", "rtp-gram", "rtp-whole", "fsdp2", "fsdp2-gathered")
CLOSE = 1e-4  # of the updates so far; gradients are of rank 32, where `gram` errs by 6e-5 (docs/optimizers.md)
STEPS = 2


def _compares(rank, ranks):
    from shared import optimizers
    from shared.launch import Place

    place = Place(rank, ranks, torch.device("cpu"), init_device_mesh("cpu", (ranks,)))
    args = compare_options.parse_arguments([*OPTIONS, "--steps", "1", "--warmup", "1"])
    cases, make = Cases(), compare.make_trainer
    batches = [compare.make_batch(args, 16, [each], place.device) for each in range(ranks)]
    expected = _trained_alone(args, batches)
    before = [parameter.detach() for parameter in _plain(args)[0].parameters()]

    def errors(strategy):
        """Of each parameter the norm of the difference, relative to that of its updates."""
        trainer = make(strategy, place, args)
        for _ in range(STEPS):
            trainer.step(*batches[rank])
        weights = [full(parameter.detach()) for parameter in trainer.model.parameters()]
        trainer.close()
        return [
            ((found - right).norm() / (right - start).norm()).item()
            for found, right, start in zip(weights, expected, before, strict=True)
        ]

    for strategy in (*SHARDED, "ddp"):
        with cases.case(f"{strategy} against torch's in one process"):
            assert max(errors(strategy)) < CLOSE, errors(strategy)

    def rows(*strategies):
        return {row["strategy"]: row for row in compare.measure_time(place, args_of(strategies))}

    def args_of(strategies):
        return SimpleNamespace(**{**vars(args), "strategies": list(strategies), "network": None})

    with cases.case("rows"):
        found = rows(*SHARDED, "ddp", "single")
        if rank == 0:
            assert [row["muon"] for row in found.values()] == [*MUONS, "stock", "stock"]
            sent = {name: row["exchange_bytes"] for name, row in found.items()}
            assert {sent[name] for name in found if name not in SHARDED[:3]} == {None}
            assert 0 < sent["rtp-gram"] < sent["rtp-whole"] == 4 * 192 * 64 * 2, sent
            for row in found.values():
                assert row["matrix_bytes"] == 4 * 4 * 64 * 192 and row["optimizer_sent_bytes"] is None
                assert row["loss_spread"] < 1e-5 and row["optimizer"] == "muon"
                assert row["optimizer_p20_ms"] <= row["optimizer_ms"] <= row["optimizer_p80_ms"] < row["step_ms"] * 2
    with cases.case("control: shards that are iterated apart"):
        optimizers.StockMuon.iterate, right = staticmethod(_apart), optimizers.StockMuon.iterate
        assert max(errors("fsdp2")) > 0.1
        found = rows("fsdp2", "ddp")
        optimizers.StockMuon.iterate = staticmethod(right)
        if rank == 0:
            with pytest.raises(SystemExit, match=r"the strategies differ: losses by \S+ \(relative; at most 1e-04"):
                compare.report(list(found.values()), args_of(["fsdp2", "ddp"]))
    with cases.case("another division of the parameters"):

        def divided(strategy, *others):
            trainer = make(strategy, *others)
            trainer.optimizer.matrix_bytes += 4 * (strategy == "ddp")
            return trainer

        compare.make_trainer = divided
        differ = pytest.raises(RuntimeError, match="gave Muon different matrices, of ")
        with differ if rank == 0 else contextlib.nullcontext():
            rows("rtp", "ddp")
    cases.finish()


def _apart(update, *settings):
    """The wrong way: this rank's part of a matrix by itself."""
    from shared.optimizers import _iterate

    if not isinstance(update, DTensor):
        return _iterate(update, *settings)
    return DTensor.from_local(_iterate(update.to_local(), *settings), update.device_mesh, update.placements)


def _plain(args):
    torch.manual_seed(args.seed)
    model = WORKLOADS[args.model].build()
    hidden, rest = matrices(model)
    return model, [Stock(hidden, lr=args.lr, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(rest, lr=args.lr)]


def _trained_alone(args, batches):
    model, optimizers = _plain(args)
    for _ in range(STEPS):
        model.zero_grad()
        (sum(model(*batch) for batch in batches) / len(batches)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_muon_is_the_same_with_every_strategy():
    run_ranks(_compares, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategies", "tp"], "cannot be trained with tp: it is not compared with Muon"),
        (["--strategies", "rtp-gram", "--optimizer", "adamw"], "with rtp-gram: it needs --optimizer muon"),
        (["--dtype", "bfloat16"], "expected float32 in everything"),
        (["--travel", "int8"], "expected float32 in everything"),
        (["--reduce-dtype", "bfloat16"], "expected float32 in everything"),
    ],
)
def test_refusals(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        compare_options.parse_arguments([*OPTIONS, *options])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_defaults(tmp_path, monkeypatch):
    monkeypatch.setattr(card, "RESULTS", tmp_path)
    muon = compare_options.parse_arguments([*OPTIONS[:-2]])
    adamw = compare_options.parse_arguments([*OPTIONS[:-2], "--optimizer", "adamw"])
    assert (muon.output.name, muon.lr, adamw.output.name, adamw.lr) == ("muon.jsonl", 5e-3, "compare.jsonl", 1e-4)
    assert muon.strategies == [*SHARDED, "ddp", "single", "none"]
    assert not {"rtp-gram", "rtp-whole", "fsdp2-gathered"} & set(adamw.strategies) and "tp" in adamw.strategies


def rows_with_muon():
    """Returns lines of muon.jsonl: an old run and a new one on one host, with 2 and 4 ranks, and one between hosts."""
    base = {**json.loads(COMPARE.read_text().splitlines()[0]), "dtype": "float32", "cores_shared": False}
    base |= {"loss_spread": 2e-6, "matrix_bytes": 24 * 2**20, "optimizer_bytes": 2**20, "peak_bytes": 7 * 2**20}
    base |= {
        "p20_ms": 90.0,
        "p80_ms": 130.0,
        "optimizer_p20_ms": 40.0,
        "optimizer_p80_ms": 60.0,
        "command": "compare.py",
    }
    runs = [("2026-01-01", 2, None, 2.0), ("2026-01-02", 2, None, 1.0), ("2026-01-02", 4, None, 1.0)]
    rows = []
    for date, ranks, rate, scale in [*runs, ("2026-01-02", 2, "1gbit", 1.0), ("2026-01-02", 2, "2gbit", 1.0)]:
        for strategy, muon, update, own in (
            ("rtp-gram", "gram", 50.0, 2**20),
            ("fsdp2", "stock", 200.0, None),
            ("rtp", "auto", 40.0, 2**19),
        ):
            row = {"strategy": strategy, "muon": muon, "step_ms": 100.0 * scale, "optimizer_ms": update * scale}
            row |= {
                "exchange_bytes": own,
                "optimizer_sent_bytes": 3 * 2**20 if rate else None,
                "date": date,
                "ranks": ranks,
            }
            rows.append({**base, **row, **({"hosts": 2, "rate": rate} if rate else {})})
    return rows


def test_tables(tmp_path):
    assert report.block("m muon", tmp_path) == report.block("m muon hosts", tmp_path) == "\n", "no results yet"
    (tmp_path / "m").mkdir()
    file = tmp_path / "m" / "muon.jsonl"
    file.write_text("\n".join(map(json.dumps, rows_with_muon())))
    text = report.block("m muon", tmp_path)
    assert text.count("| 100 (90-130) |") == 6 and "200 (" not in text.replace("200 (40-60)", ""), "the old run"
    gram = '| rtp | `rtp_ext.optim`, `exchange="gram"` | 100 (90-130) | 50 (40-60) | 0.80 | 1.00 | 1.00 | 7.00 |'
    assert f"| 2 {gram}" in text and f"| 4 {gram}" in text and "| rate |" not in text and "kernel" not in text
    assert "| `fully_shard` per block | `torch.optim` | 100 (90-130) | 200 (40-60) | 0.20 | | 1.00 | 7.00 |" in text
    about = " ".join(text.split())
    assert "24.0 MiB of matrices. Largest relative difference of losses: 2e-06." in about and "hosts" not in about
    between = report.block("m muon hosts", tmp_path)
    assert between.count("| 1gbit |") == between.count("| 2gbit |") == 3 and "| 4 |" not in between
    assert "| 0.80 | 1.00 | 3.00 | 1.00 | 7.00 |" in between and "2 hosts made on this machine." in " ".join(
        between.split()
    )
    other = {**rows_with_muon()[3], "ranks": 8, "shape": "another"}
    file.write_text("\n".join(map(json.dumps, [*rows_with_muon(), other])))
    with pytest.raises(ValueError, match="expected rows of one shape in a table"):
        report.block("m muon", tmp_path)
