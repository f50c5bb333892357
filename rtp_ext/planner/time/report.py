"""Results of a time estimate: seconds of one step by component."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

COMPUTE = (
    "gemm",
    "attention",
    "elementwise",
    "recomputation",
    "launches",
    "split",
    "copies",
    "interference",
    "optimizer",
)
COMMUNICATION = (
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "rotation",
    "unsharding",
    "pipeline_messages",
    "gradients",
)
TIME_COMPONENTS = (*COMPUTE, *COMMUNICATION, "bubble")


@dataclass(frozen=True)
class TimeReport:
    """Time of one training step. The components add up to `step_seconds`.

    Attributes:
        components: seconds by component (`TIME_COMPONENTS`). `split`: extra time of shard-sized products over unsplit
            ones; `copies`: into and out of the flat buffers of fully_shard, and casts of a ring's shards and sums;
            `interference`: slowdown of computes by concurrent communication; communication counts where it is
            exposed.
        flops: of all GPUs in the step, with recomputation; fused attention does not compute the masked half.
        model_flops: the same without recomputation.
        tokens: of a step.
        ring: options of `rtp_ext.Ring`, other than its defaults, with which a ring's blocks are as predicted.
    """

    model: str
    cluster: str
    strategy: dict[str, Any]
    gpus: int
    global_batch: int
    micro_batches: int
    tokens: int
    flops: float
    model_flops: float
    components: dict[str, float]
    ring: dict[str, Any] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        return sum(self.components.values())

    @property
    def tflops_per_gpu(self) -> float:
        """1e12 executed FLOPs per second and GPU, as arXiv 2104.04473 counts (with recomputation)."""
        return self.flops / self.step_seconds / self.gpus / 1e12

    @property
    def model_tflops_per_gpu(self) -> float:
        """1e12 FLOPs of the model per second and GPU, without recomputation (arXiv 2204.02311)."""
        return self.model_flops / self.step_seconds / self.gpus / 1e12

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.step_seconds / self.gpus

    @property
    def groups(self) -> dict[str, float]:
        """Seconds of computing, of exposed communication, and of the pipeline bubble."""
        return {
            "compute": sum(self.components[name] for name in COMPUTE),
            "exposed communication": sum(self.components[name] for name in COMMUNICATION),
            "bubble": self.components["bubble"],
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "cluster": self.cluster,
            "strategy": self.strategy,
            "gpus": self.gpus,
            "global_batch": self.global_batch,
            "micro_batches": self.micro_batches,
            "step_seconds": self.step_seconds,
            "tflops_per_gpu": self.tflops_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "components_seconds": self.components,
            "groups_seconds": self.groups,
            "ring": self.ring,
        }
