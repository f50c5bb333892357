"""The links between the GPUs of a ring: NVLink between all pairs, PCIe, memory of the host, or a network."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rtp_ext import _native

logger = logging.getLogger("rtp_ext")


@dataclass(frozen=True)
class Wiring:
    """The slowest link between two GPUs of a ring, the same on every rank.

    Attributes:
        kind: `one GPU`, `nvlink`, `pcie` (direct access), `host memory` (no direct access) or `network`.
        reason: in words.
        known: whether the ranks could find it; otherwise `kind` is an assumption.
    """

    kind: str
    reason: str
    known: bool = True

    @property
    def any_to_any(self) -> bool:
        """Whether a rank reaches every other as cheaply as its neighbour. Transfers over PCIe share the links of
        switches and of the host."""
        return self.kind in ("one GPU", "nvlink")


@dataclass(frozen=True)
class View:
    """The GPU of a rank by its uuid, and those that its process sees, that NVLinks join to it, and that it can access
    directly. problem: why the links are unknown."""

    host: str
    gpu: str
    seen: frozenset[str] = frozenset()
    nvlinked: frozenset[str] = frozenset()
    accessible: frozenset[str] = frozenset()
    problem: str | None = None


class Ranks(Protocol):
    """The ranks of a ring of GPUs; a Communicator is one."""

    device: torch.device
    size: int

    def exchange(self, value: Any) -> list[Any]: ...


def find_wiring(ring: Ranks) -> Wiring:
    """Exchanges the links of all ranks' GPUs. Collective."""
    wiring = slowest(ring.exchange(view_of(ring.device)))
    logger.info("ring of %d: %s", ring.size, wiring.reason)
    return wiring


def view_of(device: torch.device) -> View:
    """Returns the links of a GPU to those that this process sees.

    torch counts NVLinks through NVML; links to switches join all GPUs that have some (`CudaDMAConnectivity.cpp`).
    Direct access alone is no evidence of NVLink: PCIe has it too.
    """
    host, mine = _native.host_id(), device.index
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        gpus = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[mine]
        others = [index for index in range(len(gpus)) if index != mine]
        accessible = frozenset(gpus[index] for index in others if torch.cuda.can_device_access_peer(mine, index))
        nvlinked = frozenset(gpus[index] for index in others if links[index] > 0)
    except (RuntimeError, ImportError, AttributeError, LookupError) as error:
        return View(host, f"GPU {mine}", problem=str(error).partition("\n")[0])
    return View(host, gpus[mine], frozenset(gpus), nvlinked, accessible)


def slowest(views: list[View]) -> Wiring:
    """Returns the slowest link between two ranks. `views`: by rank."""
    if hosts := len({view.host for view in views}) - 1:
        return Wiring("network", f"its GPUs are on {hosts + 1} hosts")
    for rank, view in enumerate(views):
        if view.problem is not None:
            return Wiring("pcie", f"no NVLink is assumed: rank {rank} cannot find its links: {view.problem}", False)
    pairs = [(a, b) for a in range(len(views)) for b in range(len(views)) if views[a].gpu != views[b].gpu]
    if not pairs:
        return Wiring("one GPU", "its ranks share one GPU")
    for a, b in pairs:
        if views[b].gpu not in views[a].seen:
            return Wiring("pcie", f"no NVLink is assumed: rank {a} does not see the GPU of rank {b}", False)
    for a, b in pairs:
        if views[b].gpu not in views[a].accessible:
            return Wiring("host memory", f"the GPUs of ranks {a} and {b} have no direct access to each other")
    for a, b in pairs:
        if views[b].gpu not in views[a].nvlinked:
            return Wiring("pcie", f"the GPUs of ranks {a} and {b} have no NVLink to each other")
    return Wiring("nvlink", "all pairs of its GPUs have NVLink")
