"""Local shards that stay on the host: the device borrows a copy while an operation needs it, gradients come back.

What operations and autograd see of such a shard is its *stand-in*: a tensor on the device that has its memory only
while it is `on_device`. The copy is enqueued on the stream of the computes that read it, so that no thread waits for
it. Autograd may therefore save a stand-in for backward: that keeps no memory, and the backward
borrows anew. Nothing is sent ahead on such a ring, since the memory that would be sent is not there yet.

A gradient is copied to the host after its reduction. It must not be read before the copy has ended, so that autograd
receives None; `OffloadedShard.deliver` sets p.grad when the backward ends, in the engine's final callback.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from rtp_ext.ring.autograd import OFFLOADED, offloaded_shard_of

Wait = Callable[[], object]


class HostMemory:
    """The memory of the host, as a device uses it. What copies between two memories, and waits, is here alone."""

    def __init__(self, device: torch.device, pin: bool) -> None:
        self.device, self.pin = device, pin
        self._side: torch.cuda.Stream | None = None

    def keep(self, shard: torch.Tensor) -> torch.Tensor:
        """A shard, wherever it is, on the host. One on the meta device stays there."""
        return shard if shard.is_meta else self.pinned(shard.detach().to("cpu"))

    def pinned(self, local: torch.Tensor) -> torch.Tensor:
        """A shard of the host, in pinned memory if the policy requires that."""
        return local.pin_memory() if self.pin and not local.is_meta and not local.is_pinned() else local

    def fill(self, place: torch.Tensor, local: torch.Tensor) -> None:
        """Copies a shard to the device, on the current stream. The host does not wait where the shard is pinned."""
        place.copy_(local, non_blocking=True)

    def fetch(self, value: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """Starts to copy a value of the current stream to the host, beside what that computes next. What arrives may be
        read once the second has been called."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self.device))
        arriving = torch.empty(value.shape, dtype=value.dtype, pin_memory=self.pin)
        with torch.cuda.stream(side):
            arriving.copy_(value, non_blocking=True)
        value.record_stream(side)
        return arriving, side.record_event().synchronize

    def load(self, value: torch.Tensor) -> torch.Tensor:
        """A copy on the device of a value on the host."""
        place = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        self.fill(place, value)
        return place

    def store(self, values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Values of the device on the host, waited for."""
        on_their_way = [self.fetch(value) for value in values]
        for _, wait in on_their_way:
            wait()
        return [value for value, _ in on_their_way]


def host_memory(policy: CPUOffloadPolicy, device: torch.device) -> HostMemory | None:
    """Where the local shards of a ring on `device` stay; None where that is the memory of the device."""
    return None if device.type == "cpu" else HostMemory(device, policy.pin_memory)


class OffloadedShard:
    """The copy on the device of one shard that stays on the host."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._stand_in: torch.Tensor | None = None
        self._borrowers = 0

    def __deepcopy__(self, memo: dict) -> OffloadedShard:
        return OffloadedShard(self.memory)

    def __reduce__(self) -> Any:
        return type(None), ()  # an unpickled parameter is not offloaded

    def stand_in(self, local: torch.Tensor) -> torch.Tensor:
        """The stand-in of `local` on the device: of its shape and dtype, without memory unless it is on the device."""
        known = self._stand_in
        if known is None or (known.shape, known.dtype) != (local.shape, local.dtype):
            with torch.inference_mode(False), torch.no_grad():
                known = self._stand_in = torch.empty(local.shape, dtype=local.dtype, device=self.memory.device)
            known.untyped_storage().resize_(0)
        return known

    def borrow(self, local: torch.Tensor) -> None:
        if local.device.type != "cpu":
            raise ValueError(
                f"a parameter whose shard is of shape {tuple(local.shape)}: expected it on the host, where "
                f"offload_policy keeps it, got it on {local.device}: move the model back, model.to('cpu')"
            )
        if self._borrowers == 0:
            place = self.stand_in(local)
            place.untyped_storage().resize_(place.nbytes)
            self.memory.fill(place.data, local)  # no write that a backward should notice
        self._borrowers += 1

    def give_back(self) -> None:
        self._borrowers -= 1
        if self._borrowers == 0 and self._stand_in is not None:
            self._stand_in.untyped_storage().resize_(0)  # for what the same stream computes next

    def deliver(self, parameter: Any, gradient: torch.Tensor, lay_out: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Gives p.grad a gradient, which is on the device, at the end of the backward that runs. `lay_out`: makes what
        autograd wants of it on the host."""
        task = torch._C._current_graph_task_id()
        arrivals = _arrivals.get(task)
        if arrivals is None:
            arrivals = _arrivals[task] = _Arrivals()
            Variable._execution_engine.queue_callback(arrivals.end)  # and lets go of it where the backward fails
        arrivals.add(parameter, self.memory.fetch(gradient), lay_out)


class _Arrivals:
    """Gradients of one backward that are on their way to the host."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, Any, list[tuple[torch.Tensor, Wait]]]] = {}  # by id of the parameter

    def add(self, parameter: Any, arriving: tuple[torch.Tensor, Wait], lay_out: Any) -> None:
        self._of.setdefault(id(parameter), (parameter, lay_out, []))[2].append(arriving)

    def end(self) -> None:
        """The engine's final callback."""
        parameters, gradients = [], []
        for parameter, lay_out, arrived in self._of.values():
            total = None
            for value, wait in arrived:  # in the order in which autograd would have added them
                wait()
                total = value if total is None else total.add_(value)
            if parameter.requires_grad and total is not None:
                parameters.append(parameter)
                gradients.append(lay_out(total))
        self._of.clear()
        if parameters:
            torch.autograd.backward(parameters, gradients)


_arrivals: weakref.WeakValueDictionary[int, _Arrivals] = weakref.WeakValueDictionary()  # by graph task


def keep_on_host(root: nn.Module, memory: HostMemory) -> None:
    """Has the device borrow the sharded parameters of a model, which are on the host."""
    for parameter in root.parameters():
        if not isinstance(parameter, DTensor):
            continue
        local = parameter._local_tensor
        if local.device.type == "cpu" and (pinned := memory.pinned(local)) is not local:
            local.data = pinned
        if offloaded_shard_of(parameter) is None:
            parameter.__dict__[OFFLOADED] = OffloadedShard(memory)


@contextlib.contextmanager
def on_device(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """The stand-ins of all parameters that stay on the host hold their shards."""
    borrowed: list[OffloadedShard] = []
    try:
        for parameter in parameters:
            kept = offloaded_shard_of(parameter)
            if kept is not None:
                kept.borrow(parameter._local_tensor)  # type: ignore[attr-defined]
                borrowed.append(kept)
        yield
    finally:
        for kept in borrowed:
            kept.give_back()
