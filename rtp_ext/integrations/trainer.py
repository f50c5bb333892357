"""RotationTrainer: the Trainer of the transformers package for rotated models."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from rtp_ext.convert.methods.save_pretrained import whole_to_save
from rtp_ext.integrations.accelerate import RotationAccelerator
from rtp_ext.integrations.checkpoints import has_shards, is_converted, load_shards, save_shards
from rtp_ext.parameters.loading import load_safetensors

logger = logging.getLogger("rtp_ext")


class RotationTrainer(Trainer):
    """A Trainer that rotates its model: every rank holds 1/R of weights, gradients and optimizer state, and trains on
    its own batches. Losses, gradient norms and weights equal those of the stock Trainer with DistributedDataParallel.

        trainer = RotationTrainer(model=model, args=args, train_dataset=data, rotate={"bundle": "recompute"})

    Args:
        rotate: keyword arguments of fully_rotate; ignored for a model that is converted already (one too large for one
            rank: meta device, fully_rotate, to_empty, load_safetensors).
        others: as for Trainer.

    The constructor converts the model, or `train` does where there is a `model_init`; an optimizer passed to the
    constructor is switched to the shards. Start it with torchrun, on CPUs with TrainingArguments(use_cpu=True).

    `save_model` and checkpoints are folders that `from_pretrained` reads. A checkpoint also has the folder `rotation`,
    from which training resumes on any number of ranks, and bitwise on the number that saved it. Models of the peft
    package save their adapters. For the trainers of TRL: `class RotationSFTTrainer(RotationTrainer, SFTTrainer): pass`.

    Raises ValueError for unsupported combinations: those of RotationAccelerator; auto_find_batch_size, because one rank
    alone may run out of memory; DataParallel.
    """

    model: Any
    lr_scheduler: Any

    def __init__(self, *arguments: Any, rotate: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        self.rotate = dict(rotate or {})
        super().__init__(*arguments, **keywords)
        if self.args.auto_find_batch_size:
            raise ValueError(
                "RotationTrainer: expected auto_find_batch_size=False, since memory may run out on one rank alone, got "
                "True"
            )
        if self.model_init is None:
            self._convert()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator = RotationAccelerator.take_over(self.accelerator, self.rotate)

    def _convert(self) -> None:
        accelerator: Any = self.accelerator
        accelerator.convert(self.model, *([] if self.optimizer is None else [self.optimizer]))

    def _inner_training_loop(self, *arguments: Any, **keywords: Any) -> Any:
        self._convert()  # made by model_init
        return super()._inner_training_loop(*arguments, **keywords)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not is_converted(model):  # converted models are on their device
            super()._move_model_to_device(model, device)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.accelerator.clip_grad_norm_(model.parameters(), float("inf")) if grad_norm is None else grad_norm

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if state_dict is None and is_converted(self.model):
            state_dict = whole_to_save(self.model, self.args.should_save)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        model, optimizer = self._trained()
        os.makedirs(output_dir, exist_ok=True)
        save_shards(output_dir, [model], [optimizer])
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        model, optimizer = self._trained()
        if not has_shards(checkpoint):
            raise ValueError(
                f"RotationTrainer: expected a checkpoint of a RotationTrainer to resume from, got {checkpoint}, which "
                "has weights only (save_only_model=True), or was written by another trainer: load its weights into "
                "the model and start anew"
            )
        load_shards(checkpoint, [model], [optimizer])
        state = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        optimizer: Any = self.optimizer
        return self.model, getattr(optimizer, "optimizer", optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.model if model is None else model
        if not is_converted(model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif not has_shards(resume_from_checkpoint):  # otherwise load_shards loads the weights
            self._load_whole(model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best: Any = self.state.best_model_checkpoint
        logger.info("loading the best model, from %s (score: %s)", best, self.state.best_metric)
        if has_shards(best):
            load_shards(best, [self.model], [])
        else:
            self._load_whole(self.model, best)

    def _load_whole(self, model: nn.Module, folder: str) -> None:
        if hasattr(model, "peft_config"):
            raise ValueError(
                f"RotationTrainer: expected a checkpoint with a folder 'rotation', got {folder}: adapters are loaded "
                "from there. Save with save_only_model=False"
            )
        load_safetensors(model, Path(folder))
