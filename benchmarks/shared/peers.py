"""Trainers of other packages, for the comparison of strategies: what each needs besides a conversion of the model.

DeepSpeed ZeRO-3 partitions a model of torch in place, and its engine runs backward and optimizer. torchtitan's
SimpleFSDP makes each weight a property that gathers it, and sums gradients. The code of the paper's authors
(github.com/wdlctc/rtp, a folder that has `rtp/`) replaces Linear, Embedding, Conv2d and MultiheadAttention; it sums
gradients, too, and leaves those of other parameters, such as norms, on their rank: here they are summed for it, since
its ranks would train different models otherwise.

All run on CPUs over Gloo. None of these packages is one of rtp_ext's: a strategy whose package is missing gives a line
with the error.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shared.agreement import signature_of
from shared.strategies import Phase, Trainer


class DeepSpeed(Trainer):
    """ZeRO-3 with its defaults, except that buckets hold one block, as a unit of `fully_shard` does.

    The defaults are made for GPUs: a reduce bucket of 500 million elements would be most of the memory here.
    """

    def _converted(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        os.environ["DS_ACCELERATOR"] = mesh.device_type
        os.environ.setdefault("LOCAL_RANK", str(mesh.get_local_rank()))
        import deepspeed

        deepspeed.utils.logger.setLevel("ERROR")
        self._plain, self._deepspeed = model, deepspeed
        return model

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        block = sum(parameter.numel() for parameter in next(iter(self._plain.blocks)).parameters())
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # a number that nothing here reads
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 3, "reduce_bucket_size": block, "stage3_prefetch_bucket_size": block},
        }
        engine, *_ = self._deepspeed.initialize(model=self._plain, optimizer=self.optimizer, config=settings)
        self.model, self._engine = engine, engine
        self._signatures: list[list[float]] = []

    def step(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        keep_gradients: bool = False,
        phase: Phase = lambda name: nullcontext(),
    ) -> torch.Tensor:
        with phase("forward_backward"):
            loss = self._engine(inputs, targets)
            self._engine.backward(loss)
        if not self._signatures:  # the engine drops gradients with the update
            full = self._deepspeed.utils.safe_get_full_grad
            self._signatures = [signature_of(full(parameter)) for parameter in self._plain.parameters()]
        with phase("optimizer"):
            self._engine.step()
        return loss.detach()

    def signatures(self) -> list[list[float]]:
        return self._signatures

    def parameter_tensors(self) -> list[torch.Tensor]:
        """The partitions of the parameters, those that stay whole, and the copies that the optimizer updates."""
        partitions = [parameter.ds_tensor for parameter in self._plain.parameters()]
        whole = [parameter.data for parameter in self._plain.parameters() if parameter.numel()]
        return [*partitions, *whole, *self._engine.optimizer.fp32_partitioned_groups_flat]

    def gradient_tensors(self) -> list[torch.Tensor]:
        return [self._engine.optimizer.grad_partitions_flat_buffer]

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for state in self._engine.optimizer.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def close(self) -> None:
        self._engine.destroy()


class _Summing(Trainer):
    """Of a package that sums gradients over ranks, where the others average them."""

    def _backward(self, loss: torch.Tensor) -> None:
        (loss / self.ranks).backward()


class SimpleFSDP(_Summing):
    """Not compiled: torchtitan leaves it to the compiler to gather several weights at once, and ahead of time."""

    def _converted(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

        return data_parallel(model, mesh, "fully_shard")


class CompiledSimpleFSDP(SimpleFSDP):
    """Forward and backward each one graph of inductor, without torchtitan's own passes over them."""

    def _converted(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return torch.compile(super()._converted(model, mesh), fullgraph=True)  # type: ignore[return-value]


class Upstream(_Summing):
    """`folder`: the checked-out repository of the paper's authors, `--upstream`."""

    folder: Path | None = None

    def _converted(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        from rtp.rotated_tensor_parallel import RotatedTensorParallel

        rotated = RotatedTensorParallel(model)
        # by parameter, the dimension that is cut: None of those that it leaves alone
        self._cut: dict[int, int | None] = {id(parameter): None for parameter in model.parameters()}
        for wrapper in rotated.FlyweightModule_list:
            for name, parameter in wrapper.module.named_parameters():
                by_rows = wrapper.row_partition or isinstance(wrapper.module, nn.Embedding)
                self._cut[id(parameter)] = 1 if by_rows and name == "weight" else None if wrapper.row_partition else 0
        return rotated

    def _backward(self, loss: torch.Tensor) -> None:
        super()._backward(loss)
        for parameter in self.model.parameters():
            if self._cut[id(parameter)] is None and parameter.grad is not None:
                dist.all_reduce(parameter.grad)

    def signatures(self) -> list[list[float]]:
        return [signature_of(self._whole(parameter)) for parameter in self.model.parameters()]

    def _whole(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the gradient of a parameter, of all ranks together."""
        dim, mine = self._cut[id(parameter)], parameter.grad
        if mine is None or dim is None:
            return mine
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts, dim)


PEERS: dict[str, type[Trainer]] = {
    "deepspeed": DeepSpeed,
    "simplefsdp": SimpleFSDP,
    "simplefsdp-compiled": CompiledSimpleFSDP,
    "upstream": Upstream,
}
