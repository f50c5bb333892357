"""Process groups of the ranks that hold the same shards, separate from those of their rings."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from rtp_ext.ring import Ring
from rtp_ext.ring.links.companion import Companion
from rtp_ext.ring.links.failure_report import this_process
from rtp_ext.ring.links.groups import all_gather_single, reduce_scatter_single
from rtp_ext.ring.links.hosts import find_hosts


class Replicas(Companion):
    """The group of rank r of every ring, in mesh order.

    Attributes:
        rank, size: index of this rank's ring, and K, the number of rings.
    """

    _member, _others = "replica", "a replica"

    def __init__(self, ring: Ring) -> None:
        mesh = ring.parameter_mesh
        assert mesh is not None and ring.replicas > 1, "a ring without replicas"
        group = mesh.get_group(0)
        super().__init__(ring, dist.get_rank(group), dist.get_process_group_ranks(group))
        if ring.failure_report is not None:
            ring.failure_report.add_processes(self.members, self.exchange(this_process()), find_hosts(self).of)

    def exchange(self, value: Any, identity: str = "") -> list[Any]:
        """Gathers `value` from every replica, in order. Collective."""
        self.check_alive("replicas")
        return super().exchange(value, identity)

    def begin_sum(self, values: torch.Tensor) -> Any:
        """Starts an in-place sum of `values` over the replicas. Returns the work that `end_sum` waits for."""
        self.check_alive("replicas")
        return dist.all_reduce(values, group=self._collective, async_op=True)

    def begin_reduce_scatter(self, values: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Starts a reduce-scatter of `values` [K, n]. Returns the work that `end_sum` waits for, and this rank's row
        [n]."""
        self.check_alive("replicas")
        row = torch.empty_like(values[0])
        return reduce_scatter_single(row, values.view(-1), group=self._collective, async_op=True), row

    def sent_by_scatter(self, row: torch.Tensor) -> int:
        """Returns the bytes that a rank sends in a `begin_reduce_scatter` with result `row`: K - 1 rows; twice as many
        over Gloo, where torch implements reduce-scatter by all-reduce."""
        passes = 2 if dist.get_backend(self._collective) == "gloo" else 1
        return passes * (self.size - 1) * row.nbytes

    def begin_gather(self, mine: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Starts to gather `mine` [n] of every replica. Returns the work that `end_sum` waits for, and the result
        [K, n]."""
        self.check_alive("replicas")
        rows = mine.new_empty(self.size, mine.numel())
        return all_gather_single(rows.view(-1), mine, group=self._collective, async_op=True), rows

    def end_sum(self, work: Any) -> None:
        """Waits for a sum; on a GPU, makes the current stream wait."""
        start = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost("a reduction of gradients", time.monotonic() - start, error) from error
