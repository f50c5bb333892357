"""How a model is spread over GPUs, and what is kept in which dtype."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rtp_ext.planner.constants import check_at_least, check_known
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec

SCHEDULES = ("gpipe", "1f1b", "interleaved")
RECOMPUTE = ("none", "selective", "full")
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER_MOMENTS = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
STACKS = ("auto", "megatron", "torch")
LOSSES = ("auto", "eager", "loss-parallel", "megatron", "compiled", "fused")
BUNDLES = (True, False, "recompute")
LARGEST = 1024  # ring and pipeline


@dataclass(frozen=True)
class Strategy:
    """One plan. The GPUs it uses: dp * tp * pp * cp * rtp.

    Attributes:
        dp: data-parallel replicas, over which `zero` shards.
        tp: tensor-parallel ranks; with `sequence_parallel` they share what lies between their products, too.
        pp: pipeline stages, run by `schedule`; `interleave` is the number of model chunks of a stage (above 1 needs
            the interleaved schedule). At most 1024 stages.
        cp: context-parallel ranks, which share the tokens of a sample.
        ep: ranks among the data-parallel ones that share the experts of a mixture.
        rtp: ranks of a rotation ring, at most 1024; every rank keeps a batch of its own.
        zero: 0 none, 1 optimizer state, 2 and gradients, 3 and parameters (`fully_shard`).
        micro_batch: samples of one forward of one replica.
        recompute: of activations: `none`, `selective`, `full` (one input per layer is kept).
        in_place: the home shards of RTP travel themselves, with one weight slot instead of two.
        bundle: RTP rotates MLPs and attention as bundles; `"recompute"`: keeps nothing of the hidden slices.
        fused_loss: vocabulary head and loss as one; no logits.
        param_dtype: what layers compute in. reduce_dtype: of gradients that are summed over ranks.
        optimizer: `adamw`, `sgd-momentum` or `sgd`; its state and master weights are float32.
        stack: whose allocations are predicted: `megatron` (bf16 weights, float32 main gradients and master copies,
            fused kernels) or `torch` (float32 parameters cast by a mixed-precision policy, plain kernels). `auto`:
            torch for zero=3 and rtp, else megatron.
        loss: `eager`, `loss-parallel` (DTensor), `megatron`, `compiled` or `fused`; `auto` follows from the stack,
            tp and fused_loss.
        flash_attention: no attention matrix is ever stored.
        fp8: the matrix products of the layers' weights run in eight bits; what is kept stays in `param_dtype`. Memory
            does not change.

    Raises:
        ValueError: a value that no field allows, or fields that contradict each other.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    rtp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    micro_batch: int = 1
    schedule: str = "1f1b"
    interleave: int = 1
    recompute: str = "none"
    in_place: bool = False
    bundle: bool | str = True
    fused_loss: bool = False
    param_dtype: str = "bf16"
    reduce_dtype: str = "fp32"
    ep: int = 1
    optimizer: str = "adamw"
    stack: str = "auto"
    loss: str = "auto"
    flash_attention: bool = True
    fp8: bool = False

    def __post_init__(self) -> None:
        degrees = ("dp", "tp", "pp", "cp", "rtp", "ep", "micro_batch", "interleave")
        check_at_least("strategy", 1, **{degree: getattr(self, degree) for degree in degrees})
        for degree in ("pp", "rtp"):
            if getattr(self, degree) > LARGEST:
                raise ValueError(
                    f"strategy: expected {degree} of at most {LARGEST}, since rings are simulated step by step and "
                    f"pipelines stage by stage, got {getattr(self, degree)}"
                )
        check_known("schedule", self.schedule, SCHEDULES)
        check_known("recompute", self.recompute, RECOMPUTE)
        check_known("optimizer", self.optimizer, OPTIMIZER_MOMENTS)
        check_known("stack", self.stack, STACKS)
        check_known("loss", self.loss, LOSSES)
        check_known("param_dtype", self.param_dtype, DTYPE_BYTES)
        check_known("reduce_dtype", self.reduce_dtype, DTYPE_BYTES)
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"strategy: expected zero to be 0, 1, 2 or 3, got {self.zero!r}")
        if self.bundle not in BUNDLES:
            raise ValueError(f"strategy: expected bundle to be True, False or 'recompute', got {self.bundle!r}")
        if self.interleave > 1 and self.schedule != "interleaved":
            raise ValueError(
                f"strategy: interleave {self.interleave} needs schedule 'interleaved', got {self.schedule!r}"
            )
        if self.schedule == "interleaved" and self.pp == 1:
            raise ValueError("strategy: the interleaved schedule needs pp of at least 2, got 1")
        if self.dp % self.ep:
            raise ValueError(f"strategy: expected dp divisible by ep, got {self.dp} and {self.ep}")
        if self.rtp > 1 and (self.zero or self.stack == "megatron"):
            raise ValueError(
                f"strategy: rtp shards states by itself, and runs on torch: expected zero=0 and stack 'auto' or "
                f"'torch' with it, got zero={self.zero} and stack {self.stack!r}"
            )
        if self.in_place and self.rtp == 1:
            raise ValueError("strategy: in_place needs rtp of at least 2, got 1")

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp * self.rtp

    @property
    def replicas(self) -> int:
        """Ranks groups that each take a batch of their own: data-parallel ones and those of the ring."""
        return self.dp * self.rtp

    @property
    def effective_stack(self) -> str:
        if self.stack != "auto":
            return self.stack
        return "torch" if self.zero == 3 or self.rtp > 1 else "megatron"

    @property
    def effective_loss(self) -> str:
        if self.fused_loss:
            return "fused"
        if self.loss != "auto":
            return self.loss
        if self.effective_stack == "megatron":
            return "megatron"
        return "loss-parallel" if self.tp > 1 else "eager"

    @property
    def param_bytes(self) -> int:
        return DTYPE_BYTES[self.param_dtype]

    @property
    def reduce_bytes(self) -> int:
        return DTYPE_BYTES[self.reduce_dtype]

    def micro_batches(self, global_batch: int | None) -> int:
        """Micro-batches of one step of one replica. Without a global batch: one for every pipeline stage.

        Raises:
            ValueError: a global batch that the replicas cannot share.
        """
        if global_batch is None:
            return self.pp
        check_at_least("strategy", 1, global_batch=global_batch)
        share = self.replicas * self.micro_batch
        if global_batch < share or global_batch % share:
            raise ValueError(
                f"strategy: expected a global batch that is a multiple of dp * rtp * micro_batch = {self.dp} * "
                f"{self.rtp} * {self.micro_batch} = {share} samples, got {global_batch}"
            )
        return global_batch // share

    def check(self, model: ModelSpec, cluster: Cluster, global_batch: int | None = None) -> None:
        """Raises ValueError where this plan cannot run this model on this cluster."""
        if self.gpus > cluster.gpus:
            raise ValueError(
                f"strategy: dp * tp * pp * cp * rtp = {self.dp} * {self.tp} * {self.pp} * {self.cp} * {self.rtp} = "
                f"{self.gpus} GPUs, but the cluster has {cluster.gpus}"
            )
        chunks = self.pp * self.interleave
        divisible = [
            ("heads", model.heads, "tp", self.tp),
            ("kv_heads", model.kv_heads, "tp", self.tp),
            ("ffn", model.ffn, "tp", self.tp),
            ("seq", model.seq, "cp", self.cp),
        ]
        if self.sequence_parallel:
            divisible.append(("seq / cp", model.seq // self.cp, "tp", self.tp))
        if self.interleave > 1 and (model.layers + 2) % chunks:  # Llama 3: embedding and head count as a layer each
            divisible.append(("layers", model.layers, "pp * interleave", chunks))
        for what, size, by, degree in divisible:
            if size % degree:
                raise ValueError(f"strategy: expected {what} divisible by {by}, got {size} and {degree}")
        if model.layers < chunks:
            raise ValueError(f"strategy: {model.layers} layers are too few for {chunks} pipeline chunks")
        if self.ep > 1 and (not model.experts or model.experts % self.ep):
            raise ValueError(f"strategy: expected experts divisible by ep, got {model.experts} and {self.ep}")
        self.micro_batches(global_batch)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
