"""Models, clusters and strategies of the planner: parameter counts, configurations, and refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rtp_ext.planner import Cluster, ModelSpec, Strategy
from rtp_ext.planner.constants import FILE, constants

# released checkpoints: the numbers of parameters that transformers counts in them
RELEASED = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}
# arXiv 2005.14165, Table 2.1, in units of 1e6
PRINTED = {
    "gpt-3-small": 125,
    "gpt-3-medium": 350,
    "gpt-3-large": 760,
    "gpt-3-xl": 1300,
    "gpt-3-2.7b": 2700,
    "gpt-3-6.7b": 6700,
    "gpt-3-13b": 13000,
    "gpt-3-175b": 175000,
}


def test_presets_have_the_published_sizes():
    assert {name: ModelSpec.preset(name).parameters for name in RELEASED} == RELEASED
    for name, millions in PRINTED.items():
        assert ModelSpec.preset(name).parameters / 1e6 == pytest.approx(millions, rel=0.03), name
    assert ModelSpec.preset("mixtral-8x7b").active_parameters == 12_879_925_248
    assert ModelSpec.preset("llama-3-8b", seq=4096).seq == 4096
    assert set(constants()["models"]) == {"llama-2-7b", "llama-2-13b", *RELEASED, *PRINTED}


def test_presets_have_the_parameters_of_real_modules():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    makes = {
        "llama": dict(
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=40,
            vocab_size=50,
        ),
        "gpt2": dict(n_embd=24, n_layer=3, n_head=4, vocab_size=50, n_positions=16),
    }
    makes["mistral"] = makes["llama"]
    makes["qwen2"] = {**makes["llama"], "tie_word_embeddings": True}
    makes["qwen3"] = {**makes["llama"], "head_dim": 8}
    makes["mixtral"] = {**makes["llama"], "num_local_experts": 4, "num_experts_per_tok": 2}
    for kind, sizes in makes.items():
        config = transformers.AutoConfig.for_model(kind, **sizes)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        spec = ModelSpec.from_hf_config(config.to_dict())
        assert spec.parameters == sum(p.numel() for p in model.parameters()), kind


def test_other_causal_models_are_counted_on_the_meta_device():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
    makes = {
        "gemma2": {**small, "intermediate_size": 96, "head_dim": 8, "num_key_value_heads": 2},
        "qwen3_moe": {**small, **experts, "num_experts": 4, "head_dim": 8},
        "opt": {**small, "ffn_dim": 96, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    }
    for kind, sizes in makes.items():
        config = transformers.AutoConfig.for_model(kind, **sizes)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        spec, values = ModelSpec.from_hf_config(config.to_dict()), sum(p.numel() for p in model.parameters())
        inner = spec.layers * spec.hidden * (3 if spec.gated else 2) * max(1, spec.experts)
        assert abs(spec.parameters - values) <= inner / 2 < values / 10, kind  # to the next whole inner feature
        assert (spec.layers, spec.hidden, spec.vocab, spec.experts) == (3, 32, 100, sizes.get("num_experts", 0)), kind
    for kind in ("mamba", "t5"):
        with pytest.raises(ValueError, match="configuration"):
            ModelSpec.from_hf_config({"model_type": kind, "_name_or_path": kind, "num_layers": 2})
    for wrong in ({"num_hidden_layers": 1 << 31}, {"architectures": ["logging"]}):
        told = {**makes["gemma2"], "model_type": "gemma2", **wrong}
        with pytest.raises(ValueError, match=r"expected (num_hidden_layers of at most|the class of a model)"):
            ModelSpec.from_hf_config(told)


def test_configurations_are_read_from_files(tmp_path):
    told = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(told))
    for place in (tmp_path, str(tmp_path / "config.json")):
        assert ModelSpec.from_hf_config(place).parameters == RELEASED["llama-3-8b"]
    assert ModelSpec.from_hf_config(tmp_path, seq=1024).seq == 1024
    for key in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"):
        with pytest.raises(ValueError, match=f"expected {key}"):
            ModelSpec.from_hf_config({name: value for name, value in told.items() if name != key})
    for text in ("[]", "{", "", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"configuration .*config\.json"):
            ModelSpec.from_hf_config(tmp_path)


def test_clusters(tmp_path):
    for name, gigabytes in {"a100-80gb": 80, "h100-80gb": 80, "h200-141gb": 141, "b200-180gb": 180}.items():
        cluster = Cluster.preset(name, gpus=24)
        assert (cluster.memory_bytes, cluster.gpus, cluster.nodes) == (gigabytes * 1e9, 24, 3)
    assert Cluster.preset("a100-80gb").bf16_flops_per_s == 312e12
    (tmp_path / "cluster.json").write_text('{"base": "h100-80gb", "name": "mine", "memory_bytes": 96e9, "gpus": 16}')
    mine = Cluster.from_json(tmp_path / "cluster.json")
    assert (mine.name, mine.memory_bytes, mine.gpus, mine.nvlink_bytes_per_s) == ("mine", 96e9, 16, 450e9)
    assert Cluster.from_json(mine.to_dict()) == mine
    with pytest.raises(ValueError, match="unknown fields memory, speed"):
        Cluster.from_json({"base": "h100-80gb", "speed": 1, "memory": 2})
    with pytest.raises(ValueError, match=r"missing fields .*memory_bytes"):
        Cluster.from_json({"name": "mine", "gpus": 8})
    with pytest.raises(ValueError, match="positive memory_bytes"):
        Cluster.from_json({"base": "h100-80gb", "memory_bytes": -1})


def test_every_constant_has_a_source():
    told = json.loads(FILE.read_text())
    assert told["version"] == 1
    for section in ("gpus", "memory", "logits"):
        assert all(entry["source"] for entry in told[section].values()), section
    families = tuple(told["model_sources"])
    assert all(name.startswith(families) for name in told["models"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster.preset("a100-80gb", gpus=0), "gpus to be a whole number of at least 1, got 0"),
        (lambda: Cluster.preset("tpu"), "unknown GPU 'tpu'"),
        (lambda: ModelSpec.preset("gpt-5"), "unknown model 'gpt-5'"),
        (lambda: ModelSpec.gpt(layers=2, hidden=100, heads=3), "hidden divisible by heads, got 100 and 3"),
        (lambda: ModelSpec.llama(layers=2, hidden=96, heads=6, kv_heads=4), "heads divisible by kv_heads"),
        (lambda: ModelSpec.llama(layers=0, hidden=96, heads=6), "layers to be a whole number"),
        (lambda: ModelSpec.llama(layers=2, hidden=96, heads=6, experts=2), "1 <= experts_per_token <= 2"),
        (lambda: Strategy(dp=0), "dp to be a whole number of at least 1, got 0"),
        (lambda: Strategy(tp=2.0), "tp to be a whole number"),
        (lambda: Strategy(zero=4), "zero to be 0, 1, 2 or 3, got 4"),
        (lambda: Strategy(schedule="zb"), "unknown schedule 'zb'"),
        (lambda: Strategy(param_dtype="int8"), "unknown param_dtype"),
        (lambda: Strategy(pp=2, interleave=2), "needs schedule 'interleaved'"),
        (lambda: Strategy(schedule="interleaved"), "needs pp of at least 2"),
        (lambda: Strategy(dp=4, ep=3), "dp divisible by ep"),
        (lambda: Strategy(rtp=2, zero=3), "rtp shards states by itself"),
        (lambda: Strategy(in_place=True), "in_place needs rtp"),
        (lambda: Strategy(bundle="maybe"), "bundle to be"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("strategy", "batch", "message"),
    [
        (Strategy(dp=16), None, "= 16 GPUs, but the cluster has 8"),
        (Strategy(tp=3), None, "heads divisible by tp, got 32 and 3"),
        (Strategy(cp=3), None, "seq divisible by cp"),
        (Strategy(dp=8), 4, "multiple of dp"),
        (Strategy(dp=8), 12, "multiple of dp"),
        (Strategy(dp=4, rtp=2, micro_batch=3), 12, "= 24 samples, got 12"),
        (Strategy(dp=8), 0, "global_batch to be a whole number"),
        (Strategy(pp=5, schedule="interleaved", interleave=2), None, "layers divisible by pp"),
        (Strategy(dp=8, ep=8), None, "experts divisible by ep"),
    ],
)
def test_plans_that_cannot_run_are_refused(strategy, batch, message):
    with pytest.raises(ValueError, match=message):
        strategy.check(ModelSpec.preset("llama-3-8b"), Cluster.preset("h100-80gb"), batch)
    strategy.__class__(dp=8).check(ModelSpec.preset("llama-3-8b"), Cluster.preset("h100-80gb"), 16)


def test_what_follows_from_a_strategy():
    assert (Strategy(zero=3).effective_stack, Strategy(rtp=2).effective_stack, Strategy().effective_stack) == (
        "torch",
        "torch",
        "megatron",
    )
    losses = [Strategy(zero=3), Strategy(zero=3, tp=2), Strategy(tp=2), Strategy(rtp=2, fused_loss=True)]
    assert [strategy.effective_loss for strategy in losses] == ["eager", "loss-parallel", "megatron", "fused"]
    assert Strategy(dp=2, rtp=4, micro_batch=3).micro_batches(48) == 2
    assert Strategy(**Strategy(dp=2, tp=4).to_dict()) == Strategy(dp=2, tp=4)


def test_the_planner_itself_imports_no_torch():
    folder = Path(FILE).parent
    files = [file.relative_to(folder).with_suffix("") for file in folder.rglob("*.py") if file.stem != "__init__"]
    modules = [".".join(file.parts) for file in files]
    modules = [name for name in modules if name not in ("app.page", "app.figures")]  # the extra `app`
    assert {"cli", "native", "memory.estimate", "time.work"} <= set(modules)
    code = (
        "import sys, types\n"
        "package = types.ModuleType('rtp_ext'); package.__path__ = [sys.argv[1]]; sys.modules['rtp_ext'] = package\n"
        "import importlib\n"
        "for name in sys.argv[2:]: importlib.import_module('rtp_ext.planner.' + name)\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder.parent), *modules], check=True, timeout=60)
