"""Small models that run on CPUs, each with the plan that predicts it: counted bytes against planned bytes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from shared.launch import Place, gather
from shared.memory import PROBED_STEPS, Memory, MemoryProbe
from shared.models import GPT, Llama, random_tokens
from shared.strategies import Trainer
from shared.table import Row, last_of_each
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.planner import Cluster, ModelSpec, Strategy, estimate_memory

OFFLOADED = ("parameters", "gradients", "optimizer")
NOT_ON_A_CPU = ("workspaces", "context_and_communicators")
ROTATED: dict[str, dict[str, Any]] = {  # options of fully_rotate
    "rtp": {},
    "rtp-inplace": {"in_place": True},
    "rtp-unbundled": {"bundle": False},
    "rtp-recompute": {"bundle": "recompute"},
    "rtp-fused": {"bundle": "recompute", "loss_head": "fused"},
    "rtp-2rings": {},
}
STRATEGIES = (*ROTATED, "fsdp2", "hsdp", "ddp", "tp", "single")
_PROCESSORS = Cluster(
    name="processors",
    gpus=64,
    memory_bytes=1e12,
    bf16_flops_per_s=1e11,
    bf16_achievable_flops_per_s=1e11,
    hbm_bytes_per_s=1e10,
    nvlink_bytes_per_s=1e9,
    nccl_ring_bytes_per_s=1e9,
    nic_bytes_per_s=1e9,
    streaming_multiprocessors=1,
    gpus_per_node=64,
    cpus=True,
)


@dataclass(frozen=True)
class Case:
    """One run: a model, how it is trained, and on how many ranks with so many tokens each.

    recompute: activation checkpointing of every block. dtype: of the computation; parameters are float32.
    """

    family: str
    layers: int
    hidden: int
    strategy: str
    ranks: int
    tokens: int
    recompute: bool = False
    dtype: str = "float32"
    vocabulary: int = 512
    seq: int = 128
    head_dim: int = 32

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Case:
        """Returns the case that a line of results describes."""
        known = [field.name for field in fields(cls) if field.name in row]
        return cls(**{name: row[name] for name in known})

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def inner(self) -> int:
        return 3 * self.hidden

    def build(self) -> nn.Module:
        sizes = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "vocabulary": self.vocabulary}
        if self.family == "gpt":
            return GPT(seq=self.seq, **sizes)
        return Llama(kv_heads=self.heads // 2, inner=self.inner, **sizes)

    @property
    def model(self) -> ModelSpec:
        sizes = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "vocab": self.vocabulary}
        if self.family == "gpt":
            return ModelSpec.gpt(seq=self.seq, dropout=False, **sizes)
        return ModelSpec.llama(seq=self.seq, kv_heads=self.heads // 2, ffn=self.inner, **sizes)

    @property
    def plan(self) -> Strategy:
        """With tensor parallelism every rank computes with the batches of all, and so does a single process.

        GPT has its own block class, so no strategy forms bundles in it; and a ring of CPUs over torch.distributed
        defers the gradients of one pass.
        """
        ranks, samples = self.ranks, self.tokens // self.seq
        own: dict[str, Any] = {"micro_batch": samples, "stack": "torch"}
        own |= {"param_dtype": {"float32": "fp32", "bfloat16": "bf16"}[self.dtype]}
        own |= {"recompute": "full" if self.recompute else "none"}
        if self.strategy in ROTATED:
            options = ROTATED[self.strategy] | ({"bundle": False} if self.family == "gpt" else {})
            own |= {name: options[name] for name in ("in_place", "bundle") if name in options}
            own |= {"late_gradients": 1}
            own |= {"fused_loss": options.get("loss_head") == "fused"}
            rings = 2 if self.strategy == "rtp-2rings" else 1
            return Strategy(rtp=ranks // rings, dp=rings, **own)
        if self.strategy in ("fsdp2", "hsdp"):
            return Strategy(dp=ranks, zero=3, replicate=2 if self.strategy == "hsdp" else 1, **own)
        if self.strategy == "ddp":
            return Strategy(dp=ranks, **own)
        own["micro_batch"] *= ranks
        return Strategy(**own) if self.strategy == "single" else Strategy(tp=ranks, loss="eager", **own)

    def predicted(self) -> dict[str, float]:
        """Bytes of a rank at the peak of a step: `kept`, `slots` (part of the rest) and `peak`."""
        report = estimate_memory(self.model, _PROCESSORS, self.plan)
        parts = {name: size for name, size in report.components.items() if name not in NOT_ON_A_CPU}
        kept = sum(parts[name] for name in OFFLOADED)
        return {"kept": kept, "slots": parts["rotation_slots"], "peak": sum(parts.values())}

    def refusal(self) -> str | None:
        """Why there is no such run, or None."""
        if self.strategy in ("hsdp", "rtp-2rings") and (self.ranks < 4 or self.ranks % 2):
            return "two replicas of at least two ranks"
        if self.strategy == "tp" and (self.family != "llama" or self.ranks > self.heads // 2):
            return "only Llama is cut, by its heads"
        if self.strategy == "rtp-fused" and self.family != "llama":
            return "only models of the transformers package have a fused head"
        if (self.strategy == "single") != (self.ranks == 1):
            return "one rank trains alone"
        if self.dtype != "float32" and self.strategy not in (*ROTATED, "fsdp2", "hsdp"):
            return "others cast by autocast"
        return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def convert(case: Case, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Converts a plain model for the case, over torch.distributed's own backend."""
    if case.recompute:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    policy: dict[str, Any] = {}
    if case.dtype != "float32":
        policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.strategy in ("hsdp", "rtp-2rings"):
        names = ("replicas", "ring")
        mesh = init_device_mesh(mesh.device_type, (2, mesh.size() // 2), mesh_dim_names=names)
    if case.strategy in ROTATED:
        options = dict(ROTATED[case.strategy])
        if case.strategy == "rtp-2rings":
            options["dims"] = rtp_ext.RotationDims(ring="ring", replicate="replicas")
        return rtp_ext.fully_rotate(model, mesh=mesh, transport="c10d", **options, **policy)
    if case.strategy in ("fsdp2", "hsdp"):
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **policy)
        return fully_shard(model, mesh=mesh, **policy)
    if case.strategy == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    if case.strategy == "tp":
        model.parallelize(mesh)
    return model


def count(case: Case, place: Place) -> Memory:
    """Memory of this rank after a few steps of the case. All ranks call it."""
    torch.manual_seed(0)
    whole = case.strategy in ("tp", "single")
    generator = torch.Generator().manual_seed(1 if whole else place.rank)
    tokens = case.tokens * (place.ranks if whole else 1)
    batch = random_tokens(tokens, generator, seq=case.seq, vocabulary=case.vocabulary)
    dist.barrier()
    with MemoryProbe(place.device) as probe:
        model = convert(case, case.build().to(place.device), place.mesh)
        trainer = Trainer.around(case.strategy, model, place.device, lr=1e-3, autocast=None)
        for _ in range(PROBED_STEPS):
            probe.step(trainer, *batch)
        memory = probe.memory(trainer)
    trainer.close()
    return memory


def counted(case: Case, place: Place) -> dict[str, float]:
    """Returns `kept`, `slots` and `peak` of the rank that holds most."""
    memory = count(case, place)
    largest = gather([memory.kept, memory.slots, memory.peak], place).amax(0).tolist()
    return dict(zip(("kept", "slots", "peak"), largest, strict=True))


_CASE = ("case", "family", "layers", "hidden", "strategy", "ranks", "tokens", "recompute", "dtype")


def planned_again(rows: list[Row]) -> list[Row]:
    """Returns the last line of every case of planner_grid.py, with the prediction of the current planner."""
    return [
        {**row, **{f"predicted_{what}_bytes": size for what, size in Case.of(row).predicted().items()}}
        for row in last_of_each(rows, lambda row: tuple(row[key] for key in _CASE))
    ]


def allowed(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case.refusal() is None]
