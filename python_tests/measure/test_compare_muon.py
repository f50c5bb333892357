"""The comparison of strategies with Muon: its optimizers against torch's in one process, its bytes, and its checks."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from harness import Cases, run_ranks
from matrix_optimizers import Muon as Stock
from reference import full
from shared.models import WORKLOADS
from shared.options import compare_options
from shared.reports.compare_report import report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rtp_ext.optim import matrices

OPTIONS = ["--device", "cpu", "--model", "mlp-tiny", "--tokens", "16", "--optimizer", "muon", "--output", "/dev/null"]
SHARDED = ("rtp", "rtp-gram", "rtp-whole", "fsdp2", "fsdp2-gathered")
CLOSE = 1e-4  # of the updates so far; gradients are of rank 32, where `gram` errs by 6e-5 (docs/optimizers.md)
STEPS = 2


def _compares(rank, ranks):
    import compare
    from shared import optimizers
    from shared.launch import Place

    place = Place(rank, ranks, torch.device("cpu"), init_device_mesh("cpu", (ranks,)))
    args = compare_options.parse_arguments([*OPTIONS, "--steps", "2", "--warmup", "1"])
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
            assert [row["muon"] for row in found.values()] == "auto gram whole stock gathered stock stock".split()
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
            with pytest.raises(SystemExit, match=r"the strategies differ: losses by \S+ \(relative; at most 1e-03"):
                report(list(found.values()), args_of(["fsdp2", "ddp"]))
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


def test_defaults():
    muon = compare_options.parse_arguments([*OPTIONS[:-2]])
    adamw = compare_options.parse_arguments([*OPTIONS[:-2], "--optimizer", "adamw"])
    assert (muon.output.name, muon.lr, adamw.output.name, adamw.lr) == ("muon.jsonl", 5e-3, "compare.jsonl", 1e-4)
    assert muon.strategies == [*SHARDED, "ddp", "single", "none"]
    assert not {"rtp-gram", "rtp-whole", "fsdp2-gathered"} & set(adamw.strategies) and "tp" in adamw.strategies
