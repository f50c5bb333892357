"""Results of a memory estimate: terms that can be checked by hand, stages, verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

COMPONENTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits_and_loss",
    "rotation_slots",
    "unsharded_buffers",
    "pipeline_buffers",
    "workspaces",
    "context_and_communicators",
)
OUTSIDE_THE_ALLOCATOR = "context_and_communicators"
VERDICTS = ("fits", "tight", "out of memory")

Factor = tuple[str, float]


@dataclass(frozen=True)
class Term:
    """A product of named numbers divided by others; in bytes, or in parameters where `component` is "count"."""

    component: str
    what: str
    times: tuple[Factor, ...]
    over: tuple[Factor, ...] = ()
    source: str = ""

    @property
    def value(self) -> float:
        return math.prod(number for _, number in self.times) / math.prod(number for _, number in self.over)

    def _spelled(self, index: int) -> str:
        def spell(factor: Factor) -> str:
            return factor[0].replace("_", " ") if index == 0 else number_text(factor[1])

        return " / ".join([" * ".join(map(spell, self.times)), *map(spell, self.over)])

    @property
    def formula(self) -> str:
        return self._spelled(0)

    @property
    def filled(self) -> str:
        return self._spelled(1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "component": self.component,
            "what": self.what,
            "formula": self.formula,
            "filled": self.filled,
            "value": self.value,
            "source": self.source,
        }


def term(component: str, what: str, source: str, over: Iterable[Factor] = (), /, **times: float) -> Term:
    """Returns a term whose factors are named by keyword (with _ for a space). Omits divisors of 1."""
    return Term(component, what, tuple(times.items()), tuple(factor for factor in over if factor[1] != 1), source)


def number_text(number: float) -> str:
    """Exact."""
    return str(int(number)) if float(number).is_integer() else repr(float(number))


@dataclass(frozen=True)
class StageMemory:
    """One GPU of one pipeline stage at its peak.

    `terms` add up to the components; `counts` add up to the parameters of the GPU; `between` is memory that it holds
    between steps in addition to its states; `host` is memory of the host for this GPU.
    """

    stage: int
    layers: int
    in_flight: float  # forwards of its layers that wait for their backward at the peak
    counts: tuple[Term, ...]
    terms: tuple[Term, ...]
    between: tuple[Term, ...] = ()
    host: tuple[Term, ...] = ()

    @property
    def parameters(self) -> float:
        """Parameters of this GPU, not sharded by data parallelism."""
        return sum(count.value for count in self.counts)

    @property
    def components(self) -> dict[str, float]:
        """Bytes of every component."""
        sums = dict.fromkeys(COMPONENTS, 0.0)
        for term in self.terms:
            sums[term.component] += term.value
        return sums

    @property
    def allocated_bytes(self) -> float:
        """Bytes in the allocator: all components but the context and communicators."""
        return sum(size for component, size in self.components.items() if component != OUTSIDE_THE_ALLOCATOR)

    @property
    def between_steps_bytes(self) -> float:
        """Allocated bytes between two steps: parameters, gradients, optimizer state, workspaces and leftovers."""
        kept = ("parameters", "gradients", "optimizer", "workspaces")
        return sum(self.components[component] for component in kept) + sum(term.value for term in self.between)

    @property
    def host_bytes(self) -> float:
        """Bytes of the host's memory for this GPU: states that are offloaded."""
        return sum(term.value for term in self.host)

    def to_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "layers": self.layers,
            "in_flight": self.in_flight,
            "parameters": self.parameters,
            "allocated_bytes": self.allocated_bytes,
            "between_steps_bytes": self.between_steps_bytes,
            "host_bytes": self.host_bytes,
            "components_bytes": self.components,
        }


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one GPU of every stage, and whether it fits.

    Attributes:
        stages: in order; the totals below are those of the stage that allocates most.
        components: bytes by component (`COMPONENTS`); all but `context_and_communicators` are in the allocator.
        peak_allocated_bytes: predicted torch.cuda.max_memory_allocated.
        peak_reserved_bytes: memory that the allocator has reserved at the peak, with fragmentation.
        device_bytes: reserved memory plus memory outside the allocator.
        host_bytes: memory of the host for one GPU, of the stage that needs most.
        verdict: `fits` if the allocated bytes are below 80 % of the capacity (Fujii et al., arXiv 2411.06465), `tight`
            up to 100 %, then `out of memory`.
        margin_bytes: distance below the 80 % limit; negative above it.
    """

    model: str
    cluster: str
    strategy: dict[str, Any]
    global_batch: int
    micro_batches: int
    memory_bytes: float
    safe_fraction: float
    reserved_per_allocated: float
    stages: tuple[StageMemory, ...] = field(repr=False)

    @property
    def worst(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.allocated_bytes)

    @property
    def components(self) -> dict[str, float]:
        return self.worst.components

    @property
    def peak_allocated_bytes(self) -> float:
        return self.worst.allocated_bytes

    @property
    def peak_reserved_bytes(self) -> float:
        return self.peak_allocated_bytes * self.reserved_per_allocated

    @property
    def device_bytes(self) -> float:
        return self.peak_reserved_bytes + self.components[OUTSIDE_THE_ALLOCATOR]

    @property
    def host_bytes(self) -> float:
        return max(stage.host_bytes for stage in self.stages)

    @property
    def limit_bytes(self) -> float:
        return self.safe_fraction * self.memory_bytes

    @property
    def margin_bytes(self) -> float:
        return self.limit_bytes - self.peak_allocated_bytes

    @property
    def verdict(self) -> str:
        if self.peak_allocated_bytes <= self.limit_bytes:
            return VERDICTS[0]
        return VERDICTS[1] if self.peak_allocated_bytes <= self.memory_bytes else VERDICTS[2]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "cluster": self.cluster,
            "strategy": self.strategy,
            "global_batch": self.global_batch,
            "micro_batches": self.micro_batches,
            "memory_bytes": self.memory_bytes,
            "limit_bytes": self.limit_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "margin_bytes": self.margin_bytes,
            "verdict": self.verdict,
            "worst_stage": self.worst.stage,
            "components_bytes": self.components,
            "stages": [stage.to_dict() for stage in self.stages],
        }
