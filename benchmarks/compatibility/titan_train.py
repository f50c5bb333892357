"""torchtitan's own train.py on CPUs: a stand-in for torch.cuda, two layers of its debug model, attention of torch.

    torchrun --nproc-per-node 2 benchmarks/compatibility/titan_train.py --module MODULE --config llama3_debugmodel ...

MODULE: one as docs/frameworks.md prints it, or `llama3` for torchtitan's own `fully_shard`. Other options are those of
torchtitan.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


class Device:
    """What torchtitan asks of torch.cuda."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, _: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def reset_peak_memory_stats(self) -> None: ...

    def get_device_name(self, _: Any) -> str:
        return "CPU"

    def get_device_properties(self, _: Any) -> Any:
        return types.SimpleNamespace(total_memory=1 << 34)

    def memory_stats(self, _: Any) -> dict[str, int]:
        return {}

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1


# before other modules of torchtitan copy these
utils.device_type, utils.device_module = "cpu", Device()
utils.get_local_device = lambda: torch.device("cpu")

from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402
from torchtitan.train import main  # noqa: E402


def fully_sharded(model: Any, **options: Any) -> Any:
    model = llama3.parallelize_llama(model, **options)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # Gloo does not support PREMUL_SUM
    return model


def small(flavor: str, **options: Any) -> Any:
    spec = llama3.model_registry(flavor, **options)
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others need a GPU
    del spec.model.layers[2:]
    return dataclasses.replace(spec, parallelize_fn=fully_sharded)


if __name__ == "__main__":
    config_registry.model_registry = small
    main()
