"""Rings of models that compute forwards only, whose ranks are threads on the simulated CUDA runtime.

Ranks are those of a threaded process group of torch, so that meshes, DTensors and the exchanges of a ring are the usual
ones; device memory is memory of this process. `inference_ranks(sim, ranks, work, ...)` runs `work(rank, ring_type,
...)` on every rank; within it, `rotate_for_inference` makes rings whose shards copy engines copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from simulated_cuda import one_of_ranks, run_threads, values
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from rtp_ext.inference import ring as inference
from rtp_ext.inference import rotate
from rtp_ext.ring import ring
from rtp_ext.ring.cpu_offload import HostMemory
from rtp_ext.ring.links import communicator
from rtp_ext.ring.links.transports import Candidate

TIMEOUT = 20.0


class SimulatedRing(inference.InferenceRing):
    """An InferenceRing on the device of the simulation. `mutant`: of COPIED_MUTANTS, or -1."""

    sim: Any
    mutant = -1

    def _make_source(self, sizes: Any, parameters: int, host: str, unique: bytes) -> Any:
        if self.host_memory is not None:
            return self.sim.offloaded_shards(self.rank, self.size, sizes[self.rank], self.mutant)
        return self.sim.copied_shards(unique, self.rank, self.size, max(sizes), self.timeout, self.mutant)

    def synchronize(self) -> None:
        self.sim.synchronize()


def inference_ranks(sim: Any, ranks: int, work: Callable[..., Any], *args: Any, mutant: int = -1) -> list[Any]:
    """Returns the results of `work(rank, *args)` on all ranks, which are threads; raises AssertionError where one has
    raised."""
    ring_type = type("SimulatedRing", (SimulatedRing,), {"sim": sim, "mutant": mutant})
    store, barrier = dist.HashStore(), threading.Barrier(ranks)

    def candidates(ring: Any, offload: bool) -> list[Candidate]:
        name = "shm" if offload else "ce"
        return [Candidate(name, "simulated", lambda: None, lambda ring: sim.emulated("sm-local"))]

    def run(rank: int) -> Any:
        dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        try:
            with one_of_ranks(sim, rank, barrier=barrier):
                return work(rank, *args)
        except BaseException as error:  # the other ranks may wait for this one
            ProcessLocalGroup.exception_handle(error)
            raise
        finally:
            dist.destroy_process_group()

    _install_threaded_pg()
    _set_thread_isolation_mode(True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rotate, "InferenceRing", ring_type)
            patch.setattr(inference, "_candidates", candidates)
            patch.setattr(inference, "unique_ids", lambda ring, count: [ring.exchange(sim.unique_id())[0]])
            patch.setattr(inference, "_check_device", lambda device, transport, offload: None)
            # all groups are the one of all ranks: torch's threaded ones cannot be destroyed one by one
            patch.setattr(communicator, "make_group", lambda members, backend, timeout: dist.group.WORLD)
            patch.setattr(communicator, "destroy", lambda groups, *_, **__: groups.clear())
            patch.setattr(ring, "host_memory", lambda policy, device: HostMemory(device, policy.pin_memory))
            return values(run_threads(run, ranks, timeout=15.0))
    finally:
        ProcessLocalGroup.reset()
        _set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
