"""Frozen weights in the planner: bytes at home, on the wire and in slots against a conversion; time by bytes."""

import dataclasses
import json
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
from rtp_ext.planner.rotation.operations import RotatedOperation, Weight
from rtp_ext.planner.time.estimate import step_flops

transformers = pytest.importorskip("transformers")

SIZES = {"layers": 2, "hidden": 192, "heads": 6, "kv_heads": 3, "ffn": 576, "vocab": 96, "seq": 16}
SPEC = ModelSpec.llama(**SIZES)
NEOX = ModelSpec.gpt(**{**SIZES, "kv_heads": None}, positions=0, tied=False)
MIXTURE = ModelSpec.llama(**SIZES, experts=6, experts_per_token=2)
NARROW = dataclasses.replace(MIXTURE, ffn=3)  # down of an expert: 9 blocks of nf4, and not whole ones of int8
TIED = ModelSpec.llama(**SIZES, tied=True)
RANK = 6
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]  # all linear layers beside experts
LLAMA = ModelSpec.preset("llama-3-8b", seq=2048)


def _model(lora_rank: int, spec: ModelSpec = SPEC) -> torch.nn.Module:
    sizes = {
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied,
        "use_cache": False,
    }
    if spec.family == "gpt":
        model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))
    elif spec.experts:
        experts = {"num_local_experts": spec.experts, "num_experts_per_tok": spec.experts_per_token}
        sizes |= {"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim, **experts}
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=spec.kv_heads, **sizes))
    model.requires_grad_(False)
    if not lora_rank:
        return model
    layers = ATTENTION if spec.experts else "all-linear"
    return peft.get_peft_model(model, peft.LoraConfig(r=lora_rank, target_modules=layers, task_type="CAUSAL_LM"))


def _wire(rotations: list, ranks: int) -> tuple[int, int, int]:
    """Bytes of the hops of weights in forward and in backward, and of gradients, where all shards are equal."""
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
        assert _wire(rotations, ranks) == sent
        count = 4 * SPEC.layers * SPEC.adapter_parameters(lora_rank) / ranks
        assert held.gradients_bytes == count == held.optimizer_bytes / 2
        wide = rtp_bytes(rotations_of(SPEC)[0], ranks, others=others)
        assert wide.parameters_bytes != held.parameters_bytes, "control: without frozen weights"


@pytest.mark.parametrize("spec", [SPEC, TIED, NEOX, MIXTURE, NARROW], ids=["llama", "tied", "gpt", "experts", "narrow"])
def test_bytes_of_experts_and_fused_heads_are_those_of_explain(spec):
    with torch.device("meta"):
        model = _model(RANK, spec)
    for frozen, ranks, fused in (("nf4", 3, True), ("int8", 2, True), ("mxfp4", 1, True), ("int8", 3, False)):
        fused = fused and spec is not NEOX  # which fuses no head
        head = "fused" if fused else None
        plan = rtp_ext.explain(model, frozen=frozen, loss_head=head, ranks=ranks, device="cpu")
        rotations, others = rotations_of(spec, frozen=frozen, lora_rank=RANK, fused_loss=fused)
        held, totals = rtp_bytes(rotations, ranks, others=others), plan.totals
        assert held.parameters_bytes == totals["held_bytes"], (frozen, ranks)
        sent = tuple(totals[f"{name}_bytes"] for name in ("forward", "backward", "gradient"))
        assert _wire(rotations, ranks) == sent, (frozen, ranks)
        assert held.gradients_bytes == 4 * spec.layers * spec.adapter_parameters(RANK) / ranks
        assert (rotations[-1].weights[0].frozen is not None) == (fused and not spec.tied)
        blocks = {weight.shape for each in rotations for weight in each.weights if weight.frozen}
        experts = 1 if spec is NARROW and frozen == "int8" else 2
        assert sum(len(shape) == 3 for shape in blocks) == (experts if spec.experts else 0)


def _converted(rank, ranks):
    cases = Cases()
    for frozen, transport, spec, fused in (
        ("nf4", "shm", SPEC, True),
        ("int8", "c10d", MIXTURE, True),
        (None, "shm", SPEC, False),
    ):
        name = f"{frozen} {transport} {spec.experts} {fused}"
        with rtp_ext.Ring(transport=transport, timeout=60.0, route="ring") as ring, cases.case(name):
            head = "fused" if fused else None
            model = rtp_ext.fully_rotate(_model(RANK, spec), mesh=ring, frozen=frozen, loss_head=head)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            ids = torch.arange(32).view(2, 16) % SPEC.vocab
            for _ in range(4):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
            rotations, others = rotations_of(spec, frozen=frozen, lora_rank=RANK, fused_loss=fused)
            reach = {"receives_anywhere": transport != "shm", "late_gradients": 2 * (transport == "c10d")}
            planned = rtp_bytes(rotations, ranks, rank=rank, others=others, **reach)
            counts = [ring.slot_count(channel).peak_bytes for channel in ("weight", "gradient", "scratch")]
            assert counts == [planned.weight_slots_bytes, planned.gradient_slots_bytes, planned.scratch_bytes]
            held = sum(local(p).untyped_storage().nbytes() for p in model.parameters())
            states = [v for state in optimizer.state.values() for v in state.values() if v.dim() > 0]
            assert held == planned.parameters_bytes
            assert sum(local(v).untyped_storage().nbytes() for v in states) == planned.optimizer_bytes
            assert planned.weight_slots_bytes < rtp_bytes(rotations_of(spec)[0], ranks).weight_slots_bytes, "control"
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


def test_experts_and_fused_heads_in_a_plan():
    model, cluster = ModelSpec.preset("mixtral-8x7b", seq=2048), Cluster.preset("h100-80gb", gpus=8, link="pcie")
    plans = [Strategy(rtp=8, frozen=frozen, lora_rank=16, fused_loss=True) for frozen in (None, "int8", "nf4")]
    wide, _, nf4 = (rotation_bytes(model, plan, 0) for plan in plans)
    blocked = model.layers * (model.attention_parameters + model.mlp_parameters) + model.head_parameters
    assert wide.parameters_bytes - nf4.parameters_bytes == blocked * (2 - 0.5625) / 8
    assert nf4.scratch_bytes == 2 * 3 * model.ffn * model.hidden * model.experts // 8, "a rank's experts in bfloat16"
    seconds = [estimate_time(model, cluster, plan).step_seconds for plan in plans]
    assert seconds[2] < seconds[1] < seconds[0]


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
        ({"rtp": 2, "dp": 2, "lora_rank": 8, "outer": "zero"}, "expected outer 'allreduce', got 'zero'"),
    ):
        with pytest.raises(ValueError, match=message):
            Strategy(**options)
    bundle = RotatedOperation("bundle", (Weight((64, 64)), Weight((64, 64), dim=1)))
    for make, message in (
        (lambda: Weight((64, 64), dim=1, frozen="nf4"), "cut along the first, got .* cut along 1"),
        (lambda: Weight((2, 3, 32), frozen="nf4"), "fill whole blocks of nf4, got 96 numbers in each"),
        (lambda: RotatedOperation("embedding", (Weight((64, 64), frozen="nf4"),)), "of kind embedding"),
        (lambda: dataclasses.replace(bundle, weights=(Weight((64, 64), frozen="nf4"),)), "of kind bundle"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_the_command(capsys):
    plan = ["plan", "--model", "llama-3-8b", "--gpus", "8", "--rtp", "8", "--frozen", "nf4", "--lora-rank", "16"]
    assert main(plan) == 0
    assert "rtp=8 frozen=nf4 lora_rank=16" in capsys.readouterr().out
    assert main([*plan, "--when"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| PCIe")]
    wide, travel, nf4, mxfp4, int8 = map(int, rows[0].split("|")[2:7])
    assert main([*plan, "--when", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)["PCIe"].values()] == [wide, travel, nf4, mxfp4, int8]
    assert mxfp4 <= nf4 < int8 and travel < wide and nf4 < 0.35 * wide
    page = (Path(__file__).resolve().parents[2] / "docs" / "frozen.md").read_text()
    plan[2] = "llama-3-70b"
    assert main([*plan, "--when"]) == 0 and capsys.readouterr().out.partition("\n\n")[0] in page
    assert main([*plan, "--when", "--plot", "x.png"]) == 2 and "--when has no --plot" in capsys.readouterr().err
    for beside in (["--link", "nvlink"], ["--gpus-per-node", "2"], ["--global-batch", "4"], ["--seq", "64"]):
        assert main([*plan, "--when", *beside]) == 2
        assert f"--when has no {beside[0]}" in capsys.readouterr().err, "an argument that changed nothing"
