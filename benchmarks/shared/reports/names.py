"""The names of strategies, and of what travels, in tables and figures."""

from typing import Any

Row = dict[str, Any]

NAMES = {
    "rtp-c10d": 'rtp, `transport="c10d"`',
    "rtp-bf16": "rtp",
    "rtp-int8": "rtp",
    "rtp-nf4": "rtp",
    "rtp-exact": "rtp, unrounded",
    "rtp-ahead": "rtp, `prefetch=2`",
    "rtp-flat": 'rtp, `route="ring"`',
    "rtp-inplace": "rtp, `in_place=True`",
    "rtp-unbundled": "rtp, `bundle=False`",
    "rtp-recompute": "rtp, recomputing",
    "rtp-fused": "rtp, recomputing, fused loss",
    "rtp-2rings": "rtp, two rings",
    "rtp-shm": "`rotate_for_inference`, `shm`",
    "rtp-tcp": "`rotate_for_inference`, `tcp`",
    "rtp-tcp-nf4": '`rotate_for_inference`, `tcp`, `weights="nf4"`',
    "fsdp2": "`fully_shard` per block",
    "fsdp2-noreshard": "`fully_shard` per block, `reshard_after_forward=False`",
    "hsdp": "`fully_shard` per block, two replicas",
    "ddp": "DDP",
    "deepspeed": "DeepSpeed ZeRO-3",
    "simplefsdp": "SimpleFSDP (torchtitan)",
    "simplefsdp-compiled": "SimpleFSDP (torchtitan), compiled",
    "upstream": "the authors' code",
    "tp": "tensor parallelism (DTensor)",
    "pipeline": "`torch.distributed.pipelining`",
    "single": "one process, all batches",
    "none": "no communication",
}


def ways_of(row: Row) -> str | None:
    """Describes the values that travelled in another format than that of the computation; None if there are none."""
    told = []
    if row.get("travel"):
        told.append(f"weights {row['travel']}")
    if row.get("frozen"):
        told.append(f"frozen weights {row['frozen']}")
    gradients = row.get("gradient_travel") or row.get("reduce_dtype")
    if gradients not in (None, "float32"):
        told.append(f"gradients {gradients}")
    if row.get("gradient_route") not in (None, "auto"):
        told.append(f"route {row['gradient_route']}")
    return ", ".join(told) or None
