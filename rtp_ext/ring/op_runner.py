"""Calls of native operations with the executor of a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from rtp_ext.ring.autograd import refuse_transforms
from rtp_ext.ring.graphs import CAPTURED, PassGraphs
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.prepared import Agreement


class OpRunner:
    """Runner of the native operations of one ring, each in its phase of a forward or backward.

    Attributes:
        graphs: enqueues passes as CUDA graphs where they are on.
    """

    def __init__(self, communicator: Communicator, agreement: Agreement, graphs: PassGraphs) -> None:
        self._communicator, self._agreement = communicator, agreement
        self.graphs = graphs

    def check_alive(self, operation: str) -> None:
        """Raises RotationError if the ring was closed, has failed, outlived its process group, or belongs to the parent
        of a forked process; RuntimeError where the call is traced or transformed."""
        torch_c = torch._C
        if (
            torch_c._len_torch_dispatch_stack() > 0
            or torch_c._get_tracing_state() is not None
            or torch_c._functorch.peek_interpreter_stack() is not None
        ):
            refuse_transforms(operation)
        ring = self._communicator
        ring.executor.check_alive(operation)
        if ring.world is not None and ring.world not in c10d._pg_map:  # destroyed, or the world of a thread
            ring.check_alive(operation)

    def run(
        self,
        operation: str,
        function: Callable[..., Any],
        *arguments: Any,
        serial: int = 0,
        watched: Sequence[torch.Tensor] = (),
        checked: bool = False,
    ) -> Any:
        """Calls a native operation with the executor of the ring. On a failure of the ring it ends the process groups,
        so that the neighbours fail too.

        `serial` and `watched` identify the parameters for the prefetcher: a number that is the same on every rank, and
        the tensors whose version counters show writes. `checked`: in a forward, the caller has called `check_alive`.
        """
        task = torch._C._current_graph_task_id()
        backward = task >= 0
        if backward or not checked:
            self.check_alive(operation)
        agreement = self._agreement
        if backward and agreement.open:  # left by a forward that failed or is still running
            agreement.settle()
        phase = agreement.forward_phase if not backward else 0 if task == agreement.passing_by else task + 1
        executor = self._communicator.executor
        executor.enter(phase, backward, serial, watched)
        try:
            if self.graphs.on and function in CAPTURED:
                return self.graphs.run(operation, function, arguments)
            return function(executor, *arguments)
        except BaseException as error:
            self._communicator.abandon(error)
            raise
