"""nn.RotatedMoE against a mixture layer in plain torch: routing token by token, as GShard's algorithm 1 is written."""

import copy
import math
from itertools import product

import pytest
import torch
from harness import on_ranks
from reference import adamw, assert_same, differs, full, local, random
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.functional.dispatch import within_capacity
from rtp_ext.nn import RotatedExperts, RotatedLinear, RotatedMoE

TIMEOUT = 30.0
HIDDEN, INNER, EXPERTS = 6, 4, 5
WEIGHT = 0.3  # of the balance loss, large enough to matter


class PlainMoE(nn.Module):
    """Has the same parameters under the same names. Wrong options are for controls."""

    def __init__(self, top_k=2, capacity_factor=None, gated=True, bias=False, renormalise=True, order="choices"):
        super().__init__()
        self.top_k, self.capacity_factor, self.gated = top_k, capacity_factor, gated
        self.renormalise, self.order = renormalise, order
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.Module()
        rows, name = (2 * INNER, "gate_up_proj") if gated else (INNER, "up_proj")
        self.experts.register_parameter(name, nn.Parameter(torch.empty(EXPERTS, rows, HIDDEN)))
        if bias:
            self.experts.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(EXPERTS, rows)))
        self.experts.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))
        if bias:
            self.experts.down_proj_bias = nn.Parameter(torch.empty(EXPERTS, HIDDEN))
        self.dropped = 0

    def expert(self, number, x):
        name = "gate_up_proj" if self.gated else "up_proj"
        up, down = getattr(self.experts, name)[number], self.experts.down_proj[number]
        biases = getattr(self.experts, f"{name}_bias", None), getattr(self.experts, "down_proj_bias", None)
        up_bias, down_bias = (None if bias is None else bias[number] for bias in biases)
        values = F.linear(x, up, up_bias)
        if self.gated:
            gate, values = values.chunk(2, -1)
            values = F.silu(gate) * values
        else:
            values = F.gelu(values)
        return F.linear(values, down, down_bias)

    def forward(self, x):
        tokens = x.reshape(-1, HIDDEN)
        count = len(tokens)
        p = self.gate(tokens).softmax(-1)
        best = p.argsort(-1, descending=True)[:, : self.top_k]
        room = dict.fromkeys(range(EXPERTS), math.inf)
        if self.capacity_factor is not None:
            room = dict.fromkeys(room, math.ceil(self.top_k * count * self.capacity_factor / EXPERTS))
        pairs = list(product(range(self.top_k), range(count)))
        if self.order == "tokens":
            pairs.sort(key=lambda pair: pair[1])
        y = [torch.zeros_like(token) for token in tokens]
        self.dropped = 0
        for choice, token in pairs:
            number = int(best[token, choice])
            if room[number] <= 0:
                self.dropped += 1
                continue
            room[number] -= 1
            weight = p[token, number]
            if self.top_k > 1 and self.renormalise:
                weight = weight / p[token, best[token]].sum()
            y[token] = y[token] + weight * self.expert(number, tokens[token])
        shares = torch.stack([(best[:, 0] == number).double().sum() for number in range(EXPERTS)]) / count
        self.aux_loss = EXPERTS * (shares * p.mean(0)).sum()
        return torch.stack(y).view(x.shape)


def make(ring, top_k=2, capacity_factor=None, gated=True, bias=False, **options):
    """A rotated layer whose experts differ, and the plain one with the same parameters, in float64."""
    options = {"activation": "swiglu" if gated else "gelu", "bias": bias, "dtype": torch.float64, **options}
    module = RotatedMoE(HIDDEN, INNER, EXPERTS, top_k, capacity_factor, ring=ring, **options)
    plain = PlainMoE(top_k, capacity_factor, gated, bias).double()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(plain.named_parameters()):
            parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=seed + 1, scale=0.7))
            mine = module.get_parameter(name)
            assert tuple(mine.shape) == tuple(parameter.shape)
            rows = -(-len(parameter) // ring.size)
            local(mine).copy_(parameter[ring.rank * rows : (ring.rank + 1) * rows])
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in plain.named_parameters()]
    return module, plain


def make_input(rank, step=0):
    return random(2, 5 + rank, HIDDEN, dtype=torch.float64, seed=100 * step + rank)


def objective(layer, y):
    return (y * random(*y.shape, dtype=torch.float64, seed=7)).sum() + WEIGHT * layer.aux_loss


def plain_pass(plain, ranks, step=0):
    """Outputs, balance losses and input gradients of every rank; parameters get gradients averaged over the ranks."""
    inputs = [make_input(rank, step).requires_grad_() for rank in range(ranks)]
    outputs, losses, total = [], [], 0
    for x in inputs:
        outputs.append(plain(x))
        losses.append(plain.aux_loss.detach())
        total = total + objective(plain, outputs[-1]) / ranks
    total.backward()
    return outputs, losses, [x.grad * ranks for x in inputs]


KINDS = (
    {},
    {"capacity_factor": 0.6},
    {"top_k": 1},
    {"top_k": 1, "capacity_factor": 0.5, "gated": False, "bias": True},
    {"top_k": 3, "capacity_factor": 0.9, "bias": True},
    {"top_k": EXPERTS, "gated": False},
)


@on_ranks([1, 2, 3])
def test_trains_as_the_plain_layer_does(rank, ranks, ring, cases):
    """Outputs, gradients of everything, and parameters after steps of AdamW, with the balance loss."""
    for kind, options in product(KINDS, ({}, {"recompute": True})):
        if options and kind not in KINDS[1:3]:
            continue
        ring.in_place = bool(options)
        with cases.case(f"{kind} {options}"):
            module, plain = make(ring, **kind, **options)
            optimizers = adamw(module.parameters(), 0.01), adamw(plain.parameters(), 0.01)
            start = copy.deepcopy(plain)
            for step in range(5 if kind in KINDS[:2] else 2):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                outputs, losses, gradients = plain_pass(plain, ranks, step)
                assert (plain.dropped > 0) == ("capacity_factor" in kind), "control: a capacity that drops"
                x = make_input(rank, step).requires_grad_()
                y = module(x)
                assert_same(y, outputs[rank], 1e-10, "output")
                assert_same(module.aux_loss, losses[rank], 1e-12, "balance loss")
                objective(module, y).backward()
                assert_same(x.grad, gradients[rank], 1e-10, "input gradient")
                for name, parameter in plain.named_parameters():
                    assert_same(full(module.get_parameter(name).grad), parameter.grad, 1e-10, f"{name} gradient")
                for optimizer in optimizers:
                    optimizer.step()
            for name, parameter in plain.named_parameters():
                assert_same(full(module.get_parameter(name)), parameter, 1e-8, f"{name} after training")
                assert differs(start.get_parameter(name), parameter, 1e-3), f"control: {name} is untrained"


def _router(rank, ranks):
    """The sources of the router's gradient: experts that differ, and, separately, the balance loss."""
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        module, _ = make(ring)
        module(make_input(rank)).square().sum().backward()
        assert full(module.gate.weight.grad).abs().max() > 1e-2
        module.zero_grad()
        with torch.no_grad():
            for parameter in module.experts.parameters():
                local(parameter).copy_(full(parameter)[:1].expand(local(parameter).shape))
        module(make_input(rank)).square().sum().backward()
        assert full(module.gate.weight.grad).abs().max() < 1e-12, "control: equal experts leave nothing to choose"
        module.zero_grad()
        module(make_input(rank))
        module.aux_loss.backward()
        weight = full(module.gate.weight).detach().requires_grad_()
        (sum(_balance(weight, make_input(other)) for other in range(ranks)) / ranks).backward()
        assert_same(full(module.gate.weight.grad), weight.grad, 1e-10, "gradient of the balance loss")
        assert weight.grad.abs().max() > 1e-3 and all(p.grad is None for p in module.experts.parameters())


def _balance(weight, x):
    p = F.linear(x.reshape(-1, HIDDEN), weight).softmax(-1)
    return EXPERTS * (F.one_hot(p.argmax(-1), EXPERTS).double().mean(0) * p.mean(0)).sum()


def _controls(rank, ranks):
    """Outputs of another order of capacity, of weights that are not renormalised, of one token more: none passes."""
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        module, plain = make(ring, capacity_factor=0.4)
        x = make_input(2)  # whose second choices of early tokens meet first choices of later ones
        with torch.no_grad():
            y = module(x)
            assert_same(y, plain(x), 1e-10, "output")
            for name, value in (("order", "tokens"), ("renormalise", False), ("capacity_factor", 0.9), ("top_k", 1)):
                wrong = copy.deepcopy(plain)
                setattr(wrong, name, value)
                assert differs(y, wrong(x), 1e-3), f"control: {name}"


def _behaviours(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        _checkpointing(ring)
        _copies(ring)
        _precision(ring)
        _empty_batches(ring)
        _inside_a_model(ring)
        torch.manual_seed(0)
        fresh = RotatedMoE(HIDDEN, INNER, EXPERTS, ring=ring)
        torch.manual_seed(0)
        gate = RotatedLinear(HIDDEN, EXPERTS, bias=False, ring=ring)
        experts = RotatedExperts(EXPERTS, HIDDEN, INNER, ring=ring)
        for mine, right in zip(fresh.parameters(), (*gate.parameters(), *experts.parameters()), strict=True):
            assert torch.equal(full(mine), full(right))
        assert "top_k=2, capacity_factor=None" in repr(fresh)
        meta = RotatedMoE(HIDDEN, INNER, EXPERTS, 1, ring=ring, device="meta", dtype=torch.bfloat16)
        assert all(p.is_meta and p.dtype == torch.bfloat16 for p in meta.parameters())
        with pytest.raises(ValueError, match=r"top_k and capacity_factor: expected \(2, None\) .*\(2, 2.0\) on rank 1"):
            RotatedMoE(HIDDEN, INNER, EXPERTS, 2, 2.0 if rank == 1 else None, ring=ring)


def _checkpointing(ring):
    """Without reentry the balance loss is right; within it its gradient would be lost, so that reading it raises."""
    module, plain = make(ring, capacity_factor=0.6)
    _, losses, gradients = plain_pass(plain, ring.size)
    x = make_input(ring.rank).requires_grad_()
    y = checkpoint(module, x, use_reentrant=False)
    kept = module.aux_loss
    objective(module, y).backward()
    assert module.aux_loss is kept, "what recomputes it leaves it"
    assert_same(kept, losses[ring.rank], 1e-12, "balance loss")
    assert_same(x.grad, gradients[ring.rank], 1e-10, "checkpointed: input gradient")
    for name, parameter in plain.named_parameters():
        assert_same(full(module.get_parameter(name).grad), parameter.grad, 1e-10, f"checkpointed: {name}")
    y = checkpoint(module, x, use_reentrant=True)
    with pytest.raises(ValueError, match="RotatedMoE: expected the last forward in training mode to record gradients"):
        objective(module, y)
    with torch.no_grad():
        assert_same(module.aux_loss, losses[ring.rank], 1e-12, "balance loss")
    y.sum().backward()
    module.eval()
    with torch.no_grad():
        module(x)
    assert_same(module.aux_loss, losses[ring.rank], 1e-12, "balance loss of an evaluation")


def _copies(ring):
    module, _ = make(ring)
    assert module.aux_loss is None
    x = make_input(ring.rank)
    y = module(x)
    twin = copy.deepcopy(nn.Sequential(module))[0]
    assert twin.aux_loss is None and module.aux_loss.requires_grad
    assert_same(twin(x), y, 0.0, "the copy's output")
    with torch.no_grad():
        local(twin.gate.weight).add_(1.0)
    assert not torch.equal(full(twin.gate.weight), full(module.gate.weight))
    objective(module, y).backward()
    assert twin.gate.weight.grad is None
    with pytest.raises(TypeError, match="RotatedMoE cannot be pickled"):
        module.__reduce_ex__(2)


def _precision(ring):
    """Probabilities and the balance loss are at least float32; the output has the dtype that experts compute in."""
    reference, plain = make(ring)
    x = make_input(ring.rank).bfloat16()
    rounded = copy.deepcopy(plain).bfloat16().double()
    expected = rounded(x.double())
    low = copy.deepcopy(reference).bfloat16()
    for module, autocast in ((low, False), (copy.deepcopy(reference).float(), True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(x.float() if autocast else x)
        assert y.dtype == torch.bfloat16 and module.aux_loss.dtype == torch.float32
        # nine roundings: the logits, and what operations/described.py counts
        assert_same(y, expected, 9 * 2.0**-8, "output")
        assert_same(module.aux_loss, rounded.aux_loss, 4 * 2.0**-8, "balance loss")
        objective(module, y.float()).backward()
        assert all(torch.isfinite(local(p.grad)).all() for p in module.parameters())


def _empty_batches(ring):
    """The last rank has no tokens; its neighbours' gradients come through all the same."""
    for factor in (None, 1.0):
        module, plain = make(ring, capacity_factor=factor)
        x = make_input(ring.rank)
        y = module(x[:0] if ring.rank == ring.size - 1 else x)
        assert y.shape[1:] == x.shape[1:]
        (y.square().sum() + module.aux_loss).backward()
        if ring.rank == ring.size - 1:
            assert module.aux_loss == 0
        total = sum(_squares(plain, make_input(other)) for other in range(ring.size - 1)) / ring.size
        total.backward()
        for name, parameter in plain.named_parameters():
            assert_same(full(module.get_parameter(name).grad), parameter.grad, 1e-10, f"{name}, a rank without tokens")


def _squares(plain, x):
    return plain(x).square().sum() + plain.aux_loss


def _inside_a_model(ring):
    """fully_rotate leaves it unchanged in a model that it converts on the same ring."""
    module, plain = make(ring)
    torch.manual_seed(1)
    first = nn.Linear(HIDDEN, HIDDEN).double()
    model, whole = nn.Sequential(copy.deepcopy(first), module), nn.Sequential(first, plain)
    rtp_ext.fully_rotate(model, mesh=ring)
    assert type(model[1]) is RotatedMoE and isinstance(model[0], RotatedLinear)
    model(make_input(ring.rank)).square().sum().backward()
    (sum(whole(make_input(other)).square().sum() for other in range(ring.size)) / ring.size).backward()
    for name, parameter in whole.named_parameters():
        assert_same(full(model.get_parameter(name).grad), parameter.grad, 1e-10, f"in a model: {name}")


@on_ranks([2, 3])
def test_router_controls_and_behaviour(rank, ranks):
    _router(rank, ranks)
    _controls(rank, ranks)
    _behaviours(rank, ranks)


@on_ranks([2, 3])
def test_experts_in_8_bits(rank, ranks, ring):
    """Results and gradients are those of RotatedExperts with the recipe and of a wide router."""
    for factor in (None, 0.6):
        options = {"dtype": torch.float32, "capacity_factor": factor}
        module, _ = make(ring, recipe="float8_rowwise", **options)
        wide, _ = make(ring, **options)
        twin = copy.deepcopy(module)
        x = make_input(rank).float()
        y = module(x)
        p = twin.gate(x.flatten(0, 1)).softmax(-1)
        weights, index = p.topk(2)
        if factor is not None:
            index, _ = within_capacity(index, EXPERTS, math.ceil(index.numel() * factor / EXPERTS))
        expected = twin.experts(x.flatten(0, 1), index, weights / weights.sum(-1, keepdim=True)).view(x.shape)
        assert torch.equal(y, expected)
        assert differs(y, wide(x), 1e-3), "control: wide experts"
        y.square().sum().backward()
        expected.square().sum().backward()
        for name, parameter in module.named_parameters():
            assert torch.equal(local(parameter.grad), local(twin.get_parameter(name).grad)), name
    assert module.experts.recipe.name == "float8_rowwise" and module.gate.recipe is None


def test_wrong_arguments():
    ring = rtp_ext.Ring.emulated(2)
    for message, arguments, options in (
        ("expected hidden to be a positive integer, got 0", (0, INNER, EXPERTS), {}),
        ("expected inner to be a positive integer, got 4.5", (HIDDEN, 4.5, EXPERTS), {}),
        ("expected experts to be a positive integer, got -1", (HIDDEN, INNER, -1), {}),
        ("expected 1 <= top_k <= 5, the number of experts, got 6", (HIDDEN, INNER, EXPERTS, 6), {}),
        ("expected 1 <= top_k <= 5, the number of experts, got 0", (HIDDEN, INNER, EXPERTS, 0), {}),
        ("expected a positive capacity_factor or None, got 0.0", (HIDDEN, INNER, EXPERTS, 2, 0.0), {}),
        ("expected a positive capacity_factor or None, got nan", (HIDDEN, INNER, EXPERTS, 2, math.nan), {}),
        ("expected a positive capacity_factor or None, got inf", (HIDDEN, INNER, EXPERTS, 2, math.inf), {}),
        ("RotatedExperts: expected an activation of .*, got 'mish'", (HIDDEN, INNER, EXPERTS), {"activation": "mish"}),
        ("recipe: expected one of float8_tensorwise, .*, got 'e4m3'", (HIDDEN, INNER, EXPERTS), {"recipe": "e4m3"}),
    ):
        with pytest.raises(ValueError, match=message):
            RotatedMoE(*arguments, ring=ring, **options)
    module = RotatedMoE(HIDDEN, INNER, EXPERTS, ring=ring)
    for wrong, got in ((torch.ones(HIDDEN, 4), r"\(6, 4\)"), (torch.ones(()), r"\(\)"), ([1.0], "list")):
        with pytest.raises(ValueError, match=rf"RotatedMoE: expected an input of shape \[..., 6\], got {got}"):
            module(wrong)
