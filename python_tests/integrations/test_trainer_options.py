"""RotationTrainer and RotationAccelerator: further options, and refusals."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, run_ranks
from hf_models import refused
from trainer_cases import (
    as_torchrun,
    curve,
    far,
    same_weights,
    small_llama,
    trained,
    trainer_of,
    whole,
    with_frameworks,
)

import rtp_ext

CLOSE = 1e-4


def lora_of(model):
    import peft

    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


@on_ranks(2, timeout=300.0)
@with_frameworks
def test_options(rank, ranks, cases, tmp_path):
    folder = str(tmp_path)
    as_torchrun(rank, ranks)
    import peft
    from transformers import AutoModelForCausalLM, Trainer

    from rtp_ext.integrations import RotationTrainer

    model = small_llama()
    with cases.case("bf16, activation checkpointing"):
        changes = {"max_steps": 4, "bf16": True, "gradient_checkpointing": True}
        with trained(Trainer, copy.deepcopy(model), f"{folder}/a", changes) as ddp:
            losses, norms = curve(ddp, "loss"), curve(ddp, "grad_norm")
        with trained(RotationTrainer, copy.deepcopy(model), f"{folder}/b", changes) as ours:
            assert far(curve(ours, "loss"), losses) < 5e-3 and far(curve(ours, "grad_norm"), norms) < 3e-2
        with trained(Trainer, copy.deepcopy(model), f"{folder}/c", {"max_steps": 4}) as other:
            assert far(curve(other, "loss"), losses) > 1e-5, "control: bf16 shows"
    with cases.case("the best model at the end"):
        changes = {
            "max_steps": 6,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
            "greater_is_better": True,  # so that the first one is the best
        }
        for only in (False, True):
            mine = {**changes, "save_only_model": only}
            with trained(RotationTrainer, copy.deepcopy(model), f"{folder}/best-{only}", mine) as ours:
                best = whole(ours.model)
            for step in (2, 6):
                saved = AutoModelForCausalLM.from_pretrained(f"{folder}/best-{only}/checkpoint-{step}")
                if step == 2:
                    same_weights(dict(saved.named_parameters()), best, 0.0, "best")
                else:
                    with refused("the last is the best"):
                        same_weights(dict(saved.named_parameters()), best, 1e-4, "last")
    with cases.case("adapters"):
        changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        with trained(Trainer, lora_of(copy.deepcopy(model)), f"{folder}/d", changes) as ddp:
            losses, norms = curve(ddp, "loss"), curve(ddp, "grad_norm")
            weights = whole(ddp.model)
        with trained(RotationTrainer, lora_of(copy.deepcopy(model)), f"{folder}/e", changes) as ours:
            assert far(curve(ours, "loss"), losses) < CLOSE, f"{curve(ours, 'loss')}, expected {losses}"
            assert far(curve(ours, "grad_norm"), norms) < CLOSE
            final = whole(ours.model)
            same_weights(final, weights, 1e-3, "adapters")
            ours.save_model()
        dist.barrier()
        files = {file.name for file in Path(f"{folder}/e").iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json"} <= files and "model.safetensors" not in files
        reloaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), f"{folder}/e")
        same_weights(dict(reloaded.named_parameters()), final, 0.0, "reloaded adapters")
        half = f"{folder}/e/checkpoint-3"
        with trained(RotationTrainer, lora_of(copy.deepcopy(model)), f"{folder}/f", changes, resume=half) as again:
            same_weights(whole(again.model), final, 0.0, "resumed adapters")
    with cases.case("adapters around a converted model"):
        converted = lora_of(rtp_ext.fully_rotate(copy.deepcopy(model)))
        with trained(RotationTrainer, converted, f"{folder}/j", {"max_steps": 3, "lr_scheduler_type": "constant"}) as a:
            losses, norms = curve(a, "loss"), curve(a, "grad_norm")
        plain = lora_of(copy.deepcopy(model))
        with trained(Trainer, plain, f"{folder}/j", {"max_steps": 3, "lr_scheduler_type": "constant"}) as ddp:
            assert far(losses, curve(ddp, "loss")) < CLOSE and far(norms, curve(ddp, "grad_norm")) < CLOSE
    with cases.case("ranks that begin with different weights"):
        torch.manual_seed(rank)
        mine = copy.deepcopy(model)
        with torch.no_grad():
            mine.lm_head.weight.add_(rank)
        trainer = trainer_of(RotationTrainer, mine, f"{folder}/g", {})
        expected = dict(model.named_parameters())
        same_weights(whole(trainer.model), expected, 0.0, "those of rank 0")
        rtp_ext.ring_of(trainer.model).close()
    with cases.case("save_pretrained"):
        ours = rtp_ext.fully_rotate(copy.deepcopy(model), loss_head="fused")
        ours.save_pretrained(f"{folder}/h", max_shard_size="20KB")
        saved = AutoModelForCausalLM.from_pretrained(f"{folder}/h")
        same_weights(dict(saved.named_parameters()), dict(model.named_parameters()), 0.0, "saved")
        assert len(list(Path(f"{folder}/h").glob("*.safetensors"))) > 1
        with pytest.raises(ValueError, match="expected a state_dict of whole tensors, got shards"):
            ours.save_pretrained(f"{folder}/i", state_dict=ours.state_dict())
        with pytest.raises((RuntimeError, OSError), match=r"Not a directory|exists"):
            ours.save_pretrained(f"{folder}/h/config.json/below")
        rtp_ext.ring_of(ours).close()
    with cases.case("refused"):
        for changes, options, match in (
            ({"auto_find_batch_size": True}, {}, "auto_find_batch_size=False"),
            ({"bf16": True}, {"mp_policy": rtp_policy()}, "got both"),
            ({"accelerator_config": {"even_batches": False}}, {}, "even_batches=True"),
            ({}, {"ignored_params": [model.lm_head.weight]}, "expected ignored_params to be frozen"),
        ):
            with pytest.raises(ValueError, match=match):
                trainer_of(RotationTrainer, model, f"{folder}/k", changes, rotate=options)


def rtp_policy():
    return torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@on_ranks(2, timeout=240.0)
@with_frameworks
def test_accelerate(rank, ranks, tmp_path):
    folder = str(tmp_path)
    as_torchrun(rank, ranks)
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from trainer_cases import samples

    from rtp_ext.integrations import RotationAccelerator

    model = small_llama()

    def run(make, steps, resume=None, save=None):
        accelerator = make()
        mine = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=5e-3)  # before prepare, as the guide of accelerate has it
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        loader = DataLoader(samples(64), batch_size=2)
        mine, optimizer, loader, schedule = accelerator.prepare(mine, optimizer, loader, schedule)
        if resume is not None:
            accelerator.load_state(resume)
        losses, norms = [], []
        batches = list(loader)
        for batch in batches[slice(*steps)]:
            with accelerator.accumulate(mine):
                loss = mine(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(mine.parameters(), 0.5).item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        if save is not None:
            accelerator.save_state(save)
        return accelerator, mine, losses, norms

    def ours():
        return RotationAccelerator(cpu=True, gradient_accumulation_steps=2)

    _, _, losses, norms = run(lambda: Accelerator(cpu=True, gradient_accumulation_steps=2), (0, 8))
    accelerator, trained_model, mine, my_norms = run(ours, (0, 8))
    assert far(mine, losses) < CLOSE and far(my_norms, norms) < CLOSE, f"{mine} {losses} {my_norms} {norms}"
    assert len(norms) == 4 and losses[-1] < losses[0]
    final = whole(trained_model)
    accelerator.unwrap_model(trained_model).save_pretrained(
        f"{folder}/whole",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(trained_model),
    )
    accelerator.wait_for_everyone()
    saved = type(model).from_pretrained(f"{folder}/whole")
    same_weights(dict(saved.named_parameters()), final, 0.0, "save_pretrained")
    run(ours, (0, 4), save=f"{folder}/state")
    _, resumed, again, _ = run(ours, (4, 8), resume=f"{folder}/state")
    assert again == mine[4:], f"{again}, expected {mine[4:]}"
    same_weights(whole(resumed), final, 0.0, "resumed")
    with pytest.raises(ValueError, match="expected a checkpoint of a converted model"):
        Path(f"{folder}/empty").mkdir(exist_ok=True)
        run(ours, (0, 0), resume=f"{folder}/empty")
    with pytest.raises(ValueError, match="join_uneven_inputs"):
        accelerator.join_uneven_inputs([trained_model])
    stepped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stepped.step()
    with pytest.raises(ValueError, match="an optimizer that has not stepped yet"):
        ours().prepare(model, stepped)


def _other_ranks(rank, ranks, folder, known):
    as_torchrun(rank, ranks)
    from transformers import TrainerCallback

    from rtp_ext.integrations import RotationTrainer

    def kept(model, optimizer):
        moments = {n: optimizer.state[p]["exp_avg"].full_tensor() for n, p in model.named_parameters()}
        assert max(moment.abs().max() for moment in moments.values()) > 0
        return {**whole(model), **{f"moment of {n}": moment for n, moment in moments.items()}}

    class AtBegin(TrainerCallback):  # later is too late: with other ranks an epoch has other steps, and one may follow
        def on_train_begin(self, args, state, control, model, optimizer, **rest):
            found.update(kept(model, optimizer))

    found, changes = {}, {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    if not known:
        with trained(RotationTrainer, small_llama(), folder, changes) as ours:
            return kept(ours.model, ours.optimizer)
    resume = f"{folder}/checkpoint-2"
    with trained(RotationTrainer, small_llama(), f"{folder}/other", changes, resume, callbacks=[AtBegin()]):
        same_weights(found, known, 0.0, "on other ranks")


@with_frameworks
def test_resumes_on_another_number_of_ranks(tmp_path):
    known = run_ranks(_other_ranks, 2, str(tmp_path), {}, timeout=240.0)[0]
    run_ranks(_other_ranks, 3, str(tmp_path), known, timeout=240.0)
