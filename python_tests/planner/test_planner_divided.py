"""Rings whose experts are divided: bytes by closed form, refusals, and the table of docs/moe.md."""

import dataclasses

import pytest
from planner import mixtures

from rtp_ext.planner import Cluster, Strategy, TimeConstants, estimate_memory, estimate_time
from rtp_ext.planner.rotation.family import rings_of
from rtp_ext.planner.rotation.operations import rotations_of
from rtp_ext.planner.time.links import Group, exchange_s, gather_s
from rtp_ext.planner.time.stage import StageClock

MODEL, H100, CONSTANTS = mixtures.MODELS["gpt-oss-20b"], Cluster.preset("h100-80gb", gpus=64), TimeConstants.default()


def test_bytes_of_divided_experts():
    for ring, parts in ((8, 2), (8, 8), (32, 4), (32, 16)):
        (experts,) = (each for each in rotations_of(MODEL, layers=1, parts=parts)[0] if each.kind == "bundle")
        own, inside, between = rings_of(experts, Group(H100, ring), max(1, ring // 8))
        assert own.ranks == ring // parts == inside.ranks * between.ranks
        assert own.nodes == (1 if ring == 8 else 4 if parts == 4 else 2), "every fourth rank, or every sixteenth"
        values = sum(weight.shard_elements(own.ranks) for weight in experts.weights)
        assert values == MODEL.mlp_parameters // ring, "a shard has as many experts as one of a ring alone"
    held = [estimate_memory(MODEL, H100, Strategy(rtp=8, ep=parts)).stages[0].components for parts in (1, 2, 8)]
    for name in ("parameters", "gradients", "optimizer"):
        assert len({each[name] for each in held}) == 1, name
    assert held[1]["activations"] - held[0]["activations"] == MODEL.layers * MODEL.seq * 4 * MODEL.hidden * 4


def test_seconds_of_exchanges_and_hops():
    for parts in (2, 8):
        time = estimate_time(MODEL, H100, Strategy(rtp=8, ep=parts))
        sent = 8 * MODEL.seq * MODEL.experts_per_token * MODEL.hidden * (parts - 1) / parts  # docs/moe.md
        least = MODEL.layers * sent / H100.nccl_ring_bytes_per_s
        assert least < time.components["expert_parallel"] < 1.1 * least
    assert estimate_time(MODEL, H100, Strategy(rtp=8)).components["expert_parallel"] == 0
    apart, size = Group(H100, 16), 1e9
    port = 8 / 16 * size / (H100.nic_bytes_per_s * CONSTANTS.network_fraction)
    assert exchange_s(apart, size, CONSTANTS) == pytest.approx(port, rel=1e-2), "half of the rows leave the node"
    assert exchange_s(Group(H100, 8), size, CONSTANTS) == gather_s(Group(H100, 8), size, CONSTANTS)

    def split(parts):  # products of one shard of eight, of two, and of whole experts with eight times the rows
        return StageClock(MODEL, H100, Strategy(rtp=8, ep=parts, buffers="lean"), CONSTANTS).per_layer["split"]

    assert split(1) > split(2) > split(8)
    # few tokens: hops of all experts do not hide, those of an eighth need not travel
    small = dataclasses.replace(MODEL, seq=64)
    shown = [estimate_time(small, H100, Strategy(rtp=8, ep=parts)).components["rotation"] for parts in (1, 2, 8)]
    assert shown[0] > 1.5 * shown[1] > 1.5 * shown[2] >= 0


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"rtp": 8, "ep": 3}, "rtp divisible by ep"),
        ({"rtp": 8, "ep": 2, "in_place": True}, "in_place False with ep of a ring"),
        ({"rtp": 8, "ep": 2, "tp": 2}, "tp 1 with ep of a ring"),
        ({"rtp": 8, "ep": 2, "offload": True}, "offload False with ep of a ring"),
        ({"rtp": 8, "ep": 2, "dp": 2, "outer": "diloco", "period": 50}, "outer allreduce or zero with ep"),
        ({"rtp": 64, "ep": 8}, "experts divisible by rtp, got 32 and 64"),
    ],
)
def test_refusals(given, match):
    with pytest.raises(ValueError, match=match):
        estimate_time(MODEL, H100, Strategy(**given))
    if "rtp divisible" not in match and "experts" not in match:
        Strategy(**{**given, "ep": 1})  # control


def test_the_table_of_the_page(monkeypatch):
    rows = [line for line in mixtures.PAGE.read_text().splitlines() if line.startswith("| gpt-oss-20b | 8 |")]
    monkeypatch.setattr(mixtures, "MODELS", {"gpt-oss-20b": MODEL})
    monkeypatch.setattr(mixtures, "GPUS", (8,))
    assert rows and mixtures.table().splitlines()[-2:] == [*rows, ""]


def test_a_published_mixture():
    assert mixtures.published_table() in mixtures.PAGE.read_text()
    (gathered, step), (divided, other) = mixtures.published_step(1), mixtures.published_step(64)
    assert step == gathered.step_seconds and gathered.components["expert_parallel"] == 0
    routed = divided.components["expert_parallel"] * 4 / 6  # rows of shared experts stay
    assert other == pytest.approx(divided.step_seconds - divided.components["expert_parallel"] + routed, rel=5e-3)
    assert gathered.model_flops == pytest.approx(0.1941 * 64 * 2.5e15 * 18.02, rel=0.03), "its MFU is of 2.5 PFLOP/s"
