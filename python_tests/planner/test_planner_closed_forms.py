"""The planner's closed forms against the numbers that their sources print."""

import pytest

from rtp_ext.planner import Cluster, ModelSpec, Strategy, estimate_memory, korthikanti, lecture, zero

GIB = 2**30
GPT3 = {"layers": 96, "hidden": 12288, "heads": 96}
DAY = 86400


# Kun Yuan, "Optimization for Deep Learning (Part II)", 8 June 2024, "Example: LLaMA parameters"
@pytest.mark.parametrize(
    ("hidden", "layers", "expected"),
    [
        (4096, 32, 6_704_594_944),
        (5120, 40, 12_910_592_000),
        (6656, 60, 32_323_665_920),
        (8192, 80, 64_948_797_440),
    ],
)
def test_lecture_parameters(hidden, layers, expected):
    assert lecture.parameters(layers=layers, hidden=hidden, vocab=32000) == expected


def test_lecture_memory():
    memory = lecture.memory_bytes(**GPT3, batch=1, seq=2048)
    assert set(memory) == {"model", "gradients", "optimizer", "activations"}
    assert int(memory["activations"] / 1e9) == 444
    assert int(100 * memory["activations"] / 700e9) == 63  # the lecture rounds 4 bytes of 175e9 parameters
    assert round(lecture.memory_bytes(**GPT3, batch=128, seq=2048)["activations"] / 700e9) == 81
    assert memory["model"] == memory["gradients"] == memory["optimizer"] / 2
    assert sum(memory.values()) == 4 * (48 * 96 * 12288**2 + 96 * (2 * 2048**2 * 96 + 14 * 2048 * 12288))
    half = lecture.memory_bytes(**GPT3, batch=1, seq=2048, bytes_per_value=2)
    assert half["activations"] * 2 == memory["activations"]


def test_lecture_utilization():
    reached = lecture.utilization(tokens=300e9, parameters=175e9, gpus=1024, peak_flops=312e12, seconds=35 * DAY)
    # the lecture prints 0.44; 0.4347 is what its numbers give
    assert reached == pytest.approx(0.4347, abs=5e-5) and reached == pytest.approx(0.44, abs=0.006)
    llama = lecture.utilization(tokens=1.4e12, parameters=65e9, gpus=2048, peak_flops=312e12, seconds=21 * DAY)
    assert llama == pytest.approx(0.628, abs=5e-4), "the lecture's printed 0.3 does not follow from its formula"
    assert lecture.training_seconds(1.4e12, 65e9, 2048, 312e12, llama) == pytest.approx(21 * DAY)


def test_lecture_communication():
    assert lecture.pipeline_idle_fraction(4, 8) == 3 / 8
    assert lecture.ring_allreduce_seconds(1e9, 4, 1e9) == pytest.approx(2 * 3 / 4)
    latency = [lecture.ring_allreduce_seconds(0, gpus, 1e9, latency_s=1e-5) for gpus in (2, 3, 1025)]
    assert latency == pytest.approx([2e-5, 4e-5, 2048e-5])
    assert lecture.ring_allreduce_steps(1025) == 2048
    assert lecture.ring_allreduce_seconds(1e9, 1, 1e9) == 0
    assert lecture.parameter_server_bytes(10, 8) == 160
    assert lecture.data_parallel_communication_bytes(7) == 14
    assert lecture.data_parallel_memory_bytes(5, 3, batch=8, gpus=4) == 2 * (4 * 5 + 2 * 3)


# arXiv 2205.05198, Fig. 1, GiB on one GPU, as encoded in calculon-ai/calculon@caa4b11, calculon/llm/validation.py:
# heads, hidden, layers, stages, chunks, micro-batch, parameters and optimizer, tensor parallel, sequence parallel with
# selective recomputation; sequence 2048, 8 tensor-parallel ranks
KORTHIKANTI = {
    "22B": (64, 6144, 48, 1, 1, 4, 45.5625, 59.25, 9.5625),
    "175B": (96, 12288, 96, 8, 3, 1, 45.5625, 66.84375, 12.3515625),
    "530B": (128, 20480, 105, 35, 3, 1, 31.640625, 114.0234375, 23.076171875),
    "1T": (160, 25600, 128, 64, 1, 1, 32.958984375, 131.25, 26.5625),
}


@pytest.mark.parametrize("model", KORTHIKANTI)
def test_korthikanti_figure_1(model):
    heads, hidden, layers, pp, chunks, micro_batch, states, plain, selective = KORTHIKANTI[model]
    shape = {"tp": 8, "pp": pp, "interleave": chunks}
    sizes = (layers, 2048, micro_batch, hidden, heads)
    held = korthikanti.parameter_and_optimizer_bytes(layers, hidden, tp=8, pp=pp)
    assert held / GIB == pytest.approx(states, rel=1e-6)
    assert korthikanti.activation_bytes(*sizes, **shape) / GIB == pytest.approx(plain, rel=1e-6)
    saved = korthikanti.activation_bytes(*sizes, **shape, sequence_parallel=True, recompute="selective")
    assert saved / GIB == pytest.approx(selective, rel=1e-6)
    assert saved != pytest.approx(korthikanti.activation_bytes(*sizes, **shape, sequence_parallel=True)), "control"


def test_korthikanti_other_forms():
    one = {"seq": 10, "micro_batch": 3, "hidden": 8, "heads": 4}
    values = 10 * 3 * 8
    assert korthikanti.activation_bytes_per_layer(**one) == values * (34 + 25)
    assert korthikanti.activation_bytes_per_layer(**one, recompute="full") == 2 * values
    assert korthikanti.activation_bytes_per_layer(**one, tp=4, recompute="selective") == values * 16
    assert korthikanti.layers_in_memory(24, pp=4, micro_batches=3) == 18
    with pytest.raises(ValueError, match="unknown recompute"):
        korthikanti.activation_bytes_per_layer(**one, recompute="some")


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tp", [1, 8])
def test_the_list_of_saved_tensors_adds_up_to_korthikanti(tp, recompute, sequence_parallel):
    """Without fused attention, the layers of a middle stage keep what equations 1 to 6 say."""
    if recompute == "full" and sequence_parallel:
        return  # the paper keeps the input of a layer whole
    model = ModelSpec.gpt(layers=8, hidden=1024, heads=16, seq=2048)
    plan = {"tp": tp, "sequence_parallel": sequence_parallel, "recompute": recompute}
    strategy = Strategy(pp=4, micro_batch=2, flash_attention=False, **plan)
    stage = estimate_memory(model, Cluster.preset("a100-80gb", gpus=32), strategy, 16).stages[2]
    expected = korthikanti.activation_bytes_per_layer(2048, 2, 1024, 16, **plan) * 2 * 2  # two layers, two in flight
    kept = sum(term.value for term in stage.terms if term.component == "activations" and "again" not in term.what)
    assert kept == pytest.approx(expected, rel=1e-12)


# arXiv 1910.02054, Table 1: parameters in 1e9; GPUs: GB of 1e9 bytes with P_os, P_os+g, P_os+g+p
ZERO = {
    7.5: {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88)},
    128: {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 1024: (513, 257, 2)},
    1000: {1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 1024: (4011, 2013, 15.6)},
}
ZERO[7.5] |= {256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)}
ZERO[128] |= {256: (518, 263, 8)}
ZERO[1000] |= {64: (4187, 2218, 250), 256: (4046, 2054, 62.5)}


@pytest.mark.parametrize("billions", ZERO)
def test_zero_table_1(billions):
    for dp, printed in ZERO[billions].items():
        for stage, expected in zip((1, 2, 3), printed, strict=True):
            got = zero.model_state_bytes(billions * 1e9, dp, stage) / 1e9
            digits = len(str(expected).partition(".")[2])
            # the paper cuts some digits off where it should round
            assert abs(got - expected) < 10**-digits, (dp, stage, got, expected)


def test_zero_stages():
    assert zero.model_state_bytes(10, dp=8) == 160 == zero.model_state_bytes(10, dp=1, stage=3)
    assert zero.model_state_bytes(10, dp=8, stage=3, optimizer_bytes=4) == 10
    for wrong in ({"stage": 4}, {"dp": 0}):
        with pytest.raises(ValueError, match="zero"):
            zero.model_state_bytes(10, **wrong)
