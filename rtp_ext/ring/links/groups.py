"""Process groups of torch.distributed, made and destroyed by some ranks of the world alone."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist

from rtp_ext.dtensor_hooks import GROUPS_ARE_COUNTED, named_groups

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.14


def make_group(members: list[int], backend: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Creates a process group of `members`, ranks of the world. Collective over these alone."""
    with named_groups(members):
        group: Any = dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=True)
    return group


def destroy(groups: list[dist.ProcessGroup], world: Any, owner: int, unclosed: bool = False) -> None:
    """Destroys the process groups of a ring, and empties the list. Does nothing in a process other than `owner`, or
    once their world was destroyed.

    `unclosed`: the ring was garbage collected, perhaps on this rank alone, so that nothing may wait for other ranks,
    nor change the names of groups that are made later, as it would before torch 2.14: there its groups stay.
    """
    mine, groups[:] = groups[:], []
    if os.getpid() != owner or not dist.is_initialized() or world is not dist.group.WORLD:
        return
    for group in mine:
        if not unclosed or (GROUPS_ARE_COUNTED and dist.get_backend(group) == "gloo"):
            dist.destroy_process_group(group)
