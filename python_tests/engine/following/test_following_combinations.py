"""The kernel that follows the hops together with everything else that a pass can be told: it makes the pass, or says
why not, and either way numbers are those of one process."""

import threading

import pytest
import torch
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from test_following_kernel import BF16, Layers
from test_transport_ce import Rank

from rtp_ext import _native

skip_without_headers()

DIRECT = {"gradient_route": "direct"}
NARROW = "weights travel in fewer bits than they are computed with"
# what passes are told, and why the kernel does not make a forward
COMBINATIONS = {
    "weights in bfloat16": ({"travel": "bfloat16"}, ""),
    "weights in int8": ({"travel": "int8"}, NARROW),
    "gradients in bfloat16": ({"reduce_dtype": BF16}, ""),
    "gradients straight home": (DIRECT, ""),
    "gradients straight home in bfloat16": ({**DIRECT, "reduce_dtype": BF16}, ""),
    "gradients straight home in int8": ({**DIRECT, "gradients_quantised": True, "route": "direct"}, ""),
    "halves": ({"halves": True}, ""),
    "late": ({"late": True}, ""),
    "pieces": ({"slot_cap": 512}, ""),
}
TWO_LEVELS = {"two levels": ({"route": "two-level"}, "")}


def work(rank, sim, ranks, id_, barrier, hosts, combinations):
    end = Rank(sim, rank, ranks, id_, barrier, "push", hosts=hosts)
    executor = end.executor
    with one_of_ranks(sim, rank, executor, barrier=barrier):
        executor.set_follows(True)
        executor.allow_late(1)
        for number, (name, (changes, reason)) in enumerate(combinations.items()):
            layers = Layers(rank, ranks, [16 * ranks], 16, biased="pieces" not in name, name=name, seed=number)
            options = {"route": "ring", "in_place": False, "compute_dtype": BF16, "reduce_dtype": torch.float32}
            options |= {"slot_cap": 0, "halves": False, **changes}
            layers.options = _native.RotationOptions(name=name, **options)
            for seed in range(2):
                layers.forward(executor, 3, seed=seed)
                layers.backward(executor, 3, seed=seed)
                said = executor.followed()
                assert said[f"{name} forward"] == said[f"{name} backward"] == reason, (name, said)
                layers.backward(executor, 3, seed=seed, wgrad=True)
                layers.forward(executor, 3, seed=seed)  # while a gradient of the pass before may be under way
            assert executor.followed()[f"{name} backward"] == "it makes weight gradients between its products", name
        assert "late" not in combinations or executor.landed_late() > 0
        end.check_rest()
        executor.close()


@pytest.mark.parametrize(
    ("ranks", "hosts", "combinations"), [(2, 1, COMBINATIONS), (3, 1, COMBINATIONS), (4, 2, TWO_LEVELS)]
)
def test_a_kernel_follows_or_says_why_not(sim, ranks, hosts, combinations):
    sim.controls.delay_us = 100
    arguments = (sim, ranks, sim.unique_id(), threading.Barrier(ranks), hosts, combinations)
    results = run_threads(work, ranks, *arguments, timeout=120.0)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise AssertionError(f"a rank failed: {result}") from result
    values(results)
