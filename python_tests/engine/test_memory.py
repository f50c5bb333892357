"""The memory of a training step: a Llama-style model at R = 4 against fully_shard, and against DDP at R = 2, where each
rank holds as much as at R = 4.

benchmarks/shared/memory.py measures it, with the kernel and the C library, exact to about 3 MiB; so the model is large
enough for its blocks to be visible.
"""

import functools

import pytest
import torch
from harness import run_ranks
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

RANKS = 4
LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, VOCABULARY = 2, 384, 6, 3, 1056, 8192
TOKENS = 128
STEPS = 2  # the first makes gradients and optimizer state
FLOAT = 4
HEAD_DIM = HIDDEN // HEADS
BLOCK = FLOAT * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER + 2 * HIDDEN)
WHOLE = LAYERS * BLOCK + FLOAT * (2 * VOCABULARY * HIDDEN + HIDDEN)
PRECISION = 3 << 20


def _probe(rank, ranks, strategy):
    from shared.memory import MemoryProbe
    from shared.models import Llama, random_tokens
    from shared.strategies import Trainer

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (ranks,))
    batch = random_tokens(TOKENS, torch.Generator().manual_seed(rank), seq=64, vocabulary=VOCABULARY)
    with MemoryProbe(torch.device("cpu")) as probe:
        trainer = Trainer(
            strategy,
            lambda: Llama(
                layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, inner=INNER, vocabulary=VOCABULARY
            ),
            mesh,
            torch.device("cpu"),
            dtype="float32",
            lr=1e-3,
            seed=0,
        )
        for _ in range(STEPS):
            probe.step(trainer, *batch)
        memory = probe.memory(trainer)
    trainer.close()
    return memory


@functools.cache
def memory_of(strategy, ranks=RANKS):
    """Returns the values of the rank that holds most."""
    return max(run_ranks(_probe, ranks, strategy), key=lambda memory: memory.peak)


def persistent(memory):
    return memory.parameters + memory.gradients + memory.optimizer


def test_against_other_strategies():
    """A single test, so that each strategy is measured once."""
    a_quarter_of_the_parameters_and_the_documented_slots()
    peak_below_fully_shard_by_two_blocks()


def a_quarter_of_the_parameters_and_the_documented_slots():
    rtp = memory_of("rtp-lean")
    # parameters, gradients, two moments; a shard is at most one row longer than a quarter
    assert persistent(rtp) <= 4 * WHOLE / RANKS * 1.005
    assert 4 * WHOLE <= persistent(memory_of("ddp", 2)) <= 4 * WHOLE * 1.005, "control: whole copies"
    # two weight and two gradient slots, each for the largest shard: here the vocabulary head's
    largest = max(VOCABULARY * HIDDEN, 3 * HIDDEN * INNER) * FLOAT // RANKS
    assert 4 * largest <= rtp.slots <= 4 * largest * 1.01
    assert memory_of("rtp-fused").slots <= (4 + RANKS) * largest, (
        "and what the largest pass receives, in slots of many sizes"
    )


def peak_below_fully_shard_by_two_blocks():
    fsdp2 = memory_of("fsdp2")
    for strategy in ("rtp", "rtp-fused"):
        rtp = memory_of(strategy)
        assert rtp.peak + 2 * BLOCK <= fsdp2.peak - PRECISION, f"{strategy}: {rtp} against {fsdp2}"
    assert memory_of("rtp-fused").peak < memory_of("rtp").peak - PRECISION, "the fused loss saves nothing"
    assert fsdp2.peak < memory_of("ddp", 2).peak, "control: fully_shard itself holds less than DDP"
