"""The formulas of Kun Yuan's lecture "Optimization for Deep Learning (Part II)", Peking University, 8 June 2024.

They are rules of thumb for GPTs in one precision, and costs of communication. The lecture prints a utilization of about
0.3 for LLaMA-65B (2048 A100, 1.4e12 tokens, 21 days); its own formula gives 0.63. All other numbers of the lecture
follow from these formulas.
"""

from __future__ import annotations

from collections.abc import Sequence


def parameters(layers: int, hidden: int, vocab: int) -> int:
    """Returns 12 l h^2 + 2 v h: attention and MLP blocks, embedding and prediction (part 01, "Total parameters")."""
    return 12 * layers * hidden**2 + 2 * vocab * hidden


def memory_bytes(
    layers: int, hidden: int, heads: int, batch: int, seq: int, bytes_per_value: float = 4
) -> dict[str, float]:
    """Returns bytes of training with Adam, (48 l h^2 + b l (2 s^2 a + 14 s h)) values (part 01).

    Model and gradients have 12 l h^2 values each, optimizer state twice as many, activations b l (2 s^2 a + 14 s h). As
    in the lecture, embeddings are not counted.

    Returns:
        bytes under `model`, `gradients`, `optimizer` and `activations`.
    """
    model = 12 * layers * hidden**2 * bytes_per_value
    activations = batch * layers * (2 * seq**2 * heads + 14 * seq * hidden) * bytes_per_value
    return {"model": model, "gradients": model, "optimizer": 2 * model, "activations": activations}


def data_parallel_memory_bytes(
    parameters: float, activations_per_sample: float, batch: int, gpus: int, bytes_per_value: float = 2
) -> float:
    """Returns bytes on each of N GPUs, 2 (4 Phi + b/N Theta) in 16 bits (part 03).

    Args:
        parameters: Phi. Model, gradients and optimizer state are 4 Phi values on every GPU.
        activations_per_sample: Theta, values of one sample. Each GPU holds those of b / N samples.
    """
    return bytes_per_value * (4 * parameters + batch / gpus * activations_per_sample)


def data_parallel_communication_bytes(parameters: float, bytes_per_value: float = 2) -> float:
    """Returns 2 Phi bytes in 16 bits: the gradient that every GPU communicates in a step (part 03)."""
    return bytes_per_value * parameters


def ring_allreduce_steps(gpus: int) -> int:
    """Returns 2 (N - 1), the number of sequential messages: the O(N) latency of a ring all-reduce (part 04).

    The lecture gives the order; the constant is that of a reduce-scatter and an all-gather around the ring.
    """
    return 2 * (gpus - 1)


def ring_allreduce_seconds(bytes_: float, gpus: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Returns 2 (N - 1) latencies plus the time of 2 (N - 1) / N of the bytes on every link: O(N) latency (part 04).

    The bandwidth term is that of nccl-tests' PERFORMANCE.md.
    """
    return ring_allreduce_steps(gpus) * (latency_s + bytes_ / gpus / bytes_per_s)


def parameter_server_bytes(bytes_: float, gpus: int) -> float:
    """Returns the bytes of N messages to the server and N from it: O(N) communication (part 04)."""
    return 2 * gpus * bytes_


def pipeline_idle_fraction(stages: int, micro_batches: int) -> float:
    """Returns (N - 1) / m: idle time relative to the time of the computation, for equal stages (part 05)."""
    return (stages - 1) / micro_batches


def pipeline_idle_fraction_uneven(stage_seconds: Sequence[float], micro_batches: int) -> float:
    """Returns idle time relative to the time of the computation for unequal stages, where the lecture says it grows.

    All stages wait for the slowest: ((m - 1) max t + sum t) / (m mean t) - 1, which for equal stages is (N - 1) / m.
    """
    busy = micro_batches * sum(stage_seconds) / len(stage_seconds)
    return ((micro_batches - 1) * max(stage_seconds) + sum(stage_seconds)) / busy - 1


def pipeline_communication_bounds(
    boundary_values: Sequence[float], micro_batch_samples: int, batch_samples: int, bytes_per_value: float = 2
) -> tuple[float, float]:
    """Returns lower and upper bound of the bytes that communication adds to a pipeline's step, sequentially (part 05).

    "Micro-batch's communicated activation cost <= pipeline communication cost <= full-batch's": at least one
    micro-batch must cross every cut, forward and back, before the last stage can start and after it ends; at most all
    messages are exposed.

    Args:
        boundary_values: of one sample, for every cut between two stages.
    """
    cuts = 2 * bytes_per_value * sum(boundary_values)
    return cuts * micro_batch_samples, cuts * batch_samples


def gossip_seconds(bytes_: float, neighbours: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Returns the seconds of partial averaging, one message per neighbour: O(d_max), O(1) on sparse graphs (part 04).

    The lecture prints 150 ms where ring all-reduce takes 278 ms: ResNet-50 (25.5e6 parameters) on 256 GPUs. On equal
    links its formulas give at least half an all-reduce for one neighbour: 2 (N - 1) / N of the bytes against one times
    the bytes; any further saving is latency.
    """
    return neighbours * (latency_s + bytes_ / bytes_per_s)


def local_sgd_seconds(allreduce_seconds: float, period: int) -> float:
    """Returns the mean seconds of a step where nodes average once in `period` (tau) steps (part 04)."""
    return allreduce_seconds / period


def sgd_iterations(sigma: float, nodes: int, accuracy: float) -> float:
    """Returns T >= sigma^2 / (n epsilon^2), the steps of parallel SGD to accuracy epsilon; linear speedup (part 03).

    The order, with a constant of 1.
    """
    return sigma**2 / (nodes * accuracy**2)


def training_seconds(tokens: float, parameters: float, gpus: int, peak_flops: float, utilization: float) -> float:
    """Returns 8 T P / (N F U): forward 2 T P, backward 4 T P, recomputation 2 T P (part 02; arXiv 2104.04473)."""
    return 8 * tokens * parameters / (gpus * peak_flops * utilization)


def utilization(tokens: float, parameters: float, gpus: int, peak_flops: float, seconds: float) -> float:
    """Returns 8 T P / (N F t): the fraction of the peak that a training run of `seconds` reached (part 02).

    Args:
        peak_flops: operations per second of one GPU.
    """
    return 8 * tokens * parameters / (gpus * peak_flops * seconds)
