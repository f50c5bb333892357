"""The kernel that follows the hops under layers, their autograd and what is built of them: rings over `ce` in the
simulation, a thread for each rank, against the plain module in one process."""

import copy
import threading

import pytest
import torch
from reference import chunk, local, random
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from test_transport_ce import MODES, TIMEOUT
from torch import nn
from torch.utils.checkpoint import checkpoint

from rtp_ext import Ring, _native
from rtp_ext.nn import RotatedLinear, RotatedMLP, RotatedMoE, RotatedMultiheadAttention

skip_without_headers()

BF16 = torch.bfloat16
WIDTH, TOKENS = 48, 5  # shards of 2 and of 3 ranks are alike, and start at multiples of 16 bytes
EXPERTS, CHOICES, INNER = 6, 2, 8
NEAR = 0.02  # of the largest number, for sums of 48 products at most of bfloat16
FOLLOWED, MAKES_WGRADS = "", "it makes weight gradients between its products"


class Adapted(nn.Module):
    """A layer that is frozen, and one of low rank beside it that is trained."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Chain(nn.Module):
    """Two layers with something between them, of which the first is computed again in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.second(checkpoint(lambda x: self.first(x).relu(), x, use_reentrant=False))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)  # that of keys has no gradient

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


def rotate(module, ring):
    """Its layers in place of torch's."""
    for name, child in module.named_children():
        if name in ("down", "up"):  # an adapter's own
            continue
        made = {nn.Linear: RotatedLinear, nn.MultiheadAttention: RotatedMultiheadAttention}.get(type(child))
        if made is not None:
            setattr(module, name, made.from_module(child, ring))
    return module


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


# name: the plain module, how it rotates, and of the passes of linear layers what is said of each kind
SUBJECTS = {
    "layer": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)), rotate, {"forward": FOLLOWED, "backward": MAKES_WGRADS}),
    "frozen, with an adapter": (Adapted, rotate, {"forward": FOLLOWED, "backward": FOLLOWED}),
    "checkpointed": (Chain, rotate, {"forward": FOLLOWED, "backward": MAKES_WGRADS}),
    "attention": (Attention, rotate, {"forward": FOLLOWED, "backward": MAKES_WGRADS}),
    "mlp": (mlp, lambda module, ring: RotatedMLP.from_module(module, ring), {}),
}


def inputs(ranks, seed):
    return [random(2, TOKENS, WIDTH, dtype=torch.float32, seed=seed + rank).to(BF16) for rank in range(ranks)]


def near(found, expected, what):
    error, scale = (found.float() - expected.float()).abs().max(), expected.float().abs().max()
    assert scale > 0 and error <= NEAR * scale, f"{what}: {error:.4f} of {scale:.4f}"
    assert not (expected.float() * (1 + 2 * NEAR) - found.float()).abs().max() <= NEAR * scale, f"{what}: control"


def plain_of(make, seed):
    module = make()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            value = random(*parameter.shape, dtype=torch.float32, seed=100 * seed + number) * 0.3
            parameter.copy_(value.to(BF16))
    return module


def learn(plain, rank, ranks, xs, dys, look=lambda other: None):
    """Gives the plain module the gradients of all ranks' batches; returns input and output of this rank's. `look` is
    called after each."""
    for other in (*range(rank), *range(rank + 1, ranks), rank):
        mine = xs[other].float().requires_grad_()
        expected = plain(mine)
        expected.backward(dys[other].float())
        look(other)
    return mine, expected


def check(name, rank, ranks, ring, seed):
    make, rotated, said = SUBJECTS[name]
    plain = plain_of(make, seed)
    module = rotated(copy.deepcopy(plain).to(BF16), ring)
    xs, dys = inputs(ranks, 1000 + seed), inputs(ranks, 2000 + seed)
    ring._executor.set_follows(True)  # forgets what was said
    x = xs[rank].clone().requires_grad_()
    y = module(x)
    y.backward(dys[rank])
    mine, expected = learn(plain, rank, ranks, xs, dys)
    what = f"{name}, rank {rank} of {ranks}"
    near(y.detach(), expected.detach(), f"{what}: y")
    near(x.grad, mine.grad, f"{what}: dx")
    for (key, parameter), whole in zip(module.named_parameters(), plain.parameters(), strict=True):
        if parameter.grad is not None and not (name.startswith("frozen") and key.startswith(("down", "up"))):
            dim = 1 if key == "down_proj.weight" else 0
            near(local(parameter.grad), chunk(whole.grad / ranks, ranks, rank, dim), f"{what}: {key}")
    told = ring.persistent_gemms()
    for kind, reason in said.items():
        assert {why for each, why in told.items() if each.endswith(kind)} == {reason}, (what, told)


class Mixture(nn.Module):
    """RotatedMoE in plain torch, with the same parameters: every expert takes every token, and most do not count."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.experts.down_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.gap = 0.0

    def forward(self, x):
        logits = self.gate(x)
        ordered = logits.detach().sort(-1, descending=True).values
        self.gap = (ordered[..., CHOICES - 1] - ordered[..., CHOICES]).min().item()
        chosen = logits >= ordered[..., CHOICES - 1 : CHOICES]
        weights = logits.masked_fill(~chosen, float("-inf")).softmax(-1)
        gate, values = torch.einsum("btd,eod->beto", x, self.experts.gate_up_proj).chunk(2, -1)
        made = torch.einsum("beti,edi->betd", nn.functional.silu(gate) * values, self.experts.down_proj)
        return torch.einsum("bte,betd->btd", weights, made)


def experts(rank, ranks, ring):
    """The router of a mixture is a layer that is followed; the experts go as ever."""
    plain, moe = plain_of(Mixture, 4), RotatedMoE(WIDTH, INNER, EXPERTS, CHOICES, ring=ring, dtype=BF16)
    with torch.no_grad():
        for mine, whole in zip(moe.parameters(), plain.parameters(), strict=True):
            local(mine).copy_(chunk(whole, ranks, rank))
    ring._executor.set_follows(True)
    xs, dys = inputs(ranks, 80), inputs(ranks, 60)
    x = xs[rank].clone().requires_grad_()
    y = moe(x)
    y.backward(dys[rank])

    def choices_are_clear(other):
        assert plain.gap > 0.05, f"of rank {other}: rounding may choose another expert"

    mine, expected = learn(plain, rank, ranks, xs, dys, choices_are_clear)
    what = f"experts, rank {rank} of {ranks}"
    near(y.detach(), expected.detach(), f"{what}: y")
    near(x.grad, mine.grad, f"{what}: dx")
    for (key, parameter), whole in zip(moe.named_parameters(), plain.parameters(), strict=True):
        near(local(parameter.grad), chunk(whole.grad / ranks, ranks, rank), f"{what}: {key}")
    assert set(ring.persistent_gemms().values()) == {FOLLOWED, MAKES_WGRADS}, ring.persistent_gemms()


def split(rank, ranks, ring):
    """The two parts of a backward in a pipeline without bubbles: that of the input is followed."""
    plain = plain_of(lambda: nn.Linear(WIDTH, WIDTH), 9)
    layer = RotatedLinear.from_module(copy.deepcopy(plain).to(BF16), ring)
    xs = inputs(ranks, 30)
    ring._executor.set_follows(True)
    x = xs[rank].clone().requires_grad_()
    y = layer(x)
    (dx,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
    assert ring.persistent_gemms() == {each: FOLLOWED for each in ring.persistent_gemms()} and ring.persistent_gemms()
    gradients = torch.autograd.grad(y.sum(), list(layer.parameters()))
    near(dx, plain.weight.detach().sum(0).expand(dx.shape), "the input's part")
    weight = sum(each.float().sum((0, 1)) for each in xs) / ranks
    near(local(gradients[0]), chunk(weight.expand(WIDTH, WIDTH), ranks, rank), "the weight's part")


def work(rank, sim, ranks, id_, mode, here):
    here.transport = sim.ce(id_, rank, ranks, TIMEOUT, None)
    sim.set_ce_modes(here.transport, *MODES[mode])
    ring = Ring.emulated(ranks, rank=rank)  # one that asks no other rank for anything but hops
    with one_of_ranks(sim, rank, ring._executor):
        for seed, name in enumerate(SUBJECTS):
            check(name, rank, ranks, ring, seed)
        experts(rank, ranks, ring)
        split(rank, ranks, ring)
        ring.close()


@pytest.mark.parametrize(("ranks", "mode"), [(2, "push"), (3, "pull")])
def test_layers(sim, monkeypatch, ranks, mode):
    here = threading.local()
    monkeypatch.setattr(_native, "emulated_transport", lambda *_: here.transport)
    values(run_threads(work, ranks, sim, ranks, sim.unique_id(), mode, here, timeout=200.0))
