"""Frozen weights in the planner: bytes at home, on the wire and in slots against a conversion; time by bytes."""

import dataclasses
from pathlib import Path

import peft
import pytest
import torch
from harness import Cases, run_ranks
from reference import local

import rtp_ext
from rtp_ext.__main__ import main
from rtp_ext.planner import Cluster, ModelSpec, Strategy, estimate_memory, estimate_time, rotations_of, rtp_bytes
from rtp_ext.planner.memory.states import rotation_bytes, trained_count
from rtp_ext.planner.plans.when import hidden_from
from rtp_ext.planner.time.estimate import step_flops

transformers = pytest.importorskip("transformers")

SIZES = {"layers": 2, "hidden": 192, "heads": 6, "kv_heads": 3, "ffn": 576, "vocab": 96, "seq": 16}
SPEC = ModelSpec.llama(**SIZES)
RANK = 6
LLAMA = ModelSpec.preset("llama-3-8b", seq=2048)


def _model(lora_rank: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=SPEC.hidden,
        num_hidden_layers=SPEC.layers,
        num_attention_heads=SPEC.heads,
        num_key_value_heads=SPEC.kv_heads,
        intermediate_size=SPEC.ffn,
        vocab_size=SPEC.vocab,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).requires_grad_(False)
    if not lora_rank:
        return model
    options = peft.LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, options)


def _wire(frozen: str | None, lora_rank: int, ranks: int) -> tuple[int, int, int]:
    """Bytes of the hops of weights in forward and in backward, and of gradients, where all shards are equal."""
    rotations, _ = rotations_of(SPEC, frozen=frozen, lora_rank=lora_rank)
    forward = sum(weight.travelling_bytes(ranks, 4) for each in rotations for weight in each.weights)
    backward = sum(weight.travelling_bytes(ranks, 4) for each in rotations for weight in each.backward_weights)
    trained = [weight for each in rotations for weight in each.weights if weight.has_gradient]
    gradients = sum(4 * weight.shard_elements(ranks) for weight in trained)
    return tuple(round((ranks - 1) * each) for each in (forward, backward, gradients))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("frozen", [None, "nf4", "mxfp4", "int8"])
def test_bytes_are_those_of_explain(frozen, ranks):
    for lora_rank in (RANK, 0) if frozen else (RANK,):
        with torch.device("meta"):
            model = _model(lora_rank)
        plan = rtp_ext.explain(model, frozen=frozen, bundle=lora_rank > 0, ranks=ranks, device="cpu")
        rotations, others = rotations_of(SPEC, frozen=frozen, lora_rank=lora_rank)
        held = rtp_bytes(rotations, ranks, others=others)
        totals = plan.totals
        assert held.parameters_bytes == totals["held_bytes"]
        sent = tuple(totals[f"{name}_bytes"] for name in ("forward", "backward", "gradient"))
        assert _wire(frozen, lora_rank, ranks) == sent
        count = 4 * SPEC.layers * SPEC.adapter_parameters(lora_rank) / ranks
        assert held.gradients_bytes == count == held.optimizer_bytes / 2
        wide = rtp_bytes(rotations_of(SPEC)[0], ranks, others=others)
        assert wide.parameters_bytes != held.parameters_bytes, "control: without frozen weights"


def _converted(rank, ranks):
    cases = Cases()
    for frozen, transport in (("nf4", "shm"), ("int8", "c10d"), (None, "shm")):
        with rtp_ext.Ring(transport=transport, timeout=60.0, route="ring") as ring, cases.case(f"{frozen} {transport}"):
            model = rtp_ext.fully_rotate(_model(RANK), mesh=ring, frozen=frozen)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            ids = torch.arange(32).view(2, 16) % SPEC.vocab
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
            rotations, others = rotations_of(SPEC, frozen=frozen, lora_rank=RANK)
            reach = {"receives_anywhere": transport != "shm", "late_gradients": int(transport == "c10d")}
            planned = rtp_bytes(rotations, ranks, rank=rank, others=others, **reach)
            counts = [ring.slot_count(channel).peak_bytes for channel in ("weight", "gradient", "scratch")]
            assert counts == [planned.weight_slots_bytes, planned.gradient_slots_bytes, planned.scratch_bytes]
            held = sum(local(p).untyped_storage().nbytes() for p in model.parameters())
            states = [v for state in optimizer.state.values() for v in state.values() if v.dim() > 0]
            assert held == planned.parameters_bytes
            assert sum(local(v).untyped_storage().nbytes() for v in states) == planned.optimizer_bytes
            assert planned.weight_slots_bytes < rtp_bytes(rotations_of(SPEC)[0], ranks).weight_slots_bytes, "control"
    cases.finish()


def test_a_step_takes_the_planned_bytes():
    run_ranks(_converted, 3)


def test_a_plan_counts_blocks_slots_scratch_and_adapters():
    cluster = Cluster.preset("h100-80gb", gpus=8)
    plan = Strategy(rtp=8, frozen="nf4", lora_rank=16)
    held, report = rotation_bytes(LLAMA, plan, 0), estimate_memory(LLAMA, cluster, plan)
    blocks = LLAMA.layers * (LLAMA.attention_parameters + LLAMA.mlp_parameters) * 0.5625
    rest = 2 * (LLAMA.parameters - LLAMA.layers * (LLAMA.attention_parameters + LLAMA.mlp_parameters))
    adapters = LLAMA.layers * LLAMA.adapter_parameters(16)
    assert trained_count(LLAMA, plan, 0) == adapters
    assert held.gradients_bytes == 4 * adapters / 8 and held.parameters_bytes == (blocks + rest + 4 * adapters) / 8
    terms = [term for term in report.stages[0].terms if term.component in ("parameters", "gradients", "optimizer")]
    assert sum(term.value for term in terms) == held.parameters_bytes + 3 * held.gradients_bytes
    largest = LLAMA.ffn * LLAMA.hidden // 8
    assert held.scratch_bytes == 2 * largest, "one shard in bfloat16"
    trained = rotation_bytes(LLAMA, Strategy(rtp=8), 0)
    assert held.gradient_slots_bytes < trained.gradient_slots_bytes / 10
    assert "blocks of nf4" in " ".join(term.what for term in terms)


def test_time_falls_with_the_bytes_on_a_slow_link():
    slow = Cluster.preset("h100-80gb", gpus=8, link="pcie")
    steps = {}
    for frozen in (None, "int8", "nf4", "mxfp4"):
        steps[frozen] = estimate_time(LLAMA, slow, Strategy(rtp=8, frozen=frozen, lora_rank=16))
    seconds = {name: step.step_seconds for name, step in steps.items()}
    assert seconds["mxfp4"] <= seconds["nf4"] < seconds["int8"] < seconds[None]
    full = estimate_time(LLAMA, slow, Strategy(rtp=8))
    assert steps[None].components["rotation"] < full.components["rotation"], "no hops of gradients"
    assert steps["nf4"].components["gemm"] < full.components["gemm"]
    plans = (Strategy(rtp=8, frozen="nf4", lora_rank=rank) for rank in (1, 64))
    few, many, all_ = (step_flops(LLAMA, plan, 8) for plan in (*plans, Strategy(rtp=8)))
    assert 2 / 3 < few / all_ < 0.7 and few < many < all_, "no products for gradients of frozen weights"
    assert steps[None].components["optimizer"] < 0.05 * full.components["optimizer"]
    tokens = [
        hidden_from(LLAMA, slow, Strategy(rtp=8, frozen=frozen, lora_rank=16)) for frozen in (None, "int8", "nf4")
    ]
    assert tokens[0] > 1.6 * tokens[1] > 1.6 * 1.5 * tokens[2], tokens
    long = dataclasses.replace(LLAMA, seq=tokens[2])
    after = estimate_time(long, slow, Strategy(rtp=8, frozen="nf4", lora_rank=16)).components
    before = dataclasses.replace(LLAMA, seq=tokens[2] // 2)
    exposed = estimate_time(before, slow, Strategy(rtp=8, frozen="nf4", lora_rank=16)).components
    assert after["rotation"] < exposed["rotation"], "control: at half as many"


def test_what_a_plan_refuses():
    for options, message in (
        ({"frozen": "nf4"}, "frozen needs rtp of at least 2"),
        ({"lora_rank": 8}, "lora_rank needs rtp of at least 2"),
        ({"rtp": 2, "frozen": "nf2"}, "expected frozen of"),
        ({"rtp": 2, "lora_rank": -1}, "lora_rank"),
        ({"rtp": 2, "frozen": "nf4"}, "needs lora_rank of at least 1"),
        ({"rtp": 2, "lora_rank": 8, "tp": 2}, "frozen weights: expected tp 1, got 2"),
        ({"rtp": 2, "lora_rank": 8, "in_place": True}, "expected in_place False, got True"),
        ({"rtp": 2, "lora_rank": 8, "frozen": "nf4", "fused_loss": True}, "expected fused_loss False, got True"),
        ({"rtp": 2, "dp": 2, "lora_rank": 8, "outer": "zero"}, "expected outer 'allreduce', got 'zero'"),
    ):
        with pytest.raises(ValueError, match=message):
            Strategy(**options)
    mixture, plan = ModelSpec.preset("mixtral-8x7b"), Strategy(rtp=2, frozen="nf4", lora_rank=8)
    with pytest.raises(ValueError, match="needs a model without experts, got 8 in each layer of mixtral-8x7b"):
        plan.check(mixture, Cluster.preset("h100-80gb", gpus=2))


def test_the_command(capsys):
    plan = ["plan", "--model", "llama-3-8b", "--gpus", "8", "--rtp", "8", "--frozen", "nf4", "--lora-rank", "16"]
    assert main(plan) == 0
    assert "rtp=8 frozen=nf4 lora_rank=16" in capsys.readouterr().out
    assert main([*plan, "--when"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| PCIe")]
    wide, travel, nf4, mxfp4, int8 = map(int, rows[0].split("|")[2:7])
    assert mxfp4 <= nf4 < int8 and travel < wide and nf4 < 0.35 * wide
    page = (Path(__file__).resolve().parents[2] / "docs" / "frozen.md").read_text()
    plan[2] = "llama-3-70b"
    assert main([*plan, "--when"]) == 0 and capsys.readouterr().out.partition("\n\n")[0] in page
    assert main([*plan, "--when", "--plot", "x.png"]) == 2 and "--when has no --plot" in capsys.readouterr().err
