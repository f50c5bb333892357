"""RotationStrategy: a strategy of Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.distributed_c10d import default_pg_timeout

from rtp_ext.convert import fully_rotate, outer_of, ring_of
from rtp_ext.convert.methods.fully_shard import register_forward_method
from rtp_ext.integrations.checkpoints import is_converted, same_values
from rtp_ext.outer import AllReduce, ZeroOuter

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class RotationStrategy(ModelParallelStrategy):
    """A Lightning strategy: every rank holds 1/R of the model and processes its own batches.

        Trainer(strategy=RotationStrategy(), accelerator="cpu", devices=2)

    The strategy converts the LightningModule by fully_rotate before it configures optimizers, with the weights of rank
    0, unless `configure_model` has converted it (a model too large for one rank: meta device, fully_rotate, to_empty,
    load_safetensors). `training_step` and similar methods see full parameters of modules that do not rotate. With
    automatic_optimization=False, parameters of the LightningModule itself are full in its `forward` only.

    Args:
        rotate: keyword arguments of fully_rotate.
        save_distributed_checkpoint: True: a checkpoint is a folder into which every rank writes its shards, and loads
            on any number of ranks. False: one file with full tensors, written by rank 0.
        process_group_backend, timeout: of the default process group.

    Raises ValueError for a mesh that does not contain all ranks, tensor parallelism, and local training of replicas.
    """

    model: Any

    def __init__(
        self,
        rotate: Mapping[str, Any] | None = None,
        *,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.rotate = dict(rotate or {})

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1

    def setup(self, trainer: Trainer) -> None:
        module: Any = self.model
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        if not is_converted(module):
            self.model = module = self.precision_plugin.convert_module(module)
            meta = next((name for name, parameter in module.named_parameters() if parameter.is_meta), None)
            if meta is not None:
                raise ValueError(
                    f"RotationStrategy: expected {type(module).__name__} with storage, got {meta} on the meta device: "
                    "let configure_model call fully_rotate, to_empty, and then init_weights or load_safetensors"
                )
            self.model_to_device()
            same_values(module)
            fully_rotate(module, **self.rotate)
        self._check(module)
        if getattr(module, "automatic_optimization", True):
            for name in _STEPS:
                if getattr(type(module), name, None) is not getattr(LightningModule, name):
                    register_forward_method(module, name)
        self.barrier()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _check(self, module: LightningModule) -> None:
        ring, policy = ring_of(module), outer_of(module)
        if ring.tensor_mesh is not None or ring.size * ring.replicas != self.world_size:
            raise ValueError(
                f"RotationStrategy: expected rings over all {self.world_size} ranks without tensor parallelism, got "
                f"{ring.replicas} of {ring.size}"
            )
        if not isinstance(policy, (AllReduce, ZeroOuter)):
            raise ValueError(
                "RotationStrategy: expected outer.AllReduce() or outer.ZeroOuter() between replicas, got a "
                f"{type(policy).__name__}, which acts after steps"
            )
