"""Process groups of torch.distributed, made and destroyed by some ranks of the world alone."""

from __future__ import annotations

import contextlib
import datetime
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

# torch 2.14 renamed it
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Older versions of torch name a new group by how many there are, which has to be the same number on all ranks.
_NAMES_ARE_COUNTED = "group_count" in dist.distributed_c10d._hash_ranks_to_str.__code__.co_names

# By world: how many groups of rings were made there over the same ranks.
_made: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def make_group(members: list[int], backend: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A process group of `members`, ranks of the world. Collective over these alone."""
    with _uncounted(members):
        group: Any = dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=True)
    return group


@contextlib.contextmanager
def _uncounted(members: list[int]) -> Iterator[None]:
    """Lets torch make a group that it does not count.

    torch names a group by how many its process has made, and members wait for each other under that name. Processes
    may make different numbers of rings, as stages of a pipeline do, or ranks outside of all rings: the next group with
    members of both would never be made.
    """
    if not _NAMES_ARE_COUNTED:
        yield
        return
    state: Any = dist.distributed_c10d._world
    counts = _made.setdefault(dist.group.WORLD, Counter())
    counts[tuple(members)] += 1
    before, state.group_count = state.group_count, -counts[tuple(members)]  # torch's own are not negative
    try:
        yield
    finally:
        state.group_count = before


def destroy(groups: list[dist.ProcessGroup], world: Any, owner: int, unclosed: bool = False) -> None:
    """Destroys the process groups of a ring, and empties the list. Does nothing in a process other than `owner`, or
    once their world was destroyed.

    `unclosed`: the ring was dropped, at any time and perhaps on this rank alone, so that nothing may wait for others.
    """
    mine, groups[:] = groups[:], []
    if os.getpid() != owner or not dist.is_initialized() or world is not dist.group.WORLD:
        return
    for group in mine:
        if not unclosed or (_NAMES_ARE_COUNTED and dist.get_backend(group) == "gloo"):
            dist.destroy_process_group(group)
