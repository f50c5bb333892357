"""The benchmarks of overlap and of memory, at tiny sizes, and the commands of the GPU suite."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import overlap
import pytest
import torch
from harness import Cases, run_ranks
from live_bytes import LiveBytes
from shared import overlap_options
from shared.card import KEYS, WITHOUT_RESULTS
from shared.launch import Place
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext.measure import layer as measured_layer
from rtp_ext.measure import timing
from rtp_ext.measure.overlap_metrics import Times, metrics, model

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
CPU = torch.device("cpu")
ALONE = Place(0, 1, CPU, None)
TINY = ["--device", "cpu", "--ring", "emulated", "--shapes", "cpu-tiny", "--tokens", "16", "--ranks", "4"]


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone")
def test_results_do_not_make_a_tree_dirty():
    for folder in (ROOT, BENCHMARKS, BENCHMARKS / "shared"):
        listed = ["git", "ls-files", "--full-name", "--", *WITHOUT_RESULTS]
        files = subprocess.run(listed, cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines()
        assert "benchmarks/report.py" in files and "README.md" in files
        assert not [file for file in files if file.startswith("benchmarks/results")]


# -- formulas ----------------------------------------------------------------------------------------------------------


def test_formulas():
    found = metrics(Times(t_g1=80.0, t_gr=100.0, t_c=60.0, t_ov=112.0, t_base=140.0, t_gemm_ov=105.0))
    assert found == pytest.approx(
        {
            "e_hide": (100 + 60 - 112) / 60,
            "roofline": 80 / 112,
            "e_ect": 1 - 32 / 60,
            "ceiling_us": 80.0,
            "ceiling_percent": 8000 / 112,
            "loss_split_us": 20.0,
            "loss_interference_us": 5.0,
            "loss_exposed_us": 7.0,
        }
    )
    assert sum(found[f"loss_{name}_us"] for name in ("split", "interference", "exposed")) == 112 - 80


def test_perfect_serial_and_harmful_overlap():
    def hide(t_ov: float) -> float:
        return metrics(Times(100.0, 100.0, 60.0, t_ov, 160.0, 100.0))["e_hide"]

    assert (hide(100.0), hide(160.0)) == (1.0, 0.0) and hide(170.0) < 0
    # where hops take longer than GEMMs, they are the ceiling
    bound = metrics(Times(50.0, 60.0, 200.0, 210.0, 250.0, 60.0))
    assert bound["ceiling_us"] == 200.0 and bound["e_hide"] == pytest.approx(50 / 60)
    lanes = metrics(Times(50.0, 60.0, 20.0, 55.0, 80.0, 70.0), one_stream=False)
    assert lanes["loss_interference_us"] is lanes["loss_exposed_us"] is None and lanes["loss_split_us"] == 10.0
    without = metrics(Times(50.0, 60.0, 0.0, 60.0, 50.0, 60.0))
    assert without["e_hide"] is None and without["e_ect"] is None


def test_percentiles_are_those_of_the_slowest_rank():
    times = torch.tensor([[1.0, 5.0, 3.0, 9.0, 2.0], [2.0, 4.0, 6.0, 8.0, 1.0]], dtype=torch.float64)
    assert timing.Sample.of(times) == timing.Sample(median=5.0, p20=2.0, p80=pytest.approx(6.6), count=5)
    with pytest.raises(ValueError, match="at least one timed iteration"):
        timing.Sample.of(torch.empty(2, 0))


def test_the_model_is_the_timeline():
    megabytes = 37_000_000  # 100 us at 370 GB/s
    hidden = model(4, {"forward": {"forward": 150.0}}, 580.0, megabytes, 2 * megabytes)
    assert hidden["model_weight_hop_us"] == pytest.approx(100.0) and hidden["model_gradient_hop_us"] is None
    assert hidden["model_t_ov_us"] == pytest.approx(4 * 150) and hidden["model_t_c_us"] == pytest.approx(300)
    assert hidden["model_e_hide"] == pytest.approx(1.0) and hidden["model_roofline"] == pytest.approx(580 / 600)
    exposed = model(4, {"forward": {"forward": 60.0}}, 240.0, megabytes, 2 * megabytes)
    assert exposed["model_t_ov_us"] == pytest.approx(60 + 3 * 100)
    backward = model(4, {"backward": {"dgrad": 150.0, "wgrad": 150.0}}, 1200.0, megabytes, megabytes)
    assert backward["model_t_ov_us"] == pytest.approx(8 * 150)
    assert backward["model_t_ov_shared_us"] > backward["model_t_ov_us"], "200 us do not fit under a dgrad"
    assert all(key.startswith("model_") for key in backward)


def test_cases():
    cases = overlap_options.gpu_cases(overlap_options.DIRECTIONS)
    assert len(cases) == len(set(cases))
    assert all(case.n % case.ranks == 0 for case in cases)
    first = [case for case in cases[:30]]
    assert {case.shape for case in first} == {"llama3-8b", "llama3-70b"} and {case.ranks for case in first} == {8}
    assert {case.tokens for case in first} == {1024, 2048, 4096, 8192, 16384}
    assert {case.shape for case in cases} == {name for name in overlap_options.SHAPES if not name.startswith("cpu")}
    assert {case.ranks for case in cases} == {2, 4, 8}


# -- overlap.py --------------------------------------------------------------------------------------------------------


def check_line(line: dict) -> None:
    assert set(KEYS) <= set(line)
    times = Times(*(line[f"t_{name}_us"] for name in ("g1", "gr", "c", "ov", "base", "gemm_ov")))
    assert metrics(times) == {key: line[key] for key in metrics(times)}
    for name in overlap.QUANTITIES:
        assert 0 < line[f"t_{name}_p20_us"] <= line[f"t_{name}_us"] <= line[f"t_{name}_p80_us"]
    assert not [key for key in line if key.startswith("model_")], "no GPU, no NVLink to predict"


def test_the_whole_command(tmp_path, monkeypatch, capsys):
    file = tmp_path / "made" / "overlap.jsonl"
    options = [*TINY, "--seconds", "0", "--iterations", "3", "--output", str(file)]
    monkeypatch.setattr(sys, "argv", ["overlap.py", *options])
    overlap.main()
    lines = lines_of(file)
    for line in lines:
        check_line(line)
        assert line["iterations"] == 3 and line["transport"] == "emulated" and line["base"] == "hops"
    printed = capsys.readouterr().out.splitlines()
    last = json.loads(printed[-1])
    assert last["measured"] == 3 and [case["e_hide"] for case in last["cases"]] == [line["e_hide"] for line in lines]
    assert sum("% of ceiling" in line for line in printed) == 3


def _measures(rank, ranks, transport, file):
    options = ["--device", "cpu", "--shapes", "cpu-tiny", "--tokens", "16", "--ranks", str(ranks), "--share-cores"]
    options += ["--transport", transport, "--seconds", "0", "--iterations", "2", "--output", file]
    args = overlap_options.parse_arguments(options)
    assert args.ring == "real"
    place = Place(rank, ranks, CPU, init_device_mesh("cpu", (ranks,)))
    return overlap.run_cases(place, args)["rows"]


@pytest.mark.parametrize(("transport", "base"), [("shm", "hops"), ("c10d", "all_gather")])
def test_real_ranks(tmp_path, transport, base):
    file = tmp_path / "overlap.jsonl"
    rows = run_ranks(_measures, 2, transport, str(file))
    assert rows[0] == lines_of(file), "rank 0 writes"
    for mine, other in zip(*rows, strict=True):
        check_line(mine)
        assert (mine["transport"], mine["base"], mine["link"]) == (transport, base, None)
        assert mine["weight_hop_bytes"] == 96 * 64 * 4
        assert all(mine[f"t_{name}_us"] == other[f"t_{name}_us"] for name in overlap.QUANTITIES), "the slowest rank's"


def measure(tmp_path, *options):
    args = overlap_options.parse_arguments(
        [*TINY, "--seconds", "0", "--iterations", "1", "--output", str(tmp_path / "o.jsonl"), *options]
    )
    return overlap.run_cases(ALONE, args), args


def test_what_is_measured_is_not_measured_again(tmp_path, monkeypatch, capsys):
    def card(commit):
        monkeypatch.setattr(overlap, "environment_card", lambda *_: {"commit": commit})

    counts = []
    for commit, options in (("abc", []), ("abc", []), ("abc", ["--again"]), ("abd", []), ("abd-dirty", [])):
        card(commit)
        counts.append(len(measure(tmp_path, "--directions", "forward,backward", *options)[0]["rows"]))
    card("abd-dirty")
    counts.append(len(measure(tmp_path, "--directions", "forward")[0]["rows"]))
    assert counts == [2, 0, 2, 2, 2, 1]
    assert len(lines_of(tmp_path / "o.jsonl")) == sum(counts)
    assert "measured already" in capsys.readouterr().out


def test_the_budget_ends_between_cases(tmp_path):
    results, _ = measure(tmp_path, "--budget", "1e-9")
    assert results["rows"] == [] and len(results["left"]) == 3


@pytest.mark.parametrize("direction", ["forward", "backward", "step"])
def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch, direction):
    right = rtp_ext.functional.rotated_linear
    monkeypatch.setattr(rtp_ext.functional, "rotated_linear", lambda x, *a, **k: right(x * (1 + 1e-3), *a, **k))
    with pytest.raises(measured_layer.WrongResult, match="nothing is timed"):
        measure(tmp_path, "--directions", direction)
    assert not lines_of(tmp_path / "o.jsonl")


def test_hops_that_are_not_those_of_the_operation_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(measured_layer.TimedLayer, "c", lambda self, pass_: None)
    with pytest.raises(measured_layer.WrongResult, match="hops run alone"):
        measure(tmp_path)


@pytest.mark.parametrize("ranks", [2, 3])
def test_hops_alone_travel_as_the_layer_does(ranks):
    """Gradients in halves: twice as many hops. A gathered layer is none that rotates."""
    hops = {}
    for halves in (False, True):
        ring = rtp_ext.Ring.emulated(ranks, gradient_halves=halves, prefetch=0)
        layer = measured_layer.TimedLayer(ring, 8 * ranks, 16, 12, torch.float32)
        layer.check("step")
        layer.check_hops(("forward", "backward"))
        assert layer.halves is halves
        hops[halves] = layer._sent_by(layer.c, "backward")[1]
    assert hops[True] == 2 * hops[False] > 0
    with pytest.raises(ValueError, match="expected a layer that rotates, got one that is gathered: as asked"):
        measured_layer.TimedLayer(rtp_ext.Ring.emulated(ranks, route="gather"), 8 * ranks, 16, 12, torch.float32)


def test_hops_alone_in_fewer_bits():
    """The separately timed products and the reference use the travelling values; exact weights would not pass."""
    direct = {"travel": "int8", "gradient_route": "direct"}
    for options, reduce in (
        (direct, torch.bfloat16),
        (direct | {"gradient_travel": "int8"}, None),
        ({"travel": "bfloat16"}, torch.bfloat16),
    ):
        ring = rtp_ext.Ring.emulated(3, prefetch=0, **options)
        ring.slot_cap = 5 * 40 * 4  # in chunks, each with its own blocks
        layer = measured_layer.TimedLayer(ring, 24, 40, 12, torch.float32, reduce_dtype=reduce)
        layer.check("step")
        layer.check_hops(measured_layer.PASSES)
        assert layer.direct == ("gradient_route" in options) and len(layer.chunks()) == 2
        assert set(layer.timed_pass("backward")) == {"dgrad", "wgrad"}
        layer.whole = layer.shard.detach().repeat(3, 1)
        with pytest.raises(measured_layer.WrongResult, match="output"):
            layer.check("step")


def test_shards_that_travel_in_pieces(tmp_path):
    """A slot cap of ten rows: five chunks of a shard, with as many hops in the separate timing."""
    results, _ = measure(tmp_path, "--slot-cap", str(10 * 64 * 4))
    assert [row["pieces"] for row in results["rows"]] == [5, 5, 5]
    assert results["rows"][0]["slot_bytes"] < 3 * 10 * 64 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--iterations", "0"], "at least 1"),
        (["--shapes", "llama-9b"], "unknown shape 'llama-9b'"),
        (["--directions", "sideways"], "unknown direction"),
        (["--link", "ce-local"], "--link is of an emulated ring on a GPU"),
        (["--ranks", "1"], "--ranks must be at least 2"),
        (["--ranks", "5"], "do not divide"),
        (["--ring", "real", "--ranks", "64"], "would share"),
        (["--graph"], "--graph needs a GPU"),
        (["--max-ctas", "4"], "real ring of GPUs"),
        (["--budget", "0"], "--budget above 0"),
        (["--output", "/proc/overlap.jsonl"], "cannot be written"),
        (["--trace", "/proc/none/trace"], "no file can be made in /proc/none"),
        (["--threads", "-1"], "expected at least 0, got -1"),
        (["--slot-cap", "-1"], "--slot-cap must be at least 0, got -1"),
        (["--seconds", "inf"], "at least 0 and finite"),
        (["--tokens", "4,4"], "--tokens: expected each once"),
        (["--ring", "emulated", "--transport", "nccl"], "--transport nccl is of a real ring"),
        (["--ring", "emulated", "--share-cores"], "--share-cores is of a real ring"),
        (["--ring", "emulated", "--threads", "7"], "--threads 7 is of a real ring"),
    ],
)
def test_absurd_wishes_are_refused(options, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        overlap_options.parse_arguments([*TINY, "--output", str(tmp_path / "o.jsonl"), *options])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_links_are_checked_as_if_there_were_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = ["--ring", "emulated", "--output", str(tmp_path / "o.jsonl"), "--link"]
    good = "ce-local,ce-local:4,sm-local,nccl-self,nccl-self:16,pcie"
    args = overlap_options.parse_arguments([*options, good])
    assert args.links == good.split(",") and args.dtype == "bfloat16" and len(args.cases) > 30
    for bad in ("ce-local:3", "nccl-self:0", "nvlink", "model"):
        with pytest.raises(SystemExit):
            overlap_options.parse_arguments([*options, bad])
        assert f"unknown link '{bad}'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        overlap_options.parse_arguments([*options, "sm-local,ce-local:4", "--graph"])
    assert "expected sm-local, not ce-local" in capsys.readouterr().err
    assert overlap_options.parse_arguments([*options, "sm-local", "--graph"]).graph


# -- memory_per_rank.py ------------------------------------------------------------------------------------------------


MEMORY = {"model": "tiny", "ranks": 8, "tokens": 64, "seq": 64, "layers": 2, "dtype": "float32"}
MEMORY |= {"parameter_dtype": "float32", "checkpoint": False, "device": "cpu", "command": "typed"}


def _remembers(rank, ranks):
    """Runs in a separate process, where a fake process group can be the default."""
    dist.destroy_process_group()
    import memory_per_rank

    args = SimpleNamespace(**MEMORY)
    size = memory_per_rank.SIZES["tiny"]
    block = 4 * size.hidden**2 + 3 * size.hidden * size.inner + 2 * size.hidden
    whole = 4 * (size.layers * block + 2 * size.vocabulary * size.hidden + size.hidden)
    norms = 4 * (2 * size.layers + 1) * size.hidden  # whole on an emulated ring, and in tensor parallelism
    expected = {"rtp-fused": (whole - norms) // 8 + norms, "ddp": whole, "fsdp2": whole // 8}
    expected["tp"] = expected["rtp-fused"]
    cases = Cases()
    for strategy, parameters in expected.items():
        with cases.case(strategy):
            line = memory_per_rank.measure(strategy, args)
            assert set(KEYS) <= set(line)
            assert line["parameter_bytes"] == parameters, line
            # torch leaves the gradient of a table whole in tensor parallelism
            assert line["gradient_bytes"] == parameters or strategy == "tp", line
            assert parameters * 2 <= line["optimizer_bytes"] <= parameters * 2.01
            kept = sum(line[f"{kind}_bytes"] for kind in ("parameter", "gradient", "optimizer"))
            assert line["peak_bytes"] == kept + line["transient_bytes"] and line["reserved_bytes"] is None
            assert line["computed_tokens"] == (512 if strategy == "tp" else 64)
        if dist.is_initialized():
            dist.destroy_process_group()
    for strategy in ("tp", "fsdp2"):
        with cases.case(f"{strategy} is never whole"), LiveBytes() as live:
            memory_per_rank.build(strategy, size, 2, args, CPU)
            assert expected[strategy] <= live.peak <= 1.2 * expected[strategy], live.peak
        dist.destroy_process_group()
    _check_retries(cases, memory_per_rank, args)
    _check_refusals(cases, memory_per_rank)
    cases.finish()


def _check_retries(cases, memory_per_rank, args):
    """A model that does not fit is run with half as many layers; any other failure ends the run."""

    def end_with(*statuses):
        left, tried = list(statuses), []

        def start(command, **_):
            tried.append(int(command[command.index("--layers") + 1]))
            return SimpleNamespace(returncode=left.pop(0), stdout='some text\n{"strategy": "ddp"}\n')

        memory_per_rank.subprocess = SimpleNamespace(run=start, PIPE=subprocess.PIPE)
        with contextlib.redirect_stdout(io.StringIO()):
            return memory_per_rank.in_a_process_of_its_own("ddp", SimpleNamespace(**{**vars(args), "layers": 8})), tried

    with cases.case("retries"):
        assert end_with(3, 3, 0) == ({"strategy": "ddp"}, [8, 4, 2])
        assert end_with(3, 3, 3, 3) == (None, [8, 4, 2, 1])
        with pytest.raises(memory_per_rank.Failed, match="failed with status 1"):
            end_with(1)
        assert memory_per_rank.ran_out_of_memory(torch.OutOfMemoryError("CUDA"))
        assert not memory_per_rank.ran_out_of_memory(RuntimeError("a wrong shape"))


def _check_refusals(cases, memory_per_rank):
    for options, message in (
        (["--strategies", "zero3"], "unknown strategy 'zero3'"),
        (["--tokens", "100", "--seq", "64"], "not a multiple"),
        (["--ranks", "16"], "cannot cut 8 kv heads"),
        (["--layers", "-1"], "at least 1"),
    ):
        told = io.StringIO()
        with cases.case(str(options)), contextlib.redirect_stderr(told):
            with pytest.raises(SystemExit):
                memory_per_rank.parse_arguments(["--model", "tiny", *options])
            assert message in told.getvalue()


def test_memory_of_a_rank():
    pytest.importorskip("transformers")
    run_ranks(_remembers, 1)
