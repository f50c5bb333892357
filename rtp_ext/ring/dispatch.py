"""Calls of native operations with the executor of a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rtp_ext.ring.autograd import refuse_transforms, unseen
from rtp_ext.ring.graphs import CAPTURED, PassGraphs
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.prepared import Agreement


class Dispatcher:
    """Runs native operations of one ring, each in its phase of a forward or backward.

    Attributes:
        graphs: enqueues passes as CUDA graphs, where the ring has them.
    """

    def __init__(self, communicator: Communicator, agreement: Agreement, graphs: PassGraphs) -> None:
        self._communicator, self._agreement = communicator, agreement
        self.graphs = graphs

    def check_alive(self, operation: str) -> None:
        """Raises RotationError if the ring was closed, has failed, outlived its process group, or is the ring of the
        process that this one was forked from; RuntimeError where something traces or transforms what is called."""
        refuse_transforms(operation)
        ring = self._communicator
        ring.executor.check_alive(operation)
        if ring.world is not None and ring.world is not dist.group.WORLD:
            ring.check_alive(operation)

    @unseen
    def run(
        self,
        operation: str,
        function: Callable[..., Any],
        *arguments: Any,
        serial: int = 0,
        watched: Sequence[torch.Tensor] = (),
        checked: bool = False,
    ) -> Any:
        """Calls a native operation with the executor of the ring; a failure of the ring reaches the neighbours.

        `serial` and `watched` name the parameters to the prefetcher: a number that is the same on every rank, and the
        tensors whose version counters show whether they were written. `checked`: in a forward, `check_alive` was
        called.
        """
        task = torch._C._current_graph_task_id()
        backward = task >= 0
        if backward or not checked:
            self.check_alive(operation)
        agreement = self._agreement
        if backward and agreement.open:  # of a forward that did not end, or has not yet
            agreement.settle()
        phase = agreement.forward_phase if not backward else 0 if task == agreement.passing_by else task + 1
        executor = self._communicator.executor
        executor.enter(phase, backward, serial, watched)
        try:
            if self.graphs.on and function in CAPTURED:
                return self.graphs.run(operation, function, arguments)
            return function(executor, *arguments)
        except RuntimeError as error:
            self._communicator.abandon(error)
            raise
