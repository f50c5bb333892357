"""Adapters around a base in 4 bits, in RotationTrainer and in TRL's SFTTrainer, against the stock trainers: both train
with weights that are values of nf4."""

import pytest
import torch
from compatibility.framework_runs import as_torchrun, llama, rows, trained_twice
from harness import run_ranks
from torch import nn
from trainer_cases import with_frameworks

import rtp_ext
from rtp_ext.parameters.frozen import FrozenWeight

STEPS, CLOSE = 6, 2e-5


def _base(rounds: bool = True) -> nn.Module:
    model = llama()
    for parameter in model.parameters():
        parameter.detach().mul_(6 if parameter.dim() > 1 else 1)  # so that adapters, and rounding, show in the loss
    for module in model.model.modules() if rounds else ():
        if isinstance(module, nn.Linear):
            values = module.weight.detach()
            weight = FrozenWeight("nf4", tuple(values.shape), values.dtype)
            values.copy_(weight.decode(weight.encode(values, weight.packed_shape[0])))
    return model


def _adapted(rounds: bool = True) -> nn.Module:
    import peft

    torch.manual_seed(1)
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(_base(rounds), options)


def _loaded(saved: str) -> nn.Module:
    import peft

    model = peft.PeftModel.from_pretrained(_base(), saved, is_trainable=True)
    return rtp_ext.fully_rotate(model, frozen="nf4", transport="shm")


def _trained(rank, ranks, folder, trl):
    as_torchrun(rank, ranks)
    from transformers import Trainer

    from rtp_ext.integrations import RotationTrainer

    stock, ours, options = Trainer, RotationTrainer, {}
    if trl:
        from compatibility.trl_runs import RotationSFTTrainer, numbers
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        stock, ours = SFTTrainer, RotationSFTTrainer
        data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows(64)])
        options = {"arguments": SFTConfig, "data": data, "more": lambda: {"processing_class": numbers()}}
    options |= {"load": _loaded, "rotate": lambda: {"frozen": "nf4"}}
    return trained_twice(stock, ours, _adapted, folder, STEPS, **options)


def _check(found):
    for run in found:
        assert run.worst("losses", "reference_losses") < CLOSE, f"{run.losses}, expected {run.reference_losses}"
        assert run.worst("norms", "reference_norms") < CLOSE, f"{run.norms}, expected {run.reference_norms}"
        assert len(run.losses) == STEPS and run.losses[0] - run.losses[-1] > 1000 * CLOSE, "control: it learns"
        assert run.resumed == run.reloaded == 0.0 and 0 < run.kept < 0.5, run


def test_adapters_around_four_bits_train_like_ddp(tmp_path):
    pytest.importorskip("peft")
    batch = {name: value[None] for name, value in rows(1)[0].items()}
    exact, rounded = (_adapted(rounds)(**batch).loss.item() for rounds in (False, True))
    assert abs(exact / rounded - 1) > 5 * CLOSE, "control: other weights"
    _check(run_ranks(_trained, 2, str(tmp_path), False, timeout=300.0))


@with_frameworks
def test_adapters_around_four_bits_in_trl(tmp_path):
    pytest.importorskip("peft")
    _check(run_ranks(_trained, 2, str(tmp_path), True, timeout=300.0))
