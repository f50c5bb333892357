"""The last hop of a gradient may still be under way when the backward continues with earlier layers: this saves time
and never changes a result."""

import copy

import pytest
import torch
from grids import few
from harness import Cases, on_ranks, run_ranks
from models import batch_loss, make_model, mean_loss, train
from reference import assert_same, differs, full
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.options import RingOptions
from rtp_ext.ring.bootstrap import late_passes

TOLERANCE = 1e-9
STEPS = 3
DELAY = {"delay_us": 3000}  # of every hop, at most: unawaited data is read too early


class Uses(nn.Module):
    """One layer that is called twice, one with a weight tied to it, one with a checkpoint, one frozen."""

    def __init__(self):
        super().__init__()
        self.twice, self.tied, self.again, self.frozen = (nn.Linear(7, 7) for _ in range(4))
        self.tied.weight = self.twice.weight
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        x = self.frozen(checkpoint(self.again, self.tied(x), use_reentrant=False))
        weight = self.twice.weight
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return x + whole.sum()  # a use that does not rotate


WAYS = {
    "groups": {"group": 2},
    "halves": {"gradient_halves": True},
    "halves of groups": {"gradient_halves": True, "group": 2},
    "direct": {"gradient_route": "direct"},
    "direct, one slot": {"gradient_route": "direct", "buffers": "lean"},
    "direct, groups": {"gradient_route": "direct", "group": 2},
}


def _ring(late, transport="c10d", **options):
    return rtp_ext.Ring(transport=transport, late_gradients=late, timeout=60.0, transport_options=DELAY, **options)


def _trains(rank, ranks):
    cases, landed = Cases(), {}
    plain = make_model()
    train(plain, lambda step: mean_loss(plain, ranks, step), STEPS)
    for transport, late, route in (("c10d", 0, "ring"), ("c10d", 1, "ring"), ("c10d", 3, "direct"), ("shm", 2, "ring")):
        with _ring(late, transport, route=route) as ring:
            model = rtp_ext.fully_rotate(make_model(), mesh=ring)
            train(model, lambda step, model=model: batch_loss(model, rank, step), STEPS)
            with cases.case(f"{transport}, {late} late, {route}"):
                for name, parameter in plain.named_parameters():
                    assert_same(full(model.get_parameter(name)), parameter, TOLERANCE, name)
                landed[transport, late] = ring.landed_late()
                most = 2 + 2 * late  # as many passes as that, and the one that runs, have two slots each
                peak = ring.slot_count("gradient").peak_slots
                assert (most - 1 if late else 1) <= peak <= most, f"{peak} gradient slots, expected {most}"
    for way, options in WAYS.items():
        with _ring(2, "shm", **options) as ring:
            model = rtp_ext.fully_rotate(make_model(), mesh=ring)
            train(model, lambda step, model=model: batch_loss(model, rank, step), STEPS)
            with cases.case(way):
                assert ring.landed_late() == landed["shm", 2], "as many as whole gradients on the chain"
                for name, parameter in plain.named_parameters():
                    assert_same(full(model.get_parameter(name)), parameter, TOLERANCE, name)
    with rtp_ext.Ring(transport="c10d", timeout=60.0) as ring:
        assert ring.options.late_gradients == 2, "hops of c10d cross a network"
    cuda = torch.device("cuda")
    for options, default in (({}, 1), ({"buffers": "lean"}, 0), ({"graphs": "auto"}, 0), ({"late_gradients": 2}, 2)):
        assert late_passes(RingOptions(**options), cuda, "ce") == default
    assert late_passes(RingOptions(), torch.device("cpu"), "tcp", tensor_parallel=True) == 1
    with pytest.raises(ValueError, match=r"expected late_gradients 0, 1 or None with tensor parallelism, .*, got 2"):
        late_passes(RingOptions(late_gradients=2), cuda, "nccl", tensor_parallel=True)
    cases.finish()
    return landed


@pytest.mark.parametrize("ranks", few([3], [2, 3]))
def test_the_plain_models_results(ranks):
    for landed in run_ranks(_trains, ranks):
        assert landed["c10d", 0] == 0
        assert min(landed["c10d", 1], landed["c10d", 3], landed["shm", 2]) > 0


def _gradients(model, rank, how):
    """Gradients of two batches, by name."""
    torch.manual_seed(rank)
    batches = [torch.randn(5, 7, dtype=torch.float64) for _ in range(2)]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if how == "autograd.grad":
        loss = sum(model(x).square().mean() for x in batches)
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    seen = {}
    handles = []
    if how == "hooks":
        for name, parameter in parameters.items():
            keep = lambda p, name=name: seen.__setitem__(name, p.grad.detach().clone())  # noqa: E731
            handles.append(parameter.register_post_accumulate_grad_hook(keep))
    for x in batches:
        model(x).square().mean().backward()
    for handle in handles:
        handle.remove()
    for name, parameter in parameters.items():
        seen.setdefault(name, parameter.grad)
        parameter.grad = None
    return seen


@on_ranks(2)
def test_every_use_of_a_parameter(rank, ranks, cases):
    torch.manual_seed(0)
    plain = Uses().double()
    expected = {}
    for other in range(ranks):
        for name, gradient in _gradients(copy.deepcopy(plain), other, "backward").items():
            expected[name] = expected.get(name, 0) + gradient / ranks
    with _ring(2) as ring:
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
        for how in ("backward", "autograd.grad", "hooks"):
            with cases.case(how):
                for name, gradient in _gradients(model, rank, how).items():
                    assert_same(full(gradient), expected[name], TOLERANCE, name)
        assert ring.landed_late() > 0

        # a backward that fails after some layers: its hops under way are dropped, and the next backward is right
        x = torch.ones(2, 7, dtype=torch.float64, requires_grad=True)
        x.register_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        model.zero_grad()
        with cases.case("after a failure"):
            for name, gradient in _gradients(model, rank, "backward").items():
                assert_same(full(gradient), expected[name], TOLERANCE, name)

        # control: gradients without a wait are wrong
        ring.land = lambda gradient: None
        found = _gradients(model, rank, "autograd.grad")
        wrong = [name for name, gradient in found.items() if differs(full(gradient), expected[name], TOLERANCE)]
        with cases.case("control"):
            assert any(ring.exchange(bool(wrong)))
        del ring.land


def _fail(_gradient):
    return 1 / 0


def _narrow(rank, ranks):
    """Gradients that are rounded to the dtype of their parameters are read immediately, so they are not deferred."""
    with _ring(1) as ring:
        model = rtp_ext.fully_rotate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16(), mesh=ring)
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        return ring.landed_late()


def test_rounded_gradients_do_not_land_late():
    assert run_ranks(_narrow, 2) == [0, 0]


def test_what_is_not_a_number_of_layers_is_refused():
    for wrong in (-1, True):
        with pytest.raises(ValueError, match="late_gradients >= 0 or None"):
            rtp_ext.Ring(late_gradients=wrong)
