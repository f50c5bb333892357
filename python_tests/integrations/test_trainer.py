"""RotationTrainer against the stock Trainer with DistributedDataParallel."""

import copy
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import on_ranks
from hf_models import refused
from trainer_cases import as_torchrun, curve, far, same_weights, small_llama, trained, whole, with_frameworks

CLOSE = 1e-4


@on_ranks([2, pytest.param(3, marks=with_frameworks)], timeout=240.0)
def test_trains_saves_and_resumes_like_ddp(rank, ranks, tmp_path):
    folder = str(tmp_path)
    as_torchrun(rank, ranks)
    from transformers import AutoModelForCausalLM, Trainer

    from rtp_ext.integrations import RotationTrainer

    changes = {"gradient_accumulation_steps": 2}
    model = small_llama(tie_word_embeddings=True)
    with trained(Trainer, copy.deepcopy(model), f"{folder}/ddp", changes) as ddp:
        losses, norms, weights = curve(ddp, "loss"), curve(ddp, "grad_norm"), whole(ddp.model)
        evaluated = ddp.evaluate()["eval_loss"]
    total = sum(parameter.numel() for parameter in model.parameters())
    saving = {**changes, "save_strategy": "steps", "save_steps": 10}
    with trained(RotationTrainer, copy.deepcopy(model), f"{folder}/rtp", saving) as ours:
        assert far(curve(ours, "loss"), losses) < CLOSE, f"losses {curve(ours, 'loss')}, expected {losses}"
        assert far(curve(ours, "grad_norm"), norms) < CLOSE, f"norms {curve(ours, 'grad_norm')}, expected {norms}"
        assert losses[-1] < 0.8 * losses[0] and max(norms) > 0.5, "control: it learns, and is clipped"
        assert far(losses[1:], losses[:-1]) > 100 * CLOSE, "control: losses of neighbouring steps differ"
        assert abs(ours.evaluate()["eval_loss"] - evaluated) < CLOSE * evaluated
        mine = sum(parameter.to_local().numel() for parameter in ours.model.parameters())
        assert mine < 1.1 * total / ranks, f"{mine} of {total} parameters on one of {ranks} ranks"
        final = whole(ours.model)
        same_weights(final, weights, 5e-3, "after 20 steps")
        with refused("20 steps change nothing"):
            same_weights(dict(model.named_parameters()), weights, 5e-3, "before")
        ours.save_model(f"{folder}/saved")
    dist.barrier()
    reloaded = AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    assert type(reloaded) is type(model) and reloaded.config.architectures == ["LlamaForCausalLM"]
    same_weights(dict(reloaded.named_parameters()), final, 0.0, "reloaded")
    assert {"model.safetensors", "config.json"} <= {file.name for file in Path(f"{folder}/saved").iterdir()}
    checkpoint = f"{folder}/rtp/checkpoint-10"
    with trained(RotationTrainer, copy.deepcopy(model), f"{folder}/again", changes, resume=checkpoint) as again:
        same_weights(whole(again.model), final, 0.0, "resumed")
        assert curve(again, "loss") == curve(ours, "loss")[: len(curve(again, "loss"))]
        with refused("the checkpoint of the middle is the end"):
            same_weights(dict(AutoModelForCausalLM.from_pretrained(checkpoint).named_parameters()), final, 0.0, "")
