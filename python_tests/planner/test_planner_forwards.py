"""Predicted forwards whose weights are pulled: closed forms, several nodes, the command, and refusals."""

import dataclasses
import json

import pytest

from rtp_ext.__main__ import main
from rtp_ext.command_line import WIDTH
from rtp_ext.planner import Cluster, ModelSpec, TimeConstants, break_even_tokens, forward_time
from rtp_ext.planner.plans.forwards import bytes_of_weight, forwards_table

MODEL = ModelSpec.preset("llama-3-70b")
PCIE = Cluster.preset("h100-80gb", gpus=8, link="pcie")
LAYER = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)  # weights of a layer: q and o, k and v, the MLP


def test_pulls_in_closed_form():
    time = forward_time(MODEL, PCIE, 8, 4096)
    assert time.pull_s == pytest.approx(80 * 2 * LAYER * 7 / 8 / PCIE.nccl_ring_bytes_per_s)
    for weights, size in (("int8", 1.03125), ("nf4", 0.5625)):
        assert bytes_of_weight(weights) == size
        assert forward_time(MODEL, PCIE, 8, 4096, weights=weights).pull_s == pytest.approx(time.pull_s * size / 2)
    assert forward_time(MODEL, PCIE, 1, 4096).pull_s == 0


def test_pulls_of_several_nodes_take_both_links():
    nodes = Cluster.preset("h100-80gb", gpus=16)
    port = nodes.nic_bytes_per_s * TimeConstants.default().network_fraction
    found = forward_time(MODEL, nodes, 16, 4096).pull_s
    assert found == pytest.approx(80 * 2 * LAYER * 8 / 16 / port)
    partly = forward_time(MODEL, nodes, 12, 4096).pull_s  # of the second node, 4 GPUs
    assert partly == pytest.approx(80 * 2 * LAYER * 4 / 12 / port)
    fast = dataclasses.replace(nodes, nic_bytes_per_s=1e15)
    inside = forward_time(MODEL, fast, 16, 4096).pull_s
    assert inside == pytest.approx(80 * 2 * LAYER * 7 / 16 / nodes.nccl_ring_bytes_per_s) and inside < found


@pytest.mark.parametrize("weights", [None, "int8", "nf4"])
def test_break_even_is_that_of_the_rates(weights):
    tokens = break_even_tokens(MODEL, PCIE, 8, weights=weights)
    rate = PCIE.bf16_achievable_flops_per_s * TimeConstants.default().gemm_fraction
    closed = rate * bytes_of_weight(weights) * 7 / 8 / (2 * PCIE.nccl_ring_bytes_per_s)
    assert 0.8 * closed <= tokens <= 1.2 * closed, (tokens, closed)
    before, at = (forward_time(MODEL, PCIE, 8, number, weights=weights) for number in (tokens // 2, tokens))
    assert at.whole_s >= at.pull_s and before.whole_s < before.pull_s
    assert at.slowdown < 1.2 and before.slowdown > 1.5


def test_decoding_does_not_pay():
    for cluster in (PCIE, Cluster.preset("h100-80gb", gpus=8)):
        assert forward_time(MODEL, cluster, 8, 1).slowdown > 3
    slow = dataclasses.replace(PCIE, nccl_ring_bytes_per_s=1e6)
    assert break_even_tokens(MODEL, slow, 8) is None


def test_command_and_refusals(capsys):
    assert main(["plan", "--forwards"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed == forwards_table() and max(map(len, printed.splitlines())) <= WIDTH
    assert len(" ".join(line for line in printed.splitlines() if "|" not in line)) > WIDTH, "control: it is wrapped"
    assert main(["plan", "--forwards", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    rows = [line.split("|")[1:-1] for line in forwards_table().splitlines()[2:] if line.startswith("|")]
    assert len(cells) == len(rows) > 4
    for cell, (model, link, gpus, whole, *_, one) in zip(cells, rows, strict=True):
        assert (cell["model"], cell["link"], str(cell["gpus"])) == (model.strip(), link.strip(), gpus.strip())
        shown = f"{cell['from_tokens']['none']} ({cell['slowdown']['none']:.2f})"
        assert (shown, f"{cell['slowdown_of_tokens']['1']:.1f}") == (whole.strip(), one.strip())
    for arguments, words in (
        (["--forwards", "--csv"], "--forwards has no --csv"),
        (["--forwards", "--model", "llama-7b"], "--forwards has no --model"),
        (["--forwards", "--frozen", "nf4"], "--forwards has no --frozen"),
        (["--forwards", "--link", "nvlink"], "--forwards has no --link"),
        (["--min-gpus", "--model", "llama-7b", "--rtp", "4"], "--min-gpus has no --rtp"),
        (["--min-gpus", "--model", "llama-7b", "--gpus", "64"], "--min-gpus has no --gpus"),
        (["--forwards", "--when"], "expected one of --when, --forwards, got several"),
    ):
        assert main(["plan", *arguments]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(ValueError, match="forward: expected tokens to be a whole number of at least 1, got 0"):
        forward_time(MODEL, PCIE, 8, 0)
    with pytest.raises(ValueError, match="unknown format of weights 'fp8': expected one of int8, nf4"):
        forward_time(MODEL, PCIE, 8, 64, weights="fp8")
