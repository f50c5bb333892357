"""Process groups of torch.distributed, made and destroyed by some ranks of the world alone, and the room that a process
has for them."""

from __future__ import annotations

import datetime
import os
import threading
from typing import Any

import torch.distributed as dist

from rtp_ext.dtensor_hooks import GROUPS_ARE_COUNTED, named_groups

# renamed in torch 2.14
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_THREADS, _FILES = 3, 6  # of a group of Gloo, besides a connection to each rank
_MORE_THREADS, _MORE_FILES = 8, 24  # of a ring besides its groups


def lacks_room(groups: int, ranks: int) -> str | None:
    """Returns why this process cannot make so many groups of Gloo between `ranks` and what else a ring needs; None: it
    can. Gloo ends the process (std::terminate) where a thread or a descriptor is missing half-way."""
    threads, files = groups * _THREADS + _MORE_THREADS, groups * (_FILES + ranks) + _MORE_FILES
    opened: list[int] = []
    started: list[threading.Thread] = []
    over = threading.Event()
    try:
        while len(opened) < files:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        while len(started) < threads:
            thread = threading.Thread(target=over.wait)
            thread.start()
            started.append(thread)
        return None
    except (OSError, RuntimeError, MemoryError) as error:
        return (
            f"expected room for {files} more descriptors and {threads} more threads, got {len(opened)} and "
            f"{len(started)}: {error}"
        )
    finally:
        over.set()
        for file in opened:
            os.close(file)
        for thread in started:
            thread.join()


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
