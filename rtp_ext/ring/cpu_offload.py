"""Local shards that stay on the host: the device has a copy while an operation needs it, and gradients are copied back.

Operations and autograd use the *stand-in* of such a shard: a tensor on the device that has memory only while the shard
is `on_device`. The copy is enqueued on the stream of the computes that read it, so that no thread waits for it.
Autograd may save a stand-in for backward: this keeps no memory, and the backward copies the shard again. Such a ring
does not prefetch, since the memory of a later layer's shard does not exist yet.

A gradient is copied to the host after its reduction. Autograd receives None, since the gradient must not be read before
the copy has ended; `OffloadedShard.deliver` sets p.grad when the backward ends, in the engine's final callback.
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
    """The memory of the host, as a device uses it: all copies between the two memories, and the waits for them."""

    def __init__(self, device: torch.device, pin: bool) -> None:
        self.device, self.pin = device, pin
        self._side: torch.cuda.Stream | None = None

    def keep(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a shard, which may be on any device, on the host. A shard on the meta device stays there."""
        return shard if shard.is_meta else self.pinned(shard.detach().to("cpu"))

    def pinned(self, local: torch.Tensor) -> torch.Tensor:
        """Returns a shard on the host in pinned memory, if the policy requires that."""
        return local.pin_memory() if self.pin and not local.is_meta and not local.is_pinned() else local

    def fill(self, place: torch.Tensor, local: torch.Tensor) -> None:
        """Copies a shard to the device on the current stream. The host does not wait if the shard is pinned."""
        place.copy_(local, non_blocking=True)

    def fetch(self, value: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """Starts to copy a value of the current stream to the host, concurrently with the next computes. Returns the
        copy and a function that waits for it."""
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
        """Returns a copy on the device of a value on the host."""
        place = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        self.fill(place, value)
        return place

    def store(self, values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Copies values of the device to the host, and waits for the copies."""
        arriving = [self.fetch(value) for value in values]
        for _, wait in arriving:
            wait()
        return [value for value, _ in arriving]


def host_memory(policy: CPUOffloadPolicy, device: torch.device) -> HostMemory | None:
    """Returns the memory of the local shards of a ring on `device`; None where it is the memory of the device."""
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
        """Returns the stand-in of `local` on the device: of its shape and dtype, without memory unless the shard is on
        the device."""
        known = self._stand_in
        if known is None or (known.shape, known.dtype) != (local.shape, local.dtype):
            with torch.inference_mode(False), torch.no_grad():
                known = self._stand_in = torch.empty(local.shape, dtype=local.dtype, device=self.memory.device)
            known.untyped_storage().resize_(0)
        return known

    def borrow(self, local: torch.Tensor) -> None:
        """Copies `local` to the device unless a borrower has done so. Each call needs one of `give_back`."""
        if local.device.type != "cpu":
            raise ValueError(
                f"a parameter whose shard is of shape {tuple(local.shape)}: expected it on the host, where "
                f"offload_policy keeps it, got it on {local.device}: move the model back, model.to('cpu')"
            )
        if self._borrowers == 0:
            place = self.stand_in(local)
            place.untyped_storage().resize_(place.nbytes)
            self.memory.fill(place.data, local)  # through .data: a backward must not see a write
        self._borrowers += 1

    def give_back(self) -> None:
        """Frees the copy on the device once its last borrower has given it back."""
        self._borrowers -= 1
        if self._borrowers == 0 and self._stand_in is not None:
            self._stand_in.untyped_storage().resize_(0)  # the same stream may reuse the memory at once

    def deliver(self, parameter: Any, gradient: torch.Tensor, lay_out: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Adds a gradient, which is on the device, to p.grad at the end of the running backward. `lay_out`: converts
        the copy on the host to the layout of the parameter."""
        task = torch._C._current_graph_task_id()
        arrivals = _arrivals.get(task)
        if arrivals is None:
            arrivals = _arrivals[task] = _Arrivals()
            Variable._execution_engine.queue_callback(arrivals.end)  # the engine drops it if the backward fails
        arrivals.add(parameter, self.memory.fetch(gradient), lay_out)


class _Arrivals:
    """Gradients of one backward whose copies to the host have started."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, Any, list[tuple[torch.Tensor, Wait]]]] = {}  # by id of the parameter

    def add(self, parameter: Any, arriving: tuple[torch.Tensor, Wait], lay_out: Any) -> None:
        self._of.setdefault(id(parameter), (parameter, lay_out, []))[2].append(arriving)

    def end(self) -> None:
        """Delivers all gradients: the engine's final callback."""
        parameters, gradients = [], []
        for parameter, lay_out, arrived in self._of.values():
            total = None
            for value, wait in arrived:  # in autograd's order of addition
                wait()
                total = value if total is None else total.add_(value)
            if parameter.requires_grad and total is not None:
                parameters.append(parameter)
                gradients.append(lay_out(total))
        self._of.clear()
        if parameters:
            with torch.enable_grad():
                torch.autograd.backward(_Delivery.apply(gradients, *parameters))


class _Delivery(torch.autograd.Function):
    """Passes on gradients without keeping them: autograd copies those that something else refers to, and torch 2.11
    gathers a DTensor with uneven shards to copy it."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *_parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = (None, *ctx.gradients)
        ctx.gradients.clear()
        return given


_arrivals: weakref.WeakValueDictionary[int, _Arrivals] = weakref.WeakValueDictionary()  # by graph task


def keep_on_host(root: nn.Module, memory: HostMemory) -> None:
    """Marks the sharded parameters of a model, which are on the host, as offloaded to `memory`."""
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
    """Keeps copies on the device of all `parameters` that stay on the host."""
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
