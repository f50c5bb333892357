"""Small runs of trainers of the transformers package on ranks of the harness."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
from compatibility.frameworks import missing
from hf_models import VOCABULARY, make
from reference import assert_same, full
from torch import nn

import rtp_ext
from rtp_ext.integrations.checkpoints import is_converted

LENGTH = 9

# each rank takes seconds for its imports
with_frameworks = pytest.mark.skipif(bool(missing(["trl"])), reason="trl is not installed: make frameworks")


def as_torchrun(rank: int, ranks: int) -> None:
    """Returns the environment variables that torchrun sets for its ranks."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="localhost")
    os.environ["TORCHELASTIC_RUN_ID"] = "none"


def samples(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences in which each token counts on by three, and some have no label."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        ids = (torch.randint(VOCABULARY, (1,), generator=generator) + 3 * torch.arange(LENGTH)) % VOCABULARY
        labels = ids.clone()
        labels[: number % 4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def small_llama(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return make("llama", use_cache=False, **changes)


def arguments(folder: str, **changes: Any) -> Any:
    from transformers import TrainingArguments

    options = {
        "max_steps": 20,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
        "max_grad_norm": 0.5,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=folder, **{**options, **changes})


def trainer_of(cls: type, model: nn.Module, folder: str, changes: dict[str, Any], **options: Any) -> Any:
    from transformers.trainer_callback import PrinterCallback

    trainer = cls(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=samples(64),
        eval_dataset=samples(10, seed=1),
        **options,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def curve(trainer: Any, key: str) -> list[float]:
    """Returns the logged values of a trainer for every step."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def far(actual: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    assert len(actual) == len(expected) > 0, f"{len(actual)} values, expected {len(expected)}"
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(actual, expected, strict=True))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, whole, on every rank. Collective."""
    return {name: full(parameter).detach().clone() for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def trained(cls, model, folder, changes, resume=None, **options):
    trainer = trainer_of(cls, model, folder, changes, **options)
    trainer.train(resume_from_checkpoint=resume)
    yield trainer
    if is_converted(trainer.model):
        rtp_ext.ring_of(trainer.model).close()


def same_weights(actual, expected, tolerance, what):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(actual[name], value, tolerance, f"{what}: {name}")
