"""Slots and states that the planner predicts for rotation, byte for byte against the counters of the engine."""

import copy
import itertools

import pytest

from rtp_ext._native import shard_sizes
from rtp_ext.planner import (
    Cluster,
    ModelSpec,
    RotatedOperation,
    Strategy,
    Weight,
    estimate_memory,
    rotations_of,
    rtp_bytes,
)

EIGHT = Cluster.preset("h100-80gb")


def _counted(ring):
    return tuple(ring.slot_count(channel).peak_bytes for channel in ("weight", "gradient"))


def _train(model, ring, loss_of, low=False, steps=None, **options):
    """Steps of AdamW, enough for slots to settle. Bytes of slots, parameters, gradients, moments and step counters."""
    import torch
    from live_bytes import STEADY
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import rtp_ext

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if low else None
    rtp_ext.fully_rotate(model, mesh=ring, mp_policy=policy, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEADY if steps is None else steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
    state = [(key, getattr(v, "_local_tensor", v)) for s in optimizer.state.values() for key, v in s.items()]
    stored = [sum(t.untyped_storage().nbytes() for t in tensors) for tensors in (local, gradients)]
    moments = sum(v.untyped_storage().nbytes() for key, v in state if key != "step")
    return (*_counted(ring), *stored, moments, sum(v.nbytes for key, v in state if key == "step"))


def _predicted(held):
    return (
        held.weight_slots_bytes,
        held.gradient_slots_bytes,
        held.parameters_bytes,
        held.gradients_bytes,
        held.optimizer_bytes,
        held.optimizer_steps_bytes,
    )


def _whole_on_an_emulated_ring(held, others, ranks):
    """Parameters that do not rotate stay whole in a ring of one process."""
    more = 4 * sum(weight.shape[0] - shard_sizes(weight.shape[0], ranks)[0] for weight in others)
    return tuple(value + factor * more for value, factor in zip(held, (0, 0, 1, 1, 2, 0), strict=True))


CASES = [
    {"bundle": True, "low": False, "in_place": False, "loss_head": None},
    {"bundle": True, "low": True, "in_place": False, "loss_head": "fused"},
    {"bundle": True, "low": False, "in_place": True, "loss_head": "fused"},
    {"bundle": False, "low": True, "in_place": True, "loss_head": None},
    {"bundle": "recompute", "low": False, "in_place": False, "loss_head": "fused"},
    {"bundle": False, "low": False, "in_place": False, "loss_head": "fused"},
]


@pytest.fixture(scope="module")
def small_models():
    """A Llama and a GPT-2 (tied) of the transformers package, and their specifications; all rings here divide them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    llama = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3)
    llama |= dict(intermediate_size=72, vocab_size=132, max_position_embeddings=24)
    gpt2 = dict(n_embd=48, n_layer=2, n_head=6, vocab_size=132, n_positions=24)
    configs = [transformers.LlamaConfig(**llama), transformers.GPT2Config(**gpt2)]
    models = [transformers.AutoModelForCausalLM.from_config(config) for config in configs]
    return [(model, ModelSpec.from_hf_config(config.to_dict())) for model, config in zip(models, configs, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_slots_and_states_are_the_engine_s(ranks, small_models):
    import torch

    from rtp_ext import Ring

    ids = torch.randint(0, 132, (2, 12), generator=torch.Generator().manual_seed(0))
    for plain, spec in small_models:
        for case in CASES:
            with Ring.emulated(ranks) as ring:
                counted = _train(copy.deepcopy(plain), ring, lambda m: m(input_ids=ids, labels=ids).loss, **case)
            fused = case["loss_head"] == "fused"
            rotations, others = rotations_of(spec, bundle=case["bundle"], fused_loss=fused)
            compute = 2 if case["low"] else 4
            held = rtp_bytes(rotations, ranks, others=others, compute_bytes=compute, in_place=case["in_place"])
            assert counted == _whole_on_an_emulated_ring(_predicted(held), others, ranks), (spec.name, case)
            other = rtp_bytes(rotations, ranks + 1, others=others, compute_bytes=compute, in_place=case["in_place"])
            assert _predicted(other)[1:] != counted[1:], "control: another ring"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_slots_of_a_small_mlp_in_pieces(ranks):
    """Layer by layer; the first makes no input gradient; a low cap has shards travel in pieces."""
    import torch
    from torch import nn

    from rtp_ext import Ring

    x = torch.randn(5, 24)
    rotations = [
        RotatedOperation("linear", (Weight((36, 24)), Weight((36,))), input_gradient=False),
        RotatedOperation("linear", (Weight((60, 36)), Weight((60,)))),
        RotatedOperation("linear", (Weight((12, 60)), Weight((12,)))),
    ]
    found = set()
    for cap in (0, 700, 1 << 20):
        for low in (False, True):
            model = nn.Sequential(nn.Linear(24, 36), nn.Linear(36, 60), nn.Linear(60, 12))
            with Ring.emulated(ranks) as ring:
                ring.slot_cap = cap
                counted = _train(model, ring, lambda m: m(x).float().square().sum(), low=low, bundle=False)
            held = rtp_bytes(rotations, ranks, compute_bytes=2 if low else 4, slot_cap=cap)
            assert counted == _predicted(held), (cap, low)
            found.add(counted[:2])
    assert ranks == 1 or len(found) >= 3, "control: the cap and the cast change the slots"


def _stack(widths):
    """Linear layers of these widths and what rotates of them; the first makes no input gradient."""
    from torch import nn

    pairs = list(itertools.pairwise(widths))
    layers = [nn.Linear(columns, rows) for columns, rows in pairs]
    return nn.Sequential(*layers), [
        RotatedOperation("linear", (Weight((rows, columns)), Weight((rows,))), input_gradient=place > 0)
        for place, (columns, rows) in enumerate(pairs)
    ]


def _squares(model):
    import torch

    return model(torch.ones(3, model[0].in_features)).float().square().sum()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_slots_of_layers_that_take_three_steps_to_settle(ranks):
    """A larger slot replaces one that the step before left free."""
    from rtp_ext import Ring

    later = []
    for widths in ((12, 12, 12, 36), (12, 36, 12, 60), (24, 12, 36, 60, 12)):
        for low in (False, True):
            found = []
            for steps in (2, None):
                model, rotations = _stack(widths)
                with Ring.emulated(ranks) as ring:
                    found.append(_train(model, ring, _squares, low=low, steps=steps, bundle=False))
            held = rtp_bytes(rotations, ranks, compute_bytes=2 if low else 4)
            assert found[1] == _predicted(held), (widths, low)
            later.append(found[0] != found[1])
    assert any(later) == (ranks in (2, 3)), "control: two steps are too few there"


RAGGED = {
    True: [RotatedOperation("bundle", (Weight((23, 10)), Weight((23,)), Weight((10, 23), 1), Weight((10,))))],
    False: [
        RotatedOperation("linear", (Weight((23, 10)), Weight((23,)))),
        RotatedOperation("linear", (Weight((10, 23)), Weight((10,)))),
    ],
}


def _ragged(rank, ranks):
    """Sizes that three ranks do not divide, on real rings: counted and predicted for every case."""
    import torch
    from torch import nn

    from rtp_ext import Ring

    torch.set_num_threads(1)
    found = []
    ids = torch.arange(5)
    for transport, bundle, low, in_place, late in (
        ("c10d", False, True, False, 0),
        ("c10d", True, False, True, 0),
        ("shm", True, False, True, 0),
        ("c10d", False, False, False, 1),
        ("c10d", True, True, False, 1),
    ):
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(10, 23), nn.GELU(), nn.Linear(23, 10))
        model = nn.Sequential(nn.Embedding(17, 10), nn.LayerNorm(10), mlp)
        with Ring(transport=transport, timeout=30.0, late_gradients=late) as ring:
            options = {"bundle": bundle, "low": low, "in_place": in_place}
            counted = _train(model, ring, lambda m: m(ids).float().square().sum(), **options)
        held = rtp_bytes(
            [RotatedOperation("embedding", (Weight((17, 10), 1),)), *RAGGED[bundle]],
            ranks,
            rank=rank,
            others=[Weight((10,))] * 2,
            compute_bytes=2 if low else 4,
            in_place=in_place,
            receives_anywhere=transport != "shm",
            late_gradients=late,
        )
        found.append((transport, bundle, low, in_place, late, counted, _predicted(held)))
    for steps, ahead in ((2, 0), (3, 0), (None, None), (3, 400)):
        model, rotations = _stack((6, 40, 6, 6, 6))
        buffers = {0: "lean", None: "auto"}.get(ahead, ahead)
        with Ring(transport="c10d", timeout=30.0, late_gradients=2, buffers=buffers) as ring:
            counted = _train(model, ring, _squares, steps=steps, bundle=False)
        held = rtp_bytes(rotations, ranks, rank=rank, late_gradients=2, look_ahead=ahead)
        found.append((steps, ahead, counted, _predicted(held)))
    return found


def test_slots_and_states_of_ragged_shards_on_real_rings():
    from harness import run_ranks

    told = run_ranks(_ragged, 3)
    for rank, cases in enumerate(told):
        for *case, counted, predicted in cases:
            assert (counted == predicted) == (case[0] != 2), (rank, case, counted, predicted)
    assert told[0][0][5] != told[2][0][5], "control: the last rank holds less"
    in_time, late = (cases[5][1] for cases in (told[0][0], told[0][3]))
    assert late > in_time, "control: a gradient that lands late has slots of its own"
    lean, ahead, one = (cases[2] for cases in told[0][-3:])
    assert lean == one != ahead, "control: so do shards that are ahead"


def test_rotations_of_a_stage_in_the_estimate():
    """The slots in an estimate are those of `rtp_bytes` for the layers of the stage."""
    model = ModelSpec.preset("llama-3-70b")
    report = estimate_memory(model, EIGHT, Strategy(rtp=8, recompute="full", fused_loss=True, buffers="lean"))
    largest = 3 * model.hidden * model.ffn // 8
    assert report.components["rotation_slots"] == largest * (2 * 3 + 4 * 2), (
        "bf16 weights, one staged; float32 gradients"
    )
    assert report.components["parameters"] == 4 * model.parameters / 8
    in_place = estimate_memory(model, EIGHT, Strategy(rtp=8, in_place=True, param_dtype="fp32", buffers="lean"))
    pieces_of_the_head = 64 << 20  # travel out of place, through a second slot
    assert in_place.components["rotation_slots"] == largest * 4 * (1 + 2) + pieces_of_the_head
    with pytest.raises(ValueError, match="0 <= rank < 2"):
        rtp_bytes([RotatedOperation("linear", (Weight((2, 2)),))], 2, rank=2)
    with pytest.raises(ValueError, match="unknown kind"):
        RotatedOperation("conv", (Weight((2, 2)),))


def test_hops_of_a_flat_ring_take_its_slowest_link():
    """Over several nodes with several members each, hops inside the nodes and over the ports run at once."""
    from rtp_ext.planner.constants import TimeConstants
    from rtp_ext.planner.rotation.seconds import rotation_seconds
    from rtp_ext.planner.time.links import Group, hop_s

    known, size = TimeConstants.default(), 1e9
    two = {link: Cluster.preset("h100-80gb", gpus=16, link=link) for link in ("nvlink", "pcie")}
    port = 50e9 * known.network_fraction
    for cluster, ranks, stride, rate in (
        (two["pcie"], 8, 1, 20e9),
        (two["pcie"], 16, 1, 20e9),
        (two["pcie"], 2, 8, port),  # one member a node
        (two["nvlink"], 16, 1, port),
        (two["nvlink"], 8, 1, 370.8e9),
    ):
        latency = hop_s(Group(cluster, ranks, stride), 0, known)
        assert hop_s(Group(cluster, ranks, stride), size, known) - latency == pytest.approx(size / rate), (ranks, rate)
    operation = rotations_of(ModelSpec.preset("llama-3-8b"))[0][1]
    flat = {link: rotation_seconds(operation, 64, Group(two[link], 16), known).makespan_s[0] for link in two}
    assert flat["pcie"] > 1.9 * flat["nvlink"]
    hops = {link: rotation_seconds(operation, 64, Group(two[link], 16), known, hosts=2).durations for link in two}
    assert hops["pcie"]["weight"] > 5 * hops["nvlink"]["weight"]
    assert hops["pcie"]["outer weight"] == hops["nvlink"]["outer weight"] > 3 * hops["nvlink"]["weight"]
