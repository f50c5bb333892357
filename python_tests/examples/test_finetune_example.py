"""examples/finetune.py: on two ranks and in one process it trains as the plain model of transformers does, resumes
where it was, also on another number of ranks, and saves what from_pretrained reads."""

import argparse
import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/finetune.py"
STEPS, MIDDLE = 6, 3
CLOSE = 1e-5
SETTINGS = {"steps": STEPS, "batch": 4, "length": 16, "lr": 1e-2, "warmup": 2, "seed": 3}
LORA = ["--lora-rank", "4"]


def example():
    spec = importlib.util.spec_from_file_location("finetune_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(folder, name, *more):
    settings = (f"--{key}={value}" for key, value in SETTINGS.items())
    files = ["--model", f"{folder}/pretrained", "--data", f"{folder}/text", "--save", f"{folder}/{name}"]
    return [*files, *settings, "--save-every", str(MIDDLE), "--log-every", "2", *more]


def write_pretrained(folder):
    """A small Llama with tied embeddings, a tokenizer, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    text = "the shards of a ring visit every rank, and each product hides a hop. " * 20
    (folder / "text").write_text(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=60, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "pretrained")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "pretrained")


def plain(folder, module, lora):
    """The losses of the plain model, which has whole batches, and the values that it ends with."""
    import peft
    from transformers import AutoModelForCausalLM

    options = argparse.Namespace(model=f"{folder}/pretrained", data=Path(folder) / "text", **SETTINGS)
    model, rows = AutoModelForCausalLM.from_pretrained(options.model), module.sequences(options)
    if lora:
        torch.manual_seed(options.seed)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained), []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = module.learning_rate(step, options)
        ids = module.batch(rows, step, options)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def saved(folder, name, lora):
    """The values that from_pretrained finds."""
    import peft
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained
    path = f"{folder}/{name}/model"
    model = peft.PeftModel.from_pretrained(read(f"{folder}/pretrained"), path) if lora else read(path)
    return dict(model.named_parameters())


def apart(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def again(rank, module, folder, name, *more):
    """Goes on from the middle of a run that has ended."""
    if rank == 0:
        shutil.rmtree(f"{folder}/{name}/step_{STEPS}")
    dist.barrier()
    return module.main(arguments(folder, name, "--resume", *more))


def _two_ranks(rank, ranks, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    module, found = example(), {}
    for name, more in (("full", []), ("lora", LORA), ("nf4", [*LORA, "--frozen", "nf4"])):
        first, losses = module.main(arguments(folder, name, *more))
        end = {key: value.clone() for key, value in saved(folder, name, bool(more)).items()}
        dist.barrier()
        resumed, others = again(rank, module, folder, name, *more)
        assert (first, resumed) == (0, MIDDLE) and others == losses[MIDDLE:], f"{name}: {others}, expected {losses}"
        for key, value in saved(folder, name, bool(more)).items():
            assert torch.equal(value, end[key]), f"{name}: {key}"
        found[name] = losses
    with pytest.raises(SystemExit, match=f"expected --resume, .*step_{STEPS}"):
        module.main(arguments(folder, "full"))
    model, ring = module.load(
        argparse.Namespace(lora_rank=0, bf16=False, frozen=None, model=f"{folder}/pretrained"), "cpu"
    )
    whole = sum(parameter.numel() for parameter in model.parameters())
    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert kept == whole // ranks, f"{kept} of {whole}"
    ring.close()
    return found


def _alone(rank, ranks, folder, found):
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    module = example()
    for name, more in (("full", []), ("lora", LORA)):
        expected, values = plain(folder, module, bool(more))
        first, losses = module.main(arguments(folder, f"{name}-alone", *more))
        assert first == 0 and apart(losses, expected) < CLOSE, f"{name}: {losses}, expected {expected}"
        assert apart(found[name], expected) < CLOSE, f"{name}: {found[name]}, expected {expected}"
        assert apart(expected[1:], expected[:-1]) > 1000 * CLOSE, "control: losses change from step to step"
        for run in (name, f"{name}-alone"):
            ends = saved(folder, run, bool(more))
            worst = max((ends[key] - values[key]).abs().max().item() for key in values)
            assert ends.keys() == values.keys() and worst < 1e-4, f"{run}: {worst}"
        step, others = again(rank, module, folder, name, *more)
        assert step == MIDDLE and apart(others, expected[MIDDLE:]) < CLOSE, "the checkpoint of two ranks"
    assert 1e-3 < apart(found["nf4"], found["lora"]) < 0.3, "rounded weights: other losses, but not far"


def test_it_trains_as_the_plain_model_and_resumes(tmp_path):
    pytest.importorskip("peft")
    write_pretrained(tmp_path)
    found, others = run_ranks(_two_ranks, 2, str(tmp_path), timeout=120.0)
    assert found == others
    run_ranks(_alone, 1, str(tmp_path), found, timeout=120.0)
