"""The references of random programs: plain workers in one process, and the rules of outer policies between them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from reference import chunk
from torch import Tensor, nn

from rtp_ext.outer import mixing_matrix

Rule = Callable[[Any], None]  # what happens between workers after a step of each; `workers.step` is its number, from 1


class Workers:
    """Plain models, one for each replica, or a single one for all ranks: the batches that a model sees are those of
    the ranks of its replica, or of all.

    kept: the state of a rule. start: the weights [elements] when the rule began. parameters: those of each model when
    the rule began, including those of modules that are exchanged later or leave the model.
    """

    def __init__(self, models: Sequence[nn.Module], rule: Rule) -> None:
        self.models, self.rule = list(models), rule
        self.replicas = len(self.models)
        self.restart()

    def restart(self) -> None:
        """Restarts, like a policy that is attached to a new model."""
        self.parameters = [list(model.parameters()) for model in self.models]
        self.step, self.kept, self.start = 0, {}, self.weights[0]

    def end_step(self) -> None:
        self.step += 1
        with torch.no_grad():
            self.rule(self)

    @torch.no_grad()
    def average(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Sets all weights to their mean, and the states of the optimizers to theirs."""
        take_in(self)
        self.mix(mixing_matrix("complete", self.replicas))
        for parameters in zip(*self.parameters, strict=True):
            states = [o.state[p] for o, p in zip(optimizers, parameters, strict=True)]
            for key, value in states[0].items():
                mean = None if value is None else torch.stack([state[key] for state in states]).mean(0)
                for state in states:
                    state[key] = None if mean is None else mean.clone()

    @property
    def weights(self) -> Tensor:
        """[n, elements], a copy."""
        return torch.stack([torch.cat([p.detach().reshape(-1) for p in each]) for each in self.parameters])

    @torch.no_grad()
    def put(self, weights: Tensor) -> None:
        for parameters, row in zip(self.parameters, weights, strict=True):
            for parameter, part in zip(parameters, row.split([p.numel() for p in parameters]), strict=True):
                parameter.copy_(part.view(parameter.shape))

    def mix(self, matrix: Tensor) -> None:
        self.put(matrix.to(self.weights.dtype) @ self.weights)


# -- rules between whole models ----------------------------------------------------------------------------------------


def nothing(workers: Any) -> None:
    pass


def mean(workers: Any) -> None:
    workers.mix(mixing_matrix("complete", workers.replicas))


def local_sgd(period: int, warmup: int = 0) -> Rule:
    def act(workers: Any) -> None:
        if workers.step <= warmup or (workers.step - warmup) % period == 0:
            mean(workers)

    return act


def gossip(topology: str, period: int = 1, global_period: int | None = None) -> Rule:
    def act(workers: Any) -> None:
        if global_period and workers.step % global_period == 0:
            mean(workers)
        elif workers.step % period == 0:
            workers.mix(mixing_matrix(topology, workers.replicas, workers.step // period - 1))

    return act


def gossip_beside(topology: str, period: int = 1, global_period: int | None = None) -> Rule:
    """D-PSGD: the change by mixing is applied a step later."""

    def act(workers: Any) -> None:
        take_in(workers)
        if global_period and workers.step % global_period == 0:
            mean(workers)
        elif workers.step % period == 0:
            matrix = mixing_matrix(topology, workers.replicas, workers.step // period - 1).to(workers.weights.dtype)
            move = matrix @ workers.weights - workers.weights
            workers.kept["late"] = {0: (workers.step + 1, lambda: workers.put(workers.weights + move))}

    return act


def diloco(period: int, outer: Callable, fragments: Any = None, delay: int = 0, keep: float = 0.0) -> Rule:
    """`fragments`: for each, the step of a period after which it is sent, and its elements, a slice."""

    def act(workers: Any) -> None:
        kept, parts = workers.kept, fragments or [(0, slice(None))]
        if not kept:
            kept["anchors"] = [nn.Parameter(workers.start[part].clone()) for _, part in parts]
            kept["outer"] = [outer([anchor]) for anchor in kept["anchors"]]
            kept["late"] = {}
        for number, (due, part) in enumerate(parts):
            anchor, optimizer = kept["anchors"][number], kept["outer"][number]
            if workers.step % period == due % period:
                moved = anchor.detach() - workers.weights[:, part].mean(0)

                def step(anchor=anchor, optimizer=optimizer, part=part, moved=moved) -> None:
                    anchor.grad = moved
                    optimizer.step()
                    weights = workers.weights
                    weights[:, part] = keep * weights[:, part] + (1 - keep) * anchor.detach()
                    workers.put(weights)

                kept["late"][number] = workers.step + delay, step
        take_in(workers, workers.step)

    return act


def take_in(workers: Any, step: float = math.inf) -> None:
    """Applies all updates that are due until a step."""
    late = workers.kept.get("late", {})
    for number in [number for number, (due, _) in late.items() if due <= step]:
        late.pop(number)[1]()


# -- gradients that travel compressed ----------------------------------------------------------------------------------


class Compressed:
    """Computes the result of AllReduce(compressor) for the gradients of the replicas of a ring of so many ranks."""

    def __init__(self, compressor: Any, ring: int) -> None:
        self.compressor, self.ring = compressor, ring
        self.memory: dict[tuple[nn.Parameter, int], list[dict[str, Tensor]]] = {}  # and place in the ring

    def mean(self, parameter: nn.Parameter, gradients: Sequence[Tensor], dim: int | None) -> Tensor:
        """Reduces the gradients of one parameter, a whole one from each replica. `dim`: the dimension that the ring
        shards; None: not sharded."""
        shards = []
        for place in range(self.ring):
            cut = [g if dim is None else chunk(g, self.ring, place, dim).contiguous() for g in gradients]
            if cut[0].numel():
                key = parameter, 0 if dim is None else place
                if key not in self.memory:
                    self.memory[key] = [self.remember(each) for each in cut]
                shards.append(alone(self.compressor, cut, self.memory[key])[0])
            else:
                shards.append(cut[0])
            if dim is None:
                return shards[0]
        return torch.cat(shards, dim)

    def remember(self, shard: Tensor) -> dict[str, Tensor]:
        fresh = self.compressor.remember(shard.shape, shard.dtype)
        return fresh | ({"error": torch.zeros_like(shard)} if self.compressor.error_feedback else {})


def alone(compressor: Any, gradients: Sequence[Tensor], memories: Sequence[dict]) -> tuple[Tensor, list[int]]:
    """Returns the mean over replicas of one shard's gradients, computed by `way` in one process; and the bytes that
    each replica sends, for sums and for gathers."""
    ways, feedback, sent, results = [], compressor.error_feedback, [0, 0], []
    given = [g + m["error"] if feedback else g for g, m in zip(gradients, memories, strict=True)]
    asks = []
    for values, memory in zip(given, memories, strict=True):
        ways.append(compressor.way(values, memory))
        asks.append(next(ways[-1]))
    while asks:
        payloads = [ask.payload for ask in asks]
        if asks[0].linear:
            parts = [torch.stack(each).sum(0) / len(each) for each in zip(*(p.parts for p in payloads), strict=True)]
            answer = copy.copy(payloads[0])
            object.__setattr__(answer, "parts", tuple(parts))
            sent[0] += payloads[0].nbytes
        else:
            answer = payloads
            sent[1] += sum(part.nbytes + -part.nbytes % 8 for part in payloads[0].parts)
        asks = []
        for way in ways:
            try:
                asks.append(way.send(answer))
            except StopIteration as done:
                results.append(done.value)
    for values, memory, (_, own) in zip(given, memories, results, strict=True):
        if feedback:
            memory["error"] = values - own
    return results[0][0], sent
