"""torchtitan's Llama 3 as its trainer builds it: on the meta device, parallelized, initialised, checkpointed.

torchtitan's own Trainer needs an accelerator, so this program calls its parts in the same order.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import rtp_ext
from compatibility.framework_runs import LENGTH, LR, Run, count, difference, rows, share, whole
from rtp_ext.integrations import parallelize

SEED = 3


class _Position:
    """A replacement of the data loader and of further state of a trainer."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def _spec(parallelize_fn: Any = None) -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel", attn_backend="flex")
    for layer in spec.model.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=LENGTH)
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others need a GPU
    del spec.model.layers[2:]
    return dataclasses.replace(spec, parallelize_fn=parallelize_fn or spec.parallelize_fn)


def _plain(spec: Any) -> nn.Module:
    model = spec.model.build()
    torch.manual_seed(SEED)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def _options(activation_checkpointing: bool) -> dict[str, Any]:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.activation_checkpoint import FullAC

    parallel_dims.device_type = "cpu"
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
    return {
        "parallel_dims": dims,
        "training": training,
        "parallelism": parallelism,
        "compile_config": CompileConfig(enable=False),
        "ac_config": FullAC.Config() if activation_checkpointing else None,
        "dump_folder": tempfile.gettempdir(),
    }


def _rotated(spec: Any, options: dict[str, Any], seed: int) -> nn.Module:
    """Builds the model like the trainer of torchtitan."""
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(model, **options)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


class _Training:
    """A model, its optimizers, schedule and checkpoints."""

    def __init__(self, model: nn.Module, folder: str, interval: int) -> None:
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
        from torchtitan.components.optimizer.optimizer import ParamGroupConfig

        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": LR})
        self.model = model
        self.optimizers = OptimizersContainer.Config(param_groups=[group], implementation="foreach").build(
            model_parts=[model]
        )
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=100)
        self.position = _Position()
        checkpoints = CheckpointManager.Config(
            enable=True, folder="checkpoint", interval=interval, keep_latest_k=0, last_save_model_only=False
        )
        self.checkpoints = checkpoints.build(
            dataloader=_Position(),
            model_parts=[model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.position},
            sd_adapter=None,
            base_folder=folder,
        )

    def steps(self, last: int) -> tuple[list[float], list[float]]:
        from torchtitan.distributed.utils import clip_grad_norm_

        losses, norms, rank, ranks = [], [], dist.get_rank(), dist.get_world_size()
        while self.position.step < last:
            batch = rows(2 * ranks, seed=self.position.step)[2 * rank : 2 * rank + 2]
            ids = torch.stack([row["input_ids"] for row in batch])
            labels = ids[:, 1:].flatten()
            logits = self.model(ids[:, :-1]).flatten(0, 1)
            # torchtitan divides sums by the tokens of all ranks, and sums gradients
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / (ranks * labels.numel())
            loss.backward()
            norms.append(clip_grad_norm_(list(self.model.parameters()), 0.5).item())
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item())
            self.position.step += 1
            self.checkpoints.save(self.position.step)
        return losses, norms


def run(folder: str, steps: int) -> Run:
    spec = _spec(parallelize)
    plain = _plain(spec)
    stock = _spec().parallelize_fn(copy.deepcopy(plain), **_options(False))
    for part in stock.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # Gloo does not support PREMUL_SUM
    known, known_norms = _Training(stock, f"{folder}/stock", steps).steps(steps)
    model = _rotated(spec, _options(True), SEED)
    if difference(_named(model), _named(plain)) != 0.0:
        raise AssertionError("initialised on the meta device: expected the values of the plain model")
    losses, norms = _Training(model, f"{folder}/ours", steps // 2).steps(steps)
    result = Run("`fully_shard`", losses, known, norms, known_norms, share(model, count(plain)))
    end = _named(model)
    again = _rotated(spec, _options(True), SEED + 1)
    if difference(_named(again), end) == 0.0:
        raise AssertionError("control: expected another seed to make other values")
    resumed = _Training(again, f"{folder}/ours", steps)
    resumed.checkpoints.load(step=steps // 2)
    resumed.steps(steps)
    result.resumed = difference(_named(again), end)
    copied = _plain(spec)
    folder_of_end = Path(folder) / "ours" / "checkpoint" / f"step-{steps}"
    state = copied.state_dict()
    torch.distributed.checkpoint.load(state, checkpoint_id=str(folder_of_end))
    copied.load_state_dict(state)
    result.reloaded = difference(_named(copied), end)
    for each in (model, again):
        rtp_ext.ring_of(each).close()
    return result


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in whole(model).items()}
