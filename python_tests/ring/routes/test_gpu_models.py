"""Rates of GPUs and of their links by name, and the decisions where they are unknown or differ. No GPU is needed:
torch's properties of one are replaced."""

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rtp_ext.cost import GEMM_RAMP
from rtp_ext.gpu_rates import GEMM_FRACTION, MEMORY_FRACTION, WIRES, data_sheet
from rtp_ext.planner import Cluster, ModelSpec, Strategy, TimeConstants
from rtp_ext.planner.constants import constants
from rtp_ext.planner.time.stage import StageClock
from rtp_ext.ring.links.gpu_links import Wiring
from rtp_ext.ring.routes import gpus
from rtp_ext.ring.routes.gpus import device_of, link_of
from rtp_ext.ring.routes.gradient_routes import GradientRoutes
from rtp_ext.ring.routes.route_planner import LayerSize, RoutePlanner, decide, gemm_seconds

GPU = torch.device("cuda", 0)
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "h100-80gb-hbm3-1gpu"
NVLINK, PCIE = Wiring("nvlink", "all pairs"), Wiring("pcie", "no NVLink")
LAYER = LayerSize(14336, 4096, 2, 4)


@pytest.fixture
def gpu(monkeypatch):
    """Returns a function that makes torch report a GPU of a name."""

    def report(name, multiprocessors=132, clock=1.98e6, memory_clock=0, width=0):
        properties = SimpleNamespace(
            name=name, multi_processor_count=multiprocessors, clock_rate=clock,
            memory_clock_rate=memory_clock, memory_bus_width=width,
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return device_of(GPU, torch.bfloat16)

    return report


# torch's name, multiprocessors, boost clock in kHz; TFLOP/s; kHz and bits of the memory (0: not compared)
KNOWN = {
    "NVIDIA A100-SXM4-40GB": (108, 1410e3, 312, 1215e3, 5120),
    "NVIDIA A100-SXM4-80GB": (108, 1410e3, 312, 0, 0),
    "NVIDIA A40": (84, 1740e3, 149.7, 7251e3, 384),
    "NVIDIA RTX A6000": (84, 1800e3, 154.8, 8001e3, 384),
    "NVIDIA GeForce RTX 3090": (82, 1695e3, 71, 9751e3, 384),
    "NVIDIA L40S": (142, 2520e3, 362, 9001e3, 384),
    "NVIDIA GeForce RTX 4090": (128, 2520e3, 165.2, 10501e3, 384),
    "NVIDIA H100 80GB HBM3": (132, 1980e3, 989, 2619e3, 5120),
    "NVIDIA H200": (132, 1980e3, 989, 0, 0),
    "NVIDIA B200": (148, 1965e3, 2250, 0, 0),
    "NVIDIA B300 SXM6 AC": (148, 2032e3, 2250, 0, 0),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (188, 2617e3, 503.8, 14001e3, 512),
    "NVIDIA GeForce RTX 5090": (170, 2407e3, 209.5, 14001e3, 512),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_gpu_has_its_data_sheet(gpu, name):
    multiprocessors, clock, teraflops, memory_clock, width = KNOWN[name]
    known = gpu(name, multiprocessors, clock)
    assert known.flops == pytest.approx(GEMM_FRACTION * 1e12 * teraflops) and not known.assumed and name in known.source
    # FLOP for a clock of a multiprocessor are a power of 2 (the data sheet has the clock of all tensor cores at work)
    a_clock = 1e12 * teraflops / multiprocessors / (1e3 * clock)
    assert min(abs(a_clock / power - 1) for power in (512, 1024, 2048, 4096, 8192)) < 0.12
    assert a_clock > 0.95 * gpus._FLOPS_A_CLOCK, "the least of all"
    if memory_clock:
        assert known.memory_bytes_per_second == pytest.approx(
            MEMORY_FRACTION * 2e3 * memory_clock * width / 8, rel=0.01
        )
    assert device_of(GPU, torch.float32).flops == known.flops / 4


def test_the_planner_takes_its_rates_from_the_same_table(gpu):
    """And no preset has a rate of its own where the table has one."""
    presets, time = constants()["gpus"], TimeConstants.default()
    assert (time.hbm_fraction, time.gemm_ramp_depth) == (MEMORY_FRACTION, GEMM_RAMP), "of one model"
    assert {"a100-80gb", "h100-80gb", "b200-180gb", "l40s-48gb", "rtx-4090-24gb", "rtx-pro-6000-96gb"} <= set(presets)
    for preset, entry in presets.items():
        if entry.get("cpus"):
            continue
        assert not {"bf16_flops_per_s", "hbm_bytes_per_s", "nccl_ring_bytes_per_s"} & set(entry), preset
        known, cluster = gpu("NVIDIA " + entry["data_sheet"]), Cluster.preset(preset)
        assert known.flops == pytest.approx(GEMM_FRACTION * cluster.bf16_flops_per_s)
        assert known.memory_bytes_per_second == pytest.approx(MEMORY_FRACTION * cluster.hbm_bytes_per_s)
        reached = cluster.bf16_achievable_flops_per_s * time.gemm_fraction
        assert known.flops == pytest.approx(reached, rel=0.02 if "h100" in preset else 0.11), preset
        wiring = Wiring(entry.get("link", "nvlink"), "")
        assert link_of(known, wiring).bytes_per_second == cluster.nccl_ring_bytes_per_s
    assert data_sheet("H100") is None, "control: no part of a name"


def test_the_engine_plans_a_ring_as_the_planner_does(gpu):
    """Llama 3 8B on 8 H100: all shards in a product, as the whole steps of an H100 with 8192 tokens confirm
    (benchmarks/results/h100-80gb-hbm3-1gpu/emulated_step.jsonl). Without what is sent ahead, another plan."""
    h100, model = gpu("NVIDIA H100 80GB HBM3"), ModelSpec.preset("llama-3-8b")
    planner = RoutePlanner(8, GPU, "direct", "auto", None, wiring=NVLINK)
    mlp = LayerSize(2 * 14336, 4096, 2, 4, down=4096, gates=2)
    layers = {"qkv": LayerSize(6144, 4096, 2, 4), "o": LayerSize(4096, 4096, 2, 4), "mlp": mlp}
    for tokens in (2048, 4096, 8192, 16384):
        planner.ahead, planner.gradients = True, GradientRoutes("by-dtype", wide=True)
        plans = [planner.plan(name, tokens, layer, torch.bfloat16) for name, layer in layers.items()]
        assert all("sent ahead, gradients straight to their owners" in plan.reason for plan in plans)
        block = StageClock(
            dataclasses.replace(model, seq=tokens), Cluster.preset("h100-80gb"), Strategy(rtp=8, fused_loss=True),
            TimeConstants.default(),
        ).block  # fmt: skip
        assert tuple(plan.group for plan in plans) == block.plan.groups == (8, 8, 8), tokens
        planner.ahead = False
        cold = planner.plan("mlp", tokens, mlp, torch.bfloat16)
        assert cold.group < 8 and "sent ahead" not in cold.reason, "control"
    steps = {}
    for line in (RESULTS / "emulated_step.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "g=" in row["case"] and row["tokens"] == 8192:
            steps[row["group"]] = row["forward_backward_ms"]
    assert steps[8] < steps[2] < steps[1]
    assert link_of(h100, NVLINK) == planner.link


def test_gpus_without_direct_access_send_through_memory_of_the_host():
    rates = [Cluster.preset("l40s-48gb", link=link).nccl_ring_bytes_per_s for link in (None, "pcie", "host memory")]
    assert rates == [20e9, 20e9, 12e9] and Cluster.preset("rtx-4090-24gb").nccl_ring_bytes_per_s == 12e9
    mine = Cluster.from_json({"base": "a100-80gb", "link": "host memory", "gpus": 4})
    assert (mine.nccl_ring_bytes_per_s, mine.all_reduce) == (12e9, ""), "what was measured over NVLink is not taken"
    with pytest.raises(ValueError, match="NVLink does not join"):
        Cluster.preset("rtx-4090-24gb", link="nvlink")
    with pytest.raises(ValueError, match="unknown link 'network'"):
        Cluster.preset("h100-80gb", link="network")


@pytest.mark.parametrize(
    "name",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H20", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA R100"],
)
def test_an_unknown_gpu_is_assumed_to_be_slow(gpu, name):
    """In no case are its rates those of another GPU with a similar name."""
    unknown = gpu(name, 100, 2.0e6, 10501e3, 384)
    assert unknown.assumed and "assumed for " + name in unknown.source
    assert unknown.flops == pytest.approx(GEMM_FRACTION * 100 * 2.0e9 * 512)
    assert unknown.memory_bytes_per_second == pytest.approx(MEMORY_FRACTION * 1008e9, rel=1e-3)
    silent = gpu(name, 100, 0)
    assert (silent.flops, silent.memory_bytes_per_second) == pytest.approx(
        (GEMM_FRACTION * 100 * 1e9 * 512, MEMORY_FRACTION * 300e9)
    )


def test_links(gpu):
    h100, ada = gpu("NVIDIA H100 80GB HBM3"), gpu("NVIDIA GeForce RTX 4090", 128)
    rates = {kind: link_of(h100, Wiring(kind, "")).bytes_per_second for kind in WIRES}
    assert link_of(h100, NVLINK).bytes_per_second == 370.8e9 > rates["pcie"] > rates["host memory"] == 12e9
    assert link_of(ada, NVLINK) == link_of(ada, PCIE), "it has no NVLink"
    assert link_of(h100, Wiring("one GPU", "")).bytes_per_second == h100.memory_bytes_per_second / 2


def _planner(wiring, route="auto"):
    return RoutePlanner(2, GPU, "direct", route, None, wiring=wiring)


def test_layers_rotate_on_two_levels(gpu):
    """A model of one link would gather them: it takes every hop for one between hosts."""
    h100, network = gpu("NVIDIA H100 80GB HBM3"), Wiring("network", "2 hosts")
    two, flat = (RoutePlanner(16, GPU, hops, "auto", None, wiring=network) for hops in ("two-level", "ring"))
    assert not two.decides and flat.decides
    assert not two.compare_devices(lambda mine: [mine] * 16)
    plans = [planner.plan("a", 16, LayerSize(1024, 1024, 2, 4), torch.bfloat16) for planner in (two, flat)]
    assert [plan.route for plan in plans] == ["two-level", "gather"], plans
    slow = decide(16, 512, LAYER, hop_route="two-level", link=link_of(h100, network), device=h100)
    assert not slow.halves, "gradients of two levels travel whole"
    assert decide(16, 512, LAYER, hop_route="ring", link=link_of(h100, network), device=h100).halves, "control"


def test_ranks_compare_their_gpus(gpu, caplog):
    other = gpu("NVIDIA H200")
    gpu("NVIDIA H100 80GB HBM3")
    planner = _planner(NVLINK)
    assert not planner.compare_devices(lambda mine: [mine, mine]) and planner.alike and planner.decides
    assert planner.plan("a", 16, LAYER, torch.bfloat16).seconds, "control"
    with caplog.at_level(logging.WARNING, logger="rtp_ext"):
        assert not planner.compare_devices(lambda mine: [mine, other])
    assert not planner.alike and not planner.decides and "GPUs of a ring differ" in caplog.text
    plan = planner.plan("a", 16, LAYER, torch.bfloat16)
    assert (plan.route, plan.reason, plan.seconds) == ("direct", "the GPUs of the ring differ", {})


def test_hops_are_measured_where_links_or_gpus_are_unknown(gpu, caplog):
    gpu("NVIDIA H100 80GB HBM3")
    unknown = Wiring("pcie", "no NVLink is assumed", known=False)
    assert _planner(unknown).compare_devices(lambda mine: [mine, mine])
    assert not _planner(unknown, route="ring").compare_devices(lambda mine: [mine, mine]), "nothing to decide"
    gpu("NVIDIA R100")
    with caplog.at_level(logging.WARNING, logger="rtp_ext"):
        planner = _planner(NVLINK)
        assert planner.compare_devices(lambda mine: [mine, mine])
    assert "assumed for NVIDIA R100" in caplog.text
    assert "assumed for NVIDIA R100" in planner.plan("a", 16, LAYER, torch.bfloat16).reason
    assert planner.model.assumed


def test_a_sum_in_float32_costs_its_memory_traffic(gpu):
    """On a 4090: 32768 tokens, a shard of 2 outputs: 8 bytes for each of 32768 x 4096 numbers are 1.25 ms."""
    ada = gpu("NVIDIA GeForce RTX 4090", 128)
    moved = 8 * 32768 * 4096 / (MEMORY_FRACTION * 1008e9)
    assert gemm_seconds(ada, 32768, 4096, 2, 8) == pytest.approx(gemm_seconds(ada, 32768, 4096, 2) + 0.75 * moved), (
        "beyond the 2 bytes of a plain result"
    )
    assert gemm_seconds(ada, 32768, 4096, 2048, 8) > gemm_seconds(ada, 32768, 4096, 2048) + 0.7 * moved, "not hidden"
    narrow = LayerSize(16, 4096, 2, 4)
    plan = decide(8, 32768, narrow, hop_route="ring", link=link_of(ada, PCIE), device=ada)
    assert plan.route == "gather", "control: one product writes its result once"
    assert plan.seconds["rotate"] > 8 * moved > plan.seconds["gather"]
