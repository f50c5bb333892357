"""Models of torchtitan: a replacement of a ModelSpec's parallelize_fn."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.models.common.embedding import Embedding
from torchtitan.protocols.module import Module

from rtp_ext.convert import fully_rotate
from rtp_ext.convert.controls import set_gradient_divide_factor
from rtp_ext.parameters.sharding import init_weights
from rtp_ext.ring import RotationDims


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig | None,
    dump_folder: str,
) -> nn.Module:
    """Applies fully_rotate to a decoder of torchtitan, in the place where its trainer calls parallelize_fn: on the meta
    device, before `to_empty` and `init_weights`.

        spec = dataclasses.replace(model_registry("8B"), parallelize_fn=rtp_ext.integrations.parallelize)

    The ring is the mesh dimension over which fully_shard would cut; replicas are `dp_replicate`. Dtypes, activation
    checkpointing and CPU offload follow the configuration. Gradients are summed over the ranks, because torchtitan
    divides losses by the tokens of all ranks. Weights are initialised to the values of the plain model under the same
    seed, one module at a time. Checkpoints of torchtitan load on another number of ranks, and under fully_shard.

    Raises ValueError for tensor, context, pipeline and expert parallelism, the backend full_dtensor, and compiled
    blocks.
    """
    degrees = {
        "tensor_parallel_degree": parallel_dims.tp,
        "context_parallel_degree": parallel_dims.cp,
        "pipeline_parallel_degree": parallel_dims.pp,
        "expert_parallel_degree": parallel_dims.ep,
    }
    for name, degree in degrees.items():
        if degree > 1:
            raise ValueError(f"rtp_ext.integrations.parallelize: expected {name} 1, got {degree}")
    if parallelism.spmd_backend == "full_dtensor":
        raise ValueError(
            "rtp_ext.integrations.parallelize: expected spmd_backend 'spmd_types' or 'partial_dtensor', got "
            "'full_dtensor', whose activations are DTensors"
        )
    if compile_config.enable and "model" in compile_config.components:
        raise ValueError(
            "rtp_ext.integrations.parallelize: expected compile.components without 'model', whose blocks have to be "
            f"one graph each, got {compile_config.components}"
        )
    for part in model.modules():
        if type(part) is Embedding and part.tp_group is None:
            part.__class__ = _PlainEmbedding
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    ring = "dp_shard" if parallelism.spmd_backend == "spmd_types" else "fsdp"  # the axis over which parameters are cut
    replicate = "dp_replicate" if parallel_dims.dp_replicate_enabled else None
    fully_rotate(
        model,
        mesh=parallel_dims.get_mesh([replicate, ring] if replicate else [ring]),
        dims=RotationDims(ring=ring, replicate=replicate),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        ),
        offload_policy=CPUOffloadPolicy() if training.enable_cpu_offload else None,
    )
    set_gradient_divide_factor(model, 1)
    model.init_weights = types.MethodType(_init_weights, model)  # type: ignore[assignment]
    return model


class _PlainEmbedding(nn.Embedding, Module):
    """torchtitan's Embedding without tensor parallelism; computes nn.Embedding."""


def _init_weights(self: nn.Module, *, buffer_device: torch.device | None = None, **_: Any) -> None:
    def initialise(part: nn.Module) -> None:
        if isinstance(part, Module):
            part._init_self_parameters()

    init_weights(self, initialise)
    for part in self.modules():
        if isinstance(part, Module):
            part._init_self_buffers(buffer_device=buffer_device)
