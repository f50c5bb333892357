"""The names of strategies in tables and figures."""

NAMES = {
    "rtp-c10d": 'rtp, `transport="c10d"`',
    "rtp-exact": "rtp, as computed with",
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
    "tp": "tensor parallelism (DTensor)",
    "pipeline": "`torch.distributed.pipelining`",
    "single": "one process, all batches",
    "none": "no communication",
}
