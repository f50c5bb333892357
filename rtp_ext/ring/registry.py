"""Names by which graphs of a compiler find what they cannot hold: rings by a string, their operations by a number. And
rings by the mesh of their parameters.

A number is a tensor, so that a compiler takes it for an input: one graph then serves all layers of a kind, where a
constant would have it compiled anew for each.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from rtp_ext._native import RotationError

if TYPE_CHECKING:
    from rtp_ext.ring.ring import Ring

_serials = itertools.count()
_numbers = itertools.count()
_rings: weakref.WeakValueDictionary[str, Ring] = weakref.WeakValueDictionary()
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def name_ring(ring: Ring) -> None:
    """Sets `serial`, the how manieth ring of this process this is, and `name`, by which graphs find it."""
    ring.serial = next(_serials)
    ring.name = f"ring {ring.serial}"
    _rings[ring.name] = ring


def register(owner: Any) -> torch.Tensor:
    """A number by which graphs find a layer, a bundle or a model. A copy of it needs another."""
    number = next(_numbers)
    _owners[number] = owner
    with torch.inference_mode(False):
        return torch.tensor(number, device="cpu")


def ring_named(name: str) -> Ring:
    ring = _rings.get(name)
    if ring is None:
        raise RotationError(f"a compiled graph: expected a ring of the name {name}, which is gone")
    return ring


def collectively_on(mesh: DeviceMesh, operation: str, post: Callable[..., Any], *tensors: Any, group: Any) -> None:
    """Runs a torch.distributed collective over ranks of a mesh that parameters lie on. Where it fails, so does the
    newest ring there, whose ranks find out which of them it was."""
    rings = [ring for ring in _rings.values() if mesh in (ring.parameter_mesh, ring.mesh) and ring.alive]
    if rings:
        rings[-1]._collectively(operation, post, *tensors, group=group)
    else:
        post(*tensors, group=group)


def owner_of(number: torch.Tensor) -> Any:
    """Whom `enrol` gave the number."""
    owner = _owners.get(int(number))
    if owner is None:
        raise RotationError("a compiled graph: expected the layer that it was made for, which is gone")
    return owner
