"""Memory that is taken while times are taken: the same on all sides of a comparison."""

import os
import subprocess
import sys

import pytest
import torch

import rtp_ext
from rtp_ext.measure import layer as measured_layer
from rtp_ext.measure import timing

FREED = """
import resource, sys, torch
from rtp_ext.measure.timing import settle_memory
if sys.argv[1] == "settled":
    settle_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    tensors = [torch.empty(4 << 20, dtype=torch.uint8).zero_() for _ in range(8)]
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print((faults() - before) / 10)
"""


def test_what_is_freed_is_kept_while_times_are_taken():
    """Page faults of a step that allocates and frees 32 MiB; without settling, some processes keep the memory too, so
    malloc of the control is configured to map each tensor separately."""
    faults = {}
    for how, told in (("settled", {}), ("mapped anew", {"MALLOC_MMAP_THRESHOLD_": "131072"})):
        command = [sys.executable, "-c", FREED, how]
        environment = {**os.environ, **told}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        faults[how] = float(done.stdout)
    assert faults["settled"] < 4
    assert faults["mapped anew"] >= 8  # of huge pages; 8,192 of small ones


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_gemms_take_new_memory_for_their_results_as_the_layer_does(monkeypatch, pass_):
    ring = rtp_ext.Ring.emulated(2, prefetch=0)
    layer = measured_layer.TimedLayer(ring, 16, 16, 12, torch.float32)
    layer.check("step")
    right = layer.ov(pass_)
    renewed = []

    def renew(*tensors):
        timing.renew(*tensors)
        for tensor in tensors:
            renewed.append(tensor.fill_(float("nan")))  # nothing is read but a sum that has landed

    monkeypatch.setattr(measured_layer, "renew", renew)
    for action in (layer.gr, layer.g1):  # in gr of this ring the sum of the others lands where the last product adds
        renewed.clear()
        action(pass_)
        shapes = [tensor.shape for tensor in right]
        if action == layer.g1 and pass_ == "backward":
            shapes[1] = layer.whole.shape
        assert [tensor.shape for tensor in renewed] == shapes
        measured_layer.expect_same(renewed[0], right[0].double(), "the first result")
    assert all(tensor.isfinite().all() for tensor in renewed)  # of g1
