"""Rings that send hops ahead, in orders of calls that no training loop has: the same bits as a ring that does not. The
weights of the models change between the actions, so that a stale shard would show."""

import copy
import functools

import pytest
import torch
from grids import few
from harness import on_ranks
from pretended_hosts import pretend_hosts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import rtp_ext

WIDTH, HIDDEN = 6, 9
PLAIN = {"prefetch": False}
LEAN = {"buffers": "lean"}
AHEAD = {"buffers": 1500}
EVERY = [PLAIN, LEAN, AHEAD, {}]


class PlantedError(Exception):
    pass


class Block(nn.Module):
    """A residual around layers that rotate one by one, one of them twice, as a bundle, or as attention. `fault`: where
    the next pass raises: in `forward` or `backward`."""

    def __init__(self, kind: str, how: bool | None = None) -> None:
        super().__init__()
        self.kind, self.how, self.fault = kind, how, ""
        self.norm = nn.LayerNorm(WIDTH)
        if kind == "attention":
            self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        elif kind == "mlp":
            self.inner = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        else:
            self.inner = nn.Linear(WIDTH, WIDTH)

    def products(self, x):
        y = self.norm(x)
        if self.fault == "forward":
            self.fault = ""
            raise PlantedError
        if self.fault == "backward":
            y.register_hook(self.in_backward)
        if self.kind == "attention":
            return x + self.inner(y, y, y, need_weights=False)[0]
        return x + self.inner(torch.tanh(self.inner(y)) if self.kind == "twice" else y)

    def in_backward(self, gradient):
        if self.fault == "backward":
            self.fault = ""
            raise PlantedError

    def forward(self, x):
        if self.how is None or not torch.is_grad_enabled():
            return self.products(x)
        return checkpoint(self.products, x, use_reentrant=self.how)


def make_model():
    torch.manual_seed(0)
    blocks = (Block("mlp"), Block("twice", False), Block("attention"), Block("mlp", True), Block("twice"))
    first, last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, *blocks, last)


class Program:
    """Actions on a model of one ring, and the values that they give. Ranks have other numbers of tokens, at times 0."""

    def __init__(self, rank, ring, dtype, **options):
        self.rank, self.dtype, self.number, self.found = rank, dtype, 0, []
        self.ones = torch.ones(2, 3, WIDTH, dtype=dtype)
        self.take(rtp_ext.fully_rotate(make_model().to(dtype), mesh=ring, **options))

    def take(self, model):
        self.model, trained = model, [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.5)

    def note(self, *tensors):
        self.found += [None if t is None else getattr(t, "_local_tensor", t).detach().clone() for t in tensors]

    def forward(self):
        """Half of the inputs require a gradient, every third is not contiguous."""
        self.number += 1
        generator = torch.Generator().manual_seed(10 * self.number + self.rank)
        x = torch.randn((self.number + self.rank) % 3, 4, WIDTH, generator=generator).to(self.dtype)
        x = x.transpose(0, 1).contiguous().transpose(0, 1) if self.number % 3 == 0 else x
        x.requires_grad_(self.number % 8 < 4)
        y = self.model(x)
        self.note(y)
        return x, y

    def backward(self, x, y, **options):
        torch.tanh(y.float()).square().sum().backward(**options)
        self.note(x.grad)

    def end(self):
        self.note(*(parameter.grad for parameter in self.model.parameters()))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self):
        self.backward(*self.forward())
        self.end()

    def micro_batches(self):
        for _ in range(3):
            self.backward(*self.forward())
        self.end()

    def evaluated_in_between(self):
        given = self.forward()
        with torch.no_grad():
            self.note(self.model.eval()(self.ones))
        self.model.train()
        self.backward(*given)
        self.end()

    def two_forwards(self):
        one, other = self.forward(), self.forward()
        self.backward(*other)
        self.backward(*one)
        self.end()

    def without_backward(self):
        self.forward()

    def optimizer_in_between(self):
        """Reentrant checkpoints do not save their weights, as in plain torch."""
        self.backward(*self.forward())
        given = self.forward()
        self.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            self.backward(*given)
        self.optimizer.zero_grad()

    def failing(self, place):
        self.model[3].fault = place
        with pytest.raises(PlantedError):
            self.backward(*self.forward())
        self.optimizer.zero_grad()

    def frozen_for_a_step(self):
        some = [*self.model.parameters()][::3]
        for wanted in (False, True):
            for parameter in some:
                parameter.requires_grad_(wanted)
            self.take(self.model)
            self.step()

    def copied(self):
        before = self.model
        self.take(copy.deepcopy(before))
        self.step()
        with torch.no_grad():
            self.note(before(self.ones), self.model(self.ones))

    def loaded(self):
        self.forward()
        self.model.load_state_dict({name: 0.8 * value for name, value in self.model.state_dict().items()})
        self.step()

    def under_autocast(self):
        with torch.autocast("cpu", torch.bfloat16):
            given = self.forward()
        self.backward(*given)
        self.end()

    def run(self, action):
        name, _, argument = action.partition(" ")
        getattr(self, name)(*([argument] if argument else []))


ACTIONS = (
    *("step", "step", "micro_batches", "evaluated_in_between", "two_forwards", "without_backward"),
    *("optimizer_in_between", "step", "failing forward", "failing backward", "frozen_for_a_step", "copied", "loaded"),
    *("under_autocast", "step"),
)


def _same(one, other):
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _compare(cases, what, rank, make, rings, dtype=torch.float32, **options):
    """Runs the actions on all rings in turns; `make(**ring)` returns a ring."""
    made = [make(**each) for each in rings]
    programs = [Program(rank, ring, dtype, **options) for ring in made]
    for action in ACTIONS:
        for program in programs:
            program.found.clear()
            program.run(action)
        expected, *others = (program.found for program in programs)
        for ring, found in zip(rings[1:], others, strict=True):
            with cases.case(f"{what} {ring} {action}"):
                assert len(found) == len(expected) > 0 or "failing" in action
                assert all(map(_same, found, expected))
    assert all(ring.prefetched()[1] > 0 for ring in made[1:])
    for ring in made:
        ring.close()


@on_ranks(few([3], [2, 3]))
def test_one_ring(rank, cases):
    ring = functools.partial(rtp_ext.Ring, timeout=60.0, transport="tcp")
    _compare(cases, "float32", rank, ring, few([PLAIN, LEAN, {}], EVERY))
    ring = functools.partial(rtp_ext.Ring, timeout=60.0, transport="shm", travel="int8", slot_cap=200)
    _compare(cases, "int8", rank, ring, few([PLAIN, AHEAD, {}], EVERY), bundle="recompute")


@on_ranks(4)
def test_replicas_and_two_levels(rank, cases):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ring"))
    dims = rtp_ext.RotationDims(ring="ring", replicate="replicas")
    ring = functools.partial(rtp_ext.Ring, mesh, dims=dims, timeout=60.0, travel="int8")
    _compare(cases, "replicas", rank, ring, few([PLAIN, AHEAD, {}], EVERY), dtype=torch.bfloat16)
    pretend_hosts(rank, 2)
    ring = functools.partial(rtp_ext.Ring, timeout=60.0, route="two-level", travel="int8")
    _compare(cases, "two levels", rank, ring, few([PLAIN, LEAN, {}], EVERY))
