"""Passes that one kernel makes while their hops are under way: over `ce` in the simulation, the kernel on emulated
threads, they give what one process gives, bit for bit where numbers are small integers."""

import os
import threading
import time
from datetime import timedelta

import pytest
import simulated_cuda
import torch
import torch.distributed as dist
from harness import Cases, run_ranks
from reference import chunk
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from simulated_cuda.mutants import FOLLOWING_MUTANTS
from test_cuda_transports import connect, unique_ids
from test_transport_ce import Rank, connected_news

import rtp_ext
from rtp_ext import RingTimeout, RotationError, _native

skip_without_headers()

BF16 = torch.bfloat16


def integers(*shape, seed, dtype=BF16):
    """Numbers whose products and sums here are exact in bfloat16."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Layers:
    """Layers that travel together: `outs` output features each, with biases where `biased`."""

    def __init__(self, rank, ranks, outs, inputs, *, biased=True, dtype=BF16, route="ring", name="layers", seed=0):
        self.rank, self.outs, self.inputs, self.name = rank, outs, inputs, name
        self.weights = [integers(out, inputs, seed=seed + 10 * i, dtype=dtype) for i, out in enumerate(outs)]
        self.biases = [integers(out, seed=seed + 10 * i + 1, dtype=dtype) for i, out in enumerate(outs)]
        self.home = []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            self.home += [chunk(weight, ranks, rank).clone()] + ([chunk(bias, ranks, rank).clone()] if biased else [])
        self.biased = biased
        shapes = [_native.LinearShape(out, inputs, by_outputs=True, transposed=False) for out in outs]
        self.bundle = _native.LinearBundle(shapes, [biased] * len(outs))
        self.projections = [_native.Projection(0, layer, 0, out) for layer, out in enumerate(outs)]
        self.options = _native.RotationOptions(
            route=route, in_place=False, compute_dtype=dtype, reduce_dtype=torch.float32, slot_cap=0, halves=False,
            name=name,
        )  # fmt: skip

    def forward(self, executor, tokens, seed):
        x = integers(tokens, self.inputs, seed=100 * seed + self.rank, dtype=self.weights[0].dtype)
        made = _native.linear_forward(executor, [x], self.home, self.bundle, self.projections, self.options)
        for weight, bias, y in zip(self.weights, self.biases, made, strict=True):
            expected = x.float() @ weight.float().t() + (bias.float() if self.biased else 0)
            assert torch.equal(y.float(), expected), f"{self.name}: forward of rank {self.rank}"

    def backward(self, executor, tokens, seed, wgrad=False):
        x = integers(tokens, self.inputs, seed=100 * seed + self.rank, dtype=self.weights[0].dtype)
        dys = [integers(tokens, out, seed=seed + i, dtype=x.dtype) for i, out in enumerate(self.outs)]
        needs = [wgrad] * len(self.home)
        dx = _native.linear_backward(
            executor, dys, [x], self.home, self.bundle, self.projections, [True], needs, self.options
        )[0]
        expected = sum(dy.float() @ weight.float() for dy, weight in zip(dys, self.weights, strict=True))
        assert torch.equal(dx.float(), expected), f"{self.name}: backward of rank {self.rank}"


def launches(sim):
    return sim.calls().get("cudaLaunchKernel", 0)


def passes(rank, sim, ranks, id_, barrier, mode, route):
    end = Rank(sim, rank, ranks, id_, barrier, mode)
    executor = end.executor
    with one_of_ranks(sim, rank, executor, barrier=barrier):
        executor.set_follows(True)
        one = Layers(rank, ranks, [16 * ranks], 24, name="one", route=route)
        three = Layers(rank, ranks, [8 * ranks, 16 * ranks, 8 * ranks], 16, name="three", seed=5, route=route)
        few = Layers(rank, ranks, [ranks - 1], 16, name="few", route=route)  # and an empty shard
        odd = Layers(rank, ranks, [5 * ranks - 1], 8, name="odd", biased=False, route=route)
        before = launches(sim)
        for layers in (one, three, odd, few):
            layers.forward(executor, 3 + rank, seed=1)
        one.backward(executor, 3 + rank, seed=1)
        three.backward(executor, 2, seed=1)
        assert launches(sim) == before + 6, "a pass is one launch"
        odd.backward(executor, 3, seed=1)
        one.backward(executor, 3, seed=1, wgrad=True)
        one.forward(executor, 0, seed=1)  # a rank without tokens
        assert launches(sim) == before + 6
        end.check_rest()
        if rank > 0:  # the others need not know what this one does
            executor.set_follows(True)
            one.forward(executor, 3, seed=2)
        else:
            said = executor.followed()
            executor.set_follows(False)
            one.forward(executor, 3, seed=2)
            assert [said[f"{name} forward"] for name in ("three", "odd", "few")] == [""] * 3
            assert said["three backward"] == ""
            assert said["odd backward"] == "rows of the input do not start at multiples of 16 bytes"
            assert said["one backward"] == "it makes weight gradients between its products"
            assert said["one forward"] == "there are no tokens"
        end.check_rest()
        executor.close()


@pytest.mark.parametrize(("ranks", "mode", "route"), [(2, "push", "ring"), (3, "pull", "direct"), (4, "push", "ring")])
def test_a_kernel_that_follows_the_hops_gives_what_one_process_gives(sim, ranks, mode, route):
    sim.controls.delay_us = 300
    arguments = (sim, ranks, sim.unique_id(), threading.Barrier(ranks), mode, route)
    values(run_threads(passes, ranks, *arguments, timeout=120.0))


@pytest.mark.parametrize("mutant", FOLLOWING_MUTANTS)
def test_a_mistake_in_the_protocol_is_caught(sim, mutant):
    """Of a shard that comes too early, or too late, other numbers are made."""
    ranks, mode = 4, "pull" if "tells" in mutant else "push"

    def work(rank, id_, barrier):
        end = Rank(sim, rank, ranks, id_, barrier, mode, timedelta(seconds=1), mutant)
        try:
            end.executor.set_follows(True)
            for turn in range(4):
                Layers(rank, ranks, [8 * ranks], 64).forward(end.executor, 3, seed=turn)
        except BaseException as error:
            end.executor.fail(f"rank {rank}: {error}")  # so that the others do not wait
            raise

    for seed in range(5):
        sim.reset(seed)
        sim.controls.delay_us = 1000
        results = run_threads(work, ranks, sim.unique_id(), threading.Barrier(ranks), timeout=60.0)
        if any(isinstance(result, (AssertionError, RingTimeout)) for result in results):
            return
        assert simulated_cuda.settled(sim)
    raise AssertionError(f"not noticed: {mutant}")


def test_passes_whose_first_hop_was_sent_ahead(sim):
    def work(rank, ranks, id_, barrier):
        end = Rank(sim, rank, ranks, id_, barrier, "push")
        end.executor.set_follows(True)
        end.executor.prefetch(True)
        layers = [Layers(rank, ranks, [8 * ranks], 16, name=f"layer {i}", seed=i) for i in range(2)]
        for phase in range(1, 4):
            for serial, layer in enumerate(layers, 1):
                end.executor.enter(phase, False, serial, layer.home)
                layer.forward(end.executor, 3, seed=phase)
        assert set(end.executor.followed().values()) == {""}
        assert end.executor.prefetched()[1] >= 2
        end.check_rest()
        end.executor.close()

    sim.controls.delay_us = 300
    values(run_threads(work, 4, 4, sim.unique_id(), threading.Barrier(4), timeout=120.0))


def test_a_kernel_does_not_wait_for_a_ring_that_has_failed(sim):
    def work(rank, ranks, id_, barrier, news):
        end = Rank(sim, rank, ranks, id_, barrier, "push", timedelta(seconds=2), news=news[rank])
        end.executor.set_follows(True)
        layer = Layers(rank, ranks, [8 * ranks], 16)
        layer.forward(end.executor, 3, seed=1)
        barrier.wait(20)
        if rank == ranks - 1:
            return end  # alive, and silent
        start = time.monotonic()
        with pytest.raises(RotationError) as raised:
            for _ in range(1000):
                try:
                    layer.forward(end.executor, 3, seed=2)
                except AssertionError:  # what a released wait let through; the next call raises
                    continue
        assert isinstance(raised.value, RingTimeout) and time.monotonic() - start < 6

    values(run_threads(work, 3, 3, sim.unique_id(), threading.Barrier(3), connected_news(3)))


def test_where_it_cannot_be_is_said(sim):
    def work(rank, id_, barrier, ids):
        end = Rank(sim, rank, 2, id_, barrier, "push")
        end.executor.set_follows(True)
        Layers(rank, 2, [16], 16, dtype=torch.float64, name="wide").forward(end.executor, 3, seed=1)
        Layers(rank, 2, [16], 12, name="narrow rows").forward(end.executor, 3, seed=1)
        Layers(rank, 2, [16], 16, route="gather", name="gathered").forward(end.executor, 3, seed=1)
        said = end.executor.followed()
        assert said["gathered forward"] == "route gather"
        assert said["wide forward"] == "it computes in Double"
        assert said["narrow rows forward"] == "rows of the input do not start at multiples of 16 bytes"
        end.executor.set_follows(False)
        Layers(rank, 2, [16], 16).forward(end.executor, 3, seed=1)
        assert end.executor.followed() == {}
        end.executor.close()
        executor = connect(sim, "nccl", ids, rank, 2)
        with pytest.raises(ValueError, match=r"persistent_gemm: expected a transport .* which is ce, got nccl"):
            executor.set_follows(True)
        executor.close()

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2), unique_ids(sim, "nccl")))


def _rings(rank, ranks):
    cases = Cases()
    groups, threads = len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))
    for wish, said in (
        ({"persistent_gemm": True}, r"persistent_gemm: expected a transport .* got shm"),
        ({"graphs": "on"}, r"expected graphs 'auto' or 'off', got 'on'"),
    ):
        # What was raised holds the ring, so that nothing ends because it was dropped.
        with cases.case(f"refused: {wish}"), pytest.raises(ValueError, match=said) as raised:
            rtp_ext.Ring(**wish, timeout=30.0)
        with cases.case(f"closed: {wish}"):
            assert raised.tb is not None
            assert len(dist.distributed_c10d._world.pg_map) == groups, "process groups of the ring are left"
            assert len(os.listdir("/proc/self/task")) <= threads, "threads of the ring are left"
    with cases.case("off"), rtp_ext.Ring(timeout=30.0) as ring:
        assert ring.persistent_gemms() == {}
    cases.finish()


def test_a_ring_over_another_transport_refuses():
    run_ranks(_rings, 2)
