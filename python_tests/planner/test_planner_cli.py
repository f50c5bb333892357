"""`python -m rtp_ext plan`: its output, drawings and refusals."""

import csv
import io
import json
import re
import subprocess
import sys

import pytest

from rtp_ext.__main__ import main
from rtp_ext.command_line import WIDTH
from rtp_ext.planner import Cluster, ModelSpec, Strategy, estimate_memory

LLAMA = ["plan", "--model", "llama-3-8b", "--gpu", "h100-80gb"]


def _run(capsys, *arguments):
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    told = capsys.readouterr()
    return status, told.out, told.err


def test_table(capsys):
    status, out, err = _run(capsys, *LLAMA, "--gpus", "16", "--pp", "4", "--zero", "1", "--global-batch", "32")
    assert (status, err) == (0, "")
    assert "dp=4 pp=4 zero=1" in out and "8.03e9 parameters" in out and "80.00 GB each" in out
    assert "32 samples in 8 micro-batches" in out
    assert "memory in GB" in out and all(
        column in out for column in ("params", "grads", "optim", "activ", "pipeline", "allocated")
    )
    report = estimate_memory(
        ModelSpec.preset("llama-3-8b"), Cluster.preset("h100-80gb", gpus=16), Strategy(dp=4, pp=4, zero=1), 32
    )
    shown = [line.split() for line in out.splitlines() if re.match(r"^ +\d ", line)]
    assert [line[-1] for line in shown] == [f"{stage.allocated_bytes / 1e9:.2f}" for stage in report.stages]
    verdict, step = " ".join(out.split()).split(" step: ")
    assert " fits: " in verdict and "TFLOP/s" in step and "bubble" in step
    assert max(map(len, out.splitlines())) <= WIDTH


def test_json_and_csv(capsys):
    plans = ["--plan", "rtp=8,fused_loss,bundle=recompute", "--plan", "zero=3, recompute=full, micro-batch=2"]
    status, out, err = _run(capsys, *LLAMA, *plans, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told["model"]["parameters"] == 8_030_261_248 and told["cluster"]["memory_bytes"] == 80e9
    rtp, fsdp = told["plans"]
    assert (rtp["strategy"]["rtp"], rtp["strategy"]["dp"], rtp["strategy"]["bundle"]) == (8, 1, "recompute")
    assert (fsdp["strategy"]["dp"], fsdp["strategy"]["zero"], fsdp["global_batch"]) == (8, 3, 16)
    assert rtp["components_bytes"]["rotation_slots"] > 0 == fsdp["components_bytes"]["rotation_slots"]
    status, out, _ = _run(capsys, *LLAMA, *plans, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert status == 0 and [row["plan"] for row in rows] == [plan["plan"] for plan in told["plans"]]
    for row, plan in zip(rows, told["plans"], strict=True):
        assert int(row["allocated_bytes"]) == round(plan["peak_allocated_bytes"])
        assert row["verdict"] == plan["verdict"]
        assert float(row["step_seconds"]) == pytest.approx(plan["time"]["step_seconds"], rel=1e-5)
        assert float(row["gemm_seconds"]) == pytest.approx(plan["time"]["components_seconds"]["gemm"], rel=1e-5)


def test_explain_can_be_checked_by_hand(capsys):
    plan = ["--tp", "2", "--pp", "2", "--gpus", "8", "--zero", "1", "--sequence-parallel", "--schedule", "gpipe"]
    status, out, _ = _run(capsys, *LLAMA, *plan, "--explain")
    assert status == 0
    checked = 0
    lines = re.findall(r"^    = ([\d.e+ */()-]+) = ([\d.e+-]+)( GB| s| TFLOP/s)?$", out, re.MULTILINE)
    for filled, value, unit in lines:
        expected = float(value) * (1e9 if unit == " GB" else 1)
        near = {"rel": 1e-4} if unit in (" s", " TFLOP/s") else {"abs": 0.006e9 if unit else 0.5}
        assert eval(filled) == pytest.approx(expected, **near), filled
        checked += 1
    assert checked == len(re.findall(r"^    = ", out, re.MULTILINE)) > 45
    assert {unit for *_, unit in lines} == {"", " GB", " s", " TFLOP/s"}
    for name in ("parameters", "gradients", "optimizer", "activations", "logits_and_loss", "pipeline_buffers"):
        (total,) = re.findall(rf"^{name}: ([\d.]+) GB", out, re.MULTILINE)
        block = out.split(f"\n{name}: ")[1].split("\n\n")[0]
        parts = [float(value) for value in re.findall(r"= ([\d.]+) GB$", block, re.MULTILINE)]
        assert sum(parts) == pytest.approx(float(total), abs=0.006 * (1 + len(parts))), name
    assert "0.8 * 80000000000 bytes = 64.00 GB" in out


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    status, _, err = _run(capsys, *LLAMA, "--plan", "rtp=8", "--plan", "zero=3", "--plot", str(picture))
    assert status == 0 and str(picture) in err
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    status, out, err = _run(capsys, *LLAMA, "--dp", "8", "--plot", str(tmp_path / "no" / "such.png"))
    assert status == 1 and "cannot draw" in err and "allocated" in out


def test_models_by_size_by_configuration_and_clusters_by_file(tmp_path, capsys):
    sizes = ["plan", "--family", "gpt", "--layers", "12", "--hidden", "768", "--heads", "12", "--seq", "1024"]
    status, out, _ = _run(capsys, *sizes, "--gpus", "1", "--dp", "1", "--json")
    assert status == 0 and json.loads(out)["model"]["parameters"] == 124_439_808
    config = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "cluster.json").write_text('{"base": "a100-80gb", "name": "mine", "memory_bytes": 1e9}')
    cluster = ["--cluster", str(tmp_path / "cluster.json"), "--gpus", "4", "--gpus-per-node", "2"]
    status, out, _ = _run(capsys, "plan", "--hf-config", str(tmp_path), *cluster, "--dp", "4", "--json")
    told = json.loads(out)
    assert status == 0 and told["model"]["parameters"] == 124_439_808
    assert (told["cluster"]["name"], told["cluster"]["gpus"], told["cluster"]["gpus_per_node"]) == ("mine", 4, 2)
    assert told["plans"][0]["verdict"] == "out of memory"


def test_links_of_a_node_and_the_range_of_the_host(capsys):
    from rtp_ext.planner.constants import driver_call_range

    least, most = driver_call_range()
    ring = ("plan", "--model", "gpt-3-small", "--gpu", "l40s-48gb", "--gpus", "4", "--rtp", "4", "--buffers", "lean")
    hosts = []
    for link, rate, calls in (("pcie", 20e9, 11.44), ("host memory", 12e9, 4.44)):
        status, out, _ = _run(capsys, *ring, "--link", link, "--json")
        assert status == 0 and json.loads(out)["cluster"]["nccl_ring_bytes_per_s"] == rate
        _, out, _ = _run(capsys, *ring, "--link", link, "--explain")
        told = re.findall(r"host: (\S+) s, with (\d+) driver calls of \S+ s, as .* took: (\S+) s at", out)
        hosts.append([tuple(map(float, each)) for each in told])
        for high, number, low in hosts[-1]:
            assert high - low == pytest.approx(number * (most - least), rel=0.01)
            computes = 3.75 * (3 * 4 * 3 + 2 * 4)  # four shards of each operation, gradients of linears in halves
            hops = (number - computes) / (3 * 3) / calls
            assert hops == pytest.approx(3, abs=0.1), (link, number)
    assert [a < b for a, b in zip(*hosts, strict=True)] == [True] * len(hosts[0]), "NCCL takes the host longer"
    assert len(hosts[0]) == 1


LAYER = """
import torch

def layer():
    with torch.device("meta"):
        return torch.nn.Linear(8, 8), (torch.empty(1000, 8, requires_grad=True),)

def wrong():
    return torch.nn.Linear(8, 8)
"""


def test_trace_module(tmp_path, capsys):
    pytest.importorskip("torch")
    file = tmp_path / "layer.py"
    file.write_text(LAYER)
    status, out, _ = _run(capsys, *LLAMA, "--gpus", "1", "--trace-module", f"{file}:layer", "--explain")
    assert status == 0 and "traced layers" in out and "= 32000 * 32 * 1" in out
    for target, message in (
        (f"{file}:nothing", "has no function nothing"),
        (f"{file}:wrong", "to return a module and a tuple"),
        (str(tmp_path / "none.py:layer"), "cannot load"),
        ("layer", "expected MODULE:FUNCTION"),
    ):
        status, out, err = _run(capsys, *LLAMA, "--trace-module", target)
        assert (status, out) == (2, "") and message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*LLAMA, "--gpus", "0"], "gpus"),
        ([*LLAMA, "--gpus", "-3"], "gpus"),
        ([*LLAMA, "--gpus", "many"], "--gpus"),
        ([*LLAMA, "--tp", "3", "--gpus", "3"], "heads divisible by tp"),
        ([*LLAMA, "--tp", "3"], "divisible by tp"),
        ([*LLAMA, "--dp", "8", "--global-batch", "4"], "global batch"),
        ([*LLAMA, "--dp", "99"], "the cluster has 8"),
        ([*LLAMA, "--tp", "0"], "tp to be a whole number"),
        ([*LLAMA, "--seq", "0"], "seq to be a whole number"),
        ([*LLAMA, "--plan", "speed=3"], "unknown field 'speed'"),
        ([*LLAMA, "--plan", "rpt=8"], "did you mean rtp?"),
        ([*LLAMA, "--plan", "rtp"], "expected rtp=NUMBER, got rtp alone"),
        ([*LLAMA, "--plan", "zero=3,route"], "expected route=VALUE, got route alone"),
        ([*LLAMA, "--zer0", "3"], "did you mean --zero?"),
        ([*LLAMA, "--plan", "tp=two"], "whole number"),
        ([*LLAMA, "--plan", "fused_loss=perhaps"], "yes or no"),
        ([*LLAMA, "--schedule", "magic"], "magic"),
        ([*LLAMA, "--top", "0"], "--top"),
        (["plan", "--when", "--csv"], "--when has no --csv"),
        ([*LLAMA, "--when", "--min-gpus"], "expected one of"),
        ([*LLAMA, "--global-batch", "0"], "global_batch"),
        (["plan", "--calibrate", "/no/such/runs.csv"], "/no/such/runs.csv: no such file"),
        (["plan", "--model", "llama-3-8b", "--gpu", "abacus"], "unknown GPU 'abacus'"),
        (["plan", "--model", "llama-3-8b", "--gpu", "H100"], "did you mean h100-80gb?"),
        (["plan", "--model", "gpt-17"], "unknown model 'gpt-17'"),
        (["plan", "--model", "llama3-8b"], "did you mean llama-3-8b?"),
        (["plan"], "--model"),
        (["plan", "--layers", "3"], "--hidden"),
        (["plan", "--model", "llama-3-8b", "--layers", "3"], "expected one of"),
        (["plan", "--hf-config", "/no/such/config.json"], "/no/such/config.json: no such file"),
        ([*LLAMA, "--cluster", "/no/such/cluster.json"], "not both"),
        (["plan", "--model", "llama-3-8b", "--cluster", "c.json", "--link", "pcie"], "in the file of --cluster"),
        (["plan", "--model", "llama-3-8b", "--gpu", "rtx-4090-24gb", "--link", "nvlink"], "NVLink does not join"),
    ],
)
def test_nonsense_gets_one_line_and_status_2(capsys, arguments, message):
    status, out, err = _run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("rtp-ext plan: error: ") and message in err and "Errno" not in err


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--calibrate", "name,size\na,3\n", "expected a CSV, or JSON lines.*got the columns name, size"),
        ("--calibrate", '{"model_type": "llama"}', "expected a CSV, or JSON lines"),
        ("--calibrate", "layers,step_ms\n2,3\n", "row 1: .*expected gpu, got none|row 1: .*hidden"),
        ("--calibrate", b"\xff\xfe\x00", "expected text, got binary data"),
        ("--cluster", "name,size\na,3\n", "expected JSON, got other text"),
        ("--cluster", '{"model_type": "llama", "hidden_size": 8}', "expected the fields of rtp_ext.planner.Cluster"),
        ("--cluster", '{"base": "h100-80gb", "memory_byte": 1}', "did you mean memory_bytes"),
        ("--cluster", b"\xff\xfe\x00", "expected text, got binary data"),
        ("--hf-config", "[1]", "expected a JSON object, got list"),
    ],
)
def test_files_of_another_kind(capsys, tmp_path, option, content, message):
    file = tmp_path / "file"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    model = [] if option == "--hf-config" else ["--model", "llama-3-8b"]
    status, out, err = _run(capsys, "plan", *model, option, str(file))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err) and err.count(str(file)) == 1, err


def test_configurations_without_hidden_size(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    status, out, err = _run(capsys, "plan", "--hf-config", str(tmp_path / "config.json"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "num_attention_heads" in err or "hidden_size" in err


def test_plans_need_no_torch():
    """Memory, time, search and schedules come from the compiled rules alone."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from rtp_ext.__main__ import main\n"
        "plan = ['plan', '--model', 'llama-3-8b']\n"
        "recipes = ['--plan', 'rtp=8,recipe=mxfp8', '--gpu', 'b200-180gb']\n"
        "assert main([*plan, '--plan', 'rtp=8', '--plan', 'zero=3', '--explain']) == main([*plan, *recipes]) == 0\n"
        "assert main([*plan, '--top', '2']) == 0 and main(['schedule', '--ranks', '4']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rotation" in done.stdout and "W0 -> 3" in done.stdout
