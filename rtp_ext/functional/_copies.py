"""Virtual copies of a module: its forward with the shards of one rank as parameters, and the same again in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._pytree import tree_unflatten

from rtp_ext.functional._driven import owner_shapes
from rtp_ext.ring import Ring


class Scope(nn.Module):
    """Runs any action as a forward, because functional_call replaces parameters only while a forward runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, action: Callable[[], Any]) -> Any:
        return action()


@dataclass(frozen=True)
class Modes:
    """State that a module's forward depends on besides tensors and random numbers: autocast and training modes."""

    autocast: list[tuple[str, bool, torch.dtype]]
    training: list[bool]

    @classmethod
    def now(cls, module: nn.Module, device: torch.device) -> Modes:
        kinds = sorted({"cpu", device.type})
        autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        return cls(autocast, [part.training for part in module.modules()])

    @contextlib.contextmanager
    def autocasting(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                # no cache: it would keep casts of received shards, and casts made without a graph
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            yield

    @contextlib.contextmanager
    def restored_training(self, module: nn.Module) -> Iterator[None]:
        parts = list(module.modules())
        now = [part.training for part in parts]
        try:
            for part, training in zip(parts, self.training, strict=True):
                part.training = training
            yield
        finally:
            for part, training in zip(parts, now, strict=True):
                part.training = training


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    states = (torch.get_rng_state(),)
    return states if device.type != "cuda" else (*states, torch.cuda.get_rng_state(device))


def set_random_state(states: tuple[Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


@dataclass(frozen=True)
class Cut:
    """A sharded parameter: its whole shape and how it is cut."""

    name: str
    whole: tuple[int, ...]
    dim: int
    sizes: list[int]  # extent of every owner's shard along `dim`
    once: bool  # named in `added_once`

    def presented(self, shard: Tensor, owner: int) -> Tensor:
        """Returns the parameter of the copy of `owner`: its shard, padded with zeros to the whole if added once."""
        if not self.once:
            return shard
        before = sum(self.sizes[:owner])
        after = self.whole[self.dim] - before - self.sizes[owner]
        return F.pad(shard, [0, 0] * (len(self.whole) - self.dim - 1) + [before, after])


@dataclass(frozen=True)
class Copies:
    """The virtual copies of a module and the arguments of one call."""

    name: str
    module: nn.Module
    cuts: list[Cut]
    replicated: list[str]
    leaves: list[Any]  # leaves of the arguments; tensors are passed separately
    places: list[int]  # positions of the tensors among the leaves
    structure: Any  # pytree of the arguments
    combine: str
    dim: int
    keeps: bool  # a backward may follow
    state: Modes
    stored: bool  # a selective checkpoint may save the output
    # By owner, from the forward for its backward: the random state before its copy ran, and the extent of its output.
    states: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    extents: dict[int, int] = field(default_factory=dict)

    def skips(self, owner: int) -> bool:
        """Returns whether all shards of `owner` are empty; its copy then contributes nothing and does not run."""
        return owner > 0 and not any(cut.sizes[owner] for cut in self.cuts)

    def shapes(self, cuts: Sequence[Cut], ring: Ring) -> list[list[list[int]]]:
        return [owner_shapes(cut.whole, cut.dim, ring) for cut in cuts]

    def split(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Splits a sequence into inputs, replicated parameters and shards."""
        inputs, replicated = len(self.places), len(self.replicated)
        return tensors[:inputs], tensors[inputs : inputs + replicated], tensors[inputs + replicated :]

    def within(
        self, owner: int, replicated: Sequence[Tensor], shards: Sequence[Tensor], action: Callable[[], Any]
    ) -> Any:
        """Runs `action` while the module has the parameters of the copy of `owner`."""
        parameters = dict(zip(self.replicated, replicated, strict=True))
        for cut, shard in zip(self.cuts, shards, strict=True):
            parameters[cut.name] = cut.presented(shard, owner)
        on_device = {f"module.{name}": parameter for name, parameter in parameters.items()}
        return functional_call(Scope(self.module), on_device, (action,))

    def output(self, inputs: Sequence[Tensor]) -> Tensor:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.structure)
        watched = [(f"argument {place}", tensor) for place, tensor in zip(self.places, inputs, strict=True)]
        watched += [(f"buffer {name}", buffer) for name, buffer in self.module.named_buffers()]
        watched = [(what, tensor) for what, tensor in watched if not tensor.is_inference()]
        versions = [tensor._version for _, tensor in watched]
        with self.state.autocasting():
            y = self.module(*args, **kwargs)
        if not isinstance(y, Tensor):
            raise TypeError(f"{self.name}: expected a module that returns one tensor, got {type(y).__name__}")
        buffers = {id(buffer) for buffer in self.module.buffers()}
        for (what, tensor), version in zip(watched, versions, strict=True):
            if tensor._version != version or (what.startswith("buffer") and id(tensor) not in buffers):
                raise ValueError(
                    f"{self.name}: expected a module that changes neither its arguments nor its buffers, since it runs "
                    f"once for each of the copies and again in backward; it changed {what}"
                )
        return y

    def gradients(self, owner: int, leaves: list[Tensor], needs: Sequence[bool], dy: Tensor) -> list[Tensor | None]:
        """Runs the copy of `owner` again and returns the gradients of `leaves` (inputs, replicated parameters, shards);
        None for a leaf that does not need one."""
        inputs, replicated, shards = self.split(leaves)
        wanted = [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed]

        def action() -> tuple[Tensor | None, ...]:
            y = self.output(inputs)
            if not y.requires_grad:
                return (None,) * len(wanted)
            # while the parameters are replaced: checkpoints inside the module recompute parts of it
            return torch.autograd.grad(y, wanted, dy.to(y.dtype), allow_unused=True)

        with torch.enable_grad(), self.state.restored_training(self.module):
            found = iter(self.within(owner, replicated, shards, action))
        return [next(found) if needed else None for needed in needs]
