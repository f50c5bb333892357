"""Registry of the objects that compiled graphs cannot contain: rings by name, owners of operations by number. And rings
by the mesh of their parameters.

A number is a tensor, so that a compiler treats it as an input: one graph then serves all layers of a kind, where a
constant would cause a compilation for each.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from rtp_ext._native import RotationError
from rtp_ext.ring.mesh import rings_on

_serials = itertools.count()
_numbers = itertools.count()
_rings: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def name_ring(ring: Any) -> None:
    """Sets `serial`, the index of the ring within the process, and `name`, by which graphs find the ring. Adds a
    reference to the ring for each of its meshes."""
    ring.serial = next(_serials)
    ring.name = f"ring {ring.serial}"
    _rings[ring.name] = ring
    if ring.parameter_mesh is not None:
        for mesh in {ring.parameter_mesh, ring.mesh}:
            rings = rings_on.setdefault(mesh, [])
            rings[:] = [reference for reference in rings if reference() is not None]
            rings.append(weakref.ref(ring))


def register(owner: Any) -> torch.Tensor:
    """Returns a number by which graphs find a layer, a bundle or a model. A copy of the owner needs a number of its
    own."""
    number = next(_numbers)
    _owners[number] = owner
    with torch.inference_mode(False):
        return torch.tensor(number, device="cpu")


def ring_named(name: str) -> Any:
    """Returns the ring with a name. Raises RotationError where it no longer exists."""
    ring = _rings.get(name)
    if ring is None:
        raise RotationError(f"a compiled graph: expected a ring of the name {name}, which is gone")
    return ring


def owner_of(number: torch.Tensor) -> Any:
    """Returns the owner that `register` was called with. Raises RotationError where it no longer exists."""
    owner = _owners.get(int(number))
    if owner is None:
        raise RotationError("a compiled graph: expected the layer that it was made for, which is gone")
    return owner
