"""Whole rotated steps as CUDA graphs: replays with new inputs end bit for bit where single launches end."""

import copy

import pytest
import torch
from reference import random
from support import LINKS, emulated, record
from torch import nn

import rtp_ext

pytestmark = pytest.mark.real_gpu("it captures; python_tests/engine/pass_graphs does on the simulated runtime")

TOKENS, FEATURES, HIDDEN = 192, 256, 512
RANKS = 4
WARMUP, STEPS = 3, 4


class Training:
    """A rotated model on a ring of its own, with static tensors for its inputs, and one training step to run.

    Gradients stay where the warm-up made them, so that a captured step finds them there.
    """

    def __init__(self, plain: nn.Module, link: str, *, bundle: bool | str, optimize: bool) -> None:
        self.ring = emulated(RANKS, link=link)
        self.model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=self.ring, bundle=bundle)
        self.x = torch.zeros(TOKENS, FEATURES, device="cuda")
        self.target = torch.zeros(TOKENS, FEATURES, device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, capturable=True) if optimize else None

    def step(self) -> torch.Tensor:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss = nn.functional.mse_loss(self.model(self.x), self.target)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()

    def feed(self, number: int) -> None:
        self.x.copy_(random(TOKENS, FEATURES, dtype=torch.float32, seed=2 * number))
        self.target.copy_(random(TOKENS, FEATURES, dtype=torch.float32, seed=2 * number + 1))

    def warm_up(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for number in range(WARMUP):
                self.feed(number)
                self.step()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = self.step()
        return graph, loss

    def state(self) -> list[torch.Tensor]:
        tensors = [tensor for p in self.model.parameters() for tensor in (p.detach(), p.grad)]
        return [tensor.clone() for tensor in tensors]


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, FEATURES)).cuda()


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("bundle", [False, True, "recompute"])
@pytest.mark.parametrize("link", LINKS)
def test_replays_equal_single_launches(link, bundle, optimize):
    plain = plain_model()
    single, replayed = (Training(plain, link, bundle=bundle, optimize=optimize) for _ in range(2))
    for training in (single, replayed):
        training.warm_up()
    graph, loss = replayed.capture()
    seen = []
    for number in range(WARMUP, WARMUP + STEPS):
        for training in (single, replayed):
            training.feed(number)
        expected = single.step()
        graph.replay()
        assert torch.equal(loss, expected), f"step {number}: {loss.item()!r} instead of {expected.item()!r}"
        for mine, right in zip(replayed.state(), single.state(), strict=True):
            assert torch.equal(mine, right), f"step {number}: a parameter or gradient of shape {tuple(mine.shape)}"
        seen.append(expected.item())
    assert len(set(seen)) == STEPS, "control: other inputs, other losses"


@pytest.mark.parametrize("link", LINKS)
def test_a_ring_goes_on_after_a_capture(link):
    """Replays and single steps alternate on one ring, which keeps the slots of the graph."""
    plain = plain_model()
    single, mixed = (Training(plain, link, bundle=False, optimize=True) for _ in range(2))
    for training in (single, mixed):
        training.warm_up()
    graph, loss = mixed.capture()
    slots = mixed.ring.slot_count("weight").allocations
    for number in range(WARMUP, WARMUP + STEPS):
        for training in (single, mixed):
            training.feed(number)
        expected = single.step()
        if number % 2:
            graph.replay()
        actual = loss if number % 2 else mixed.step()
        assert torch.equal(actual, expected), f"step {number}"
    assert mixed.ring.slot_count("weight").allocations == slots


@pytest.mark.parametrize("bundle", [False, True, "recompute"])
@pytest.mark.parametrize("link", LINKS)
def test_passes_become_graphs(link, bundle):
    """Without the user's help: steps with graphs end bit for bit where steps without them end."""
    plain = plain_model()
    single, replayed = (Training(plain, link, bundle=bundle, optimize=True) for _ in range(2))
    replayed.ring.close()
    replayed.ring = emulated(RANKS, link=link, graphs="on")
    replayed.model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=replayed.ring, bundle=bundle)
    replayed.optimizer = torch.optim.AdamW(replayed.model.parameters(), lr=1e-3, capturable=True)
    for number in range(12):
        for training in (single, replayed):
            training.feed(number)
        assert torch.equal(replayed.step(), single.step()), f"step {number}: {replayed.ring.graphs!r}"
        for mine, right in zip(replayed.state(), single.state(), strict=True):
            assert torch.equal(mine, right), f"step {number}: a parameter or gradient of shape {tuple(mine.shape)}"
    found = replayed.ring.graphs
    record(test="passes become graphs", link=link, bundle=bundle, replayed=found.replayed, found=repr(found))
    if not found.replayed:
        pytest.xfail(f"the numbers are right, but torch's allocator gave no pass its addresses again: {found!r}")
