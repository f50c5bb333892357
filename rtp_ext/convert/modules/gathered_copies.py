"""Gathered copies of parameters within one forward: whether they are valid, and writes to them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from rtp_ext.parameters.sharded_module import plain_class
from rtp_ext.parameters.sharding import held, shard_bounds
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import OFFLOADED
from rtp_ext.ring.mesh import ring_dim


def version_of(owner: Any) -> tuple[bool, Any]:
    """Returns whether gradients are enabled, and a value that changes whenever gathered parameters become outdated."""
    state = tuple((held(p).data_ptr(), p._version, p.dtype, p.requires_grad) for p in owner.rtp_sharded().values())
    return torch.is_grad_enabled(), state


class GatheredCopies(NamedTuple):
    """The gathered parameters of a module within one forward."""

    owner: Any  # GatheredModule
    version: tuple[bool, Any]
    wholes: dict[str, torch.Tensor]
    sent: dict[str, torch.Tensor]  # this rank's parts as they travelled; empty if some are tensor subclasses

    def serve(self) -> bool:
        """Returns whether they are valid now. Parameters gathered with gradients also serve without them: in the first
        forward of a reentrant checkpoint, where graphs use them too."""
        (had_grad, then), (grad, now) = self.version, version_of(self.owner)
        return then == now and (had_grad or not grad)

    def counted(self) -> bool:
        """Returns whether a version counter, which a parameter shares with its copy, has changed."""
        then, now = self.version[1], version_of(self.owner)[1]
        return [state[1] for state in then] != [state[1] for state in now]

    def own(self, name: str, ring: Ring) -> torch.Tensor:
        """Returns this rank's part, a view, of a copy."""
        whole, dim = held(self.wholes[name]).detach(), ring_dim(self.owner._parameters[name])
        return whole if dim is None else whole.narrow(dim, *shard_bounds(whole.shape[dim], ring))

    def written(self, ring: Ring) -> Iterator[str]:
        """Yields the names of the copies that differ from what travelled in this rank's part."""
        for name, sent in self.sent.items():
            if not torch.equal(_bytes(self.own(name, ring)), _bytes(sent)):
                yield name

    def outdated(self) -> Iterator[str]:
        """Yields the names of parameters whose shards differ from what travelled."""
        for name, sent in self.sent.items():
            local = held(self.owner._parameters[name]).detach().to(self.wholes[name].dtype)
            if local.nbytes == sent.nbytes and not torch.equal(_bytes(local), _bytes(sent)):  # not of a piece
                yield name


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def digest_of(copy: torch.Tensor) -> bytes:
    """Returns the same bytes for copies of the same values."""
    return hashlib.sha1(_bytes(held(copy).detach()).cpu().numpy().tobytes()).digest()


def keep_writes(copies: Sequence[GatheredCopies], ring: Ring) -> list[GatheredCopies]:
    """Copies what a forward has written in place to gathered copies to the shards, and returns the copies that are
    valid after that: a forward may go on writing to them. Collective over ranks where a version counter has changed,
    which is the same on all of them. Raises ValueError, on every rank, where the result would not be that of the plain
    module."""
    counted = [each for each in copies if each.sent and each.counted()]
    if not counted:
        return []
    mine = []
    for each in counted:
        written, outdated = {*each.written(ring)}, {*each.outdated()}
        mine.append([(name in written, name in outdated, digest_of(each.wholes[name])) for name in each.sent])
    every = ring.communicator.exchange(mine)
    valid, found = [], []
    for place, each in enumerate(counted):
        stale = False
        for number, name in enumerate(each.sent):
            answers = [theirs[place][number] for theirs in every]
            stale = stale or any(outdated for _, outdated, _ in answers)
            if any(written for written, _, _ in answers):
                _expect_alike(each, name, {digest for _, _, digest in answers})
                found.append((each, name))
        if not stale:
            valid.append(each)
    with torch.inference_mode(False), torch.no_grad():
        for each, name in found:
            held(each.owner._parameters[name]).copy_(each.own(name, ring))
            each.sent[name] = _bytes(each.own(name, ring)).clone()
    return [
        GatheredCopies(each.owner, (each.version[0], version_of(each.owner)[1]), each.wholes, each.sent)
        for each in valid
    ]


def _expect_alike(copies: GatheredCopies, name: str, digests: set[bytes]) -> None:
    parameter, dtype = copies.owner._parameters[name], copies.wholes[name].dtype
    if dtype != parameter.dtype:
        _refuse(copies, name, f"as a copy in {dtype}: expected param_dtype={parameter.dtype} or None there")
    if OFFLOADED in parameter.__dict__ or (isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1):
        _refuse(copies, name, "with replicas, tensor parallelism, or shards on the host: expected a ring alone")
    if len(digests) > 1:
        _refuse(copies, name, "with different values on ranks: expected values that do not depend on the batch")


def _refuse(copies: GatheredCopies, name: str, problem: str) -> None:
    raise ValueError(
        f"{name} of a {plain_class(copies.owner).__name__}: the forward writes to a parameter that is gathered while "
        f"in use, {problem}. Write to it outside of the forward, or keep such values in a buffer"
    )
