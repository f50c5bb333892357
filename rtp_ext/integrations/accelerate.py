"""RotationAccelerator: the Accelerator of the accelerate package, with fully_rotate instead of
DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from rtp_ext.convert import fully_rotate, outer_of, ring_of
from rtp_ext.convert.controls import no_sync
from rtp_ext.convert.scopes import state_of
from rtp_ext.integrations.checkpoints import is_converted, load_shards, same_values, save_shards, switch_parameters
from rtp_ext.outer import AllReduce, ZeroOuter
from rtp_ext.parameters.loading import whole_state

_KINDS = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class RotationAccelerator(Accelerator):
    """An Accelerator whose `prepare` converts models by fully_rotate.

    Args:
        rotate: keyword arguments of fully_rotate; ignored for a model that is converted already.
        others: as for Accelerator, without plugins for FSDP, DeepSpeed and similar.

    `prepare` gives every rank the weights of rank 0, converts the model, and switches existing optimizers to the
    shards. mixed_precision is autocast, as with DDP (alternatively, give `rotate` an mp_policy). `clip_grad_norm_`
    returns the norm of all shards. `save_state` and `load_state` store weights and optimizer state in shards, which
    load on another number of ranks; `get_state_dict` returns full tensors on rank 0, and is collective. Start the
    program with torchrun or accelerate launch.

    Raises ValueError for unsupported combinations: other strategies, batches whose number may differ between ranks
    (even_batches=False, join_uneven_inputs), a mesh that does not contain all ranks, tensor parallelism, local training
    of replicas, trainable ignored_params.
    """

    _models: Any
    _optimizers: Any

    def __init__(self, *arguments: Any, rotate: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._begin(rotate)

    @classmethod
    def take_over(cls, accelerator: Accelerator, rotate: Mapping[str, Any] | None) -> RotationAccelerator:
        """Converts an Accelerator that a trainer has created to this class, in place."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator._begin(rotate)
        return accelerator

    def _begin(self, rotate: Mapping[str, Any] | None) -> None:
        self.rotate = dict(rotate or {})
        if not dist.is_initialized() or self.distributed_type not in _KINDS:
            raise ValueError(
                "RotationAccelerator: expected a process for each rank (torchrun --nproc-per-node 2 ..., on CPUs with "
                f"cpu=True or use_cpu=True) and no other strategy, got distributed_type {self.distributed_type.value}"
            )
        if getattr(self, "parallelism_config", None) is not None:
            raise ValueError(
                f"RotationAccelerator: expected no parallelism_config, got {self.parallelism_config!r:.200}: the mesh "
                "belongs in rotate={'mesh': ..., 'dims': ...}"
            )
        if not self.even_batches:
            raise ValueError(
                "RotationAccelerator: expected even_batches=True, since ranks have to call the model equally often, "
                "got False"
            )
        policy = self.rotate.get("mp_policy")
        if self.mixed_precision != "no" and getattr(policy, "param_dtype", None) is not None:
            raise ValueError(
                f"RotationAccelerator: expected mixed_precision or rotate={{'mp_policy': ...}}, got both: "
                f"{self.mixed_precision} and {policy}"
            )

    # -- prepare -----------------------------------------------------------------------------------------------------

    def convert(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> nn.Module:
        """Converts a model in place, unless it is converted already, and switches `optimizers` to its shards."""
        if not is_converted(model):
            before = dict(model.named_parameters())
            if self.device_placement and not any(parameter.is_meta for parameter in before.values()):
                model.to(self.device)
            same_values(model)
            fully_rotate(model, **self.rotate)
            switch_parameters(optimizers, before, model)
        self._check(model)
        return model

    def _check(self, model: nn.Module) -> None:
        ring, policy = ring_of(model), outer_of(model)
        label = f"RotationAccelerator: {type(model).__name__}"
        if ring.tensor_mesh is not None:
            raise ValueError(
                f"{label}: expected a model without tensor parallelism, whose ranks need the same batch, got one that "
                f"is cut over {ring.tensor_mesh.mesh_dim_names}"
            )
        if ring.size * ring.replicas != self.num_processes:
            raise ValueError(
                f"{label}: expected rings over all {self.num_processes} ranks, got {ring.replicas} of {ring.size}"
            )
        if not isinstance(policy, (AllReduce, ZeroOuter)):
            raise ValueError(
                f"{label}: expected outer.AllReduce() or outer.ZeroOuter() between replicas, got a "
                f"{type(policy).__name__}, which acts after steps"
            )
        state = state_of(model)
        ignored = set() if state is None else state.ignored
        stray = [name for name, p in model.named_parameters() if name in ignored and p.requires_grad]
        if stray:
            raise ValueError(
                f"{label}: expected ignored_params to be frozen, since their gradients are not averaged, got {stray[0]}"
            )

    def prepare(self, *arguments: Any, device_placement: list[bool] | None = None) -> Any:
        optimizers = [each for each in arguments if isinstance(each, torch.optim.Optimizer)]
        for each in arguments:
            if isinstance(each, nn.Module):
                self.convert(each, *optimizers)
        return super().prepare(*arguments, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        # evaluation_mode changes only DistributedDataParallel, which is not used
        return super().prepare_model(self.convert(model), device_placement=False, evaluation_mode=True)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        raise ValueError(
            "RotationAccelerator: join_uneven_inputs lets ranks call the model a different number of times, which "
            "cannot be combined with rotation: expected even batches"
        )

    # -- steps -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with no_sync(model) if is_converted(model) else super().no_sync(model):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the full state dict of a converted model on rank 0, {} on the others. Collective."""
        plain = self.unwrap_model(model)
        return whole_state(plain, dist.get_rank() == 0) if is_converted(plain) else super().get_state_dict(model)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **keywords: Any) -> Any:
        with self._without_shards() as (models, optimizers):
            location = super().save_state(output_dir, safe_serialization, **keywords)
            save_shards(location, models, optimizers)
        return location

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **keywords: Any) -> None:
        with self._without_shards() as (models, optimizers):

            def load(_: list[nn.Module], folder: str) -> None:  # before the states of random generators
                load_shards(folder, models, optimizers)

            handle = self.register_load_state_pre_hook(load)
            try:
                super().load_state(input_dir, load_kwargs, **keywords)
            finally:
                handle.remove()

    @contextlib.contextmanager
    def _without_shards(self) -> Iterator[tuple[list[nn.Module], list[torch.optim.Optimizer]]]:
        """Hides models and optimizers from the stock methods, which would write one rank's shards."""
        models, optimizers = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            plain = [self.unwrap_model(model) for model in models]
            yield plain, [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        finally:
            self._models, self._optimizers = models, optimizers
