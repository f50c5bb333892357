"""Edge cases of a rotated vocabulary head, its memory, and its module."""

import copy
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from harness import Cases, on_ranks, run_ranks
from operation_checks import EXACT, rotated_result, saved_tensors
from operations.bundles import SETTINGS, make_head, make_targets, plain_loss
from reference import TOLERANCE, adamw, assert_same, chunk, differs, full, local, random
from torch import nn
from torch.nn import functional as F

import rtp_ext
from rtp_ext.functional import rotated_linear_cross_entropy
from rtp_ext.nn import RotatedLinearCrossEntropy

TIMEOUT = 30.0


def _corners(rank, ranks):
    cases = Cases()
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        weight = random(11, 5, dtype=torch.float64, seed=1)

        def both(x, targets, w=weight, bias=None, **settings):
            """Losses, and gradients of x and of this rank's weights, of the rotated and of the plain head. All ranks
            have the same batch."""
            results = []
            for rotates in (True, False):
                leaf = x.detach().clone().requires_grad_()
                whole = w.detach().clone().requires_grad_()
                if rotates:
                    shard = chunk(w, ranks, rank).clone().requires_grad_()
                    part = None if bias is None else chunk(bias, ranks, rank).clone()
                    value = rotated_linear_cross_entropy(leaf, shard, targets, part, ring=ring, **settings)
                else:
                    value = plain_loss(F.linear(leaf, whole, bias), targets, **settings)
                value.sum().backward()
                results.append((value.detach(), leaf.grad, shard.grad if rotates else chunk(whole.grad, ranks, rank)))
            return results

        x = random(6, 5, dtype=torch.float64, seed=2)
        targets = make_targets((6,), 11, 3)
        with cases.case("all ignored"):
            ignored = torch.full((6,), -100)
            (mean, gradient, _), (plain, _, _) = both(x, ignored)
            assert mean.isnan() and F.cross_entropy(x @ weight.t(), ignored).isnan() and plain.isnan()
            torch_x = x.clone().requires_grad_()
            F.cross_entropy(torch_x @ weight.t(), ignored).backward()
            assert torch.equal(gradient, torch_x.grad), "the gradient of nothing"
            assert not both(x, ignored, reduction="sum")[0][0].any()
            assert not both(x, ignored, reduction="none", label_smoothing=0.1, z_loss=0.1)[0][1].any()
        with cases.case("no token"):
            (mean, gradient, _), _ = both(x[:0], targets[:0])
            assert mean.isnan() and gradient.shape == (0, 5), "like torch's mean over nothing"
        with cases.case("large logits"):
            # Whole numbers, so that logits are exact, of 1e4 and more; ties at the maximum in different shards.
            for dtype, scale in ((torch.float32, 1.0), (torch.float64, 1e300)):
                steep = torch.arange(11 * 5, dtype=dtype).view(11, 5).sub(27).round() * 100
                steep[10] = steep[0]
                even = torch.tensor([[9, -7, 2, 1, 4], [-9, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]], dtype=dtype)
                (value, gradient, weights), (plain, plain_gradient, plain_weights) = both(
                    even * scale, torch.tensor([10, 0, 3, 5]), steep
                )
                assert torch.isfinite(value) and value > 1e4 and torch.isfinite(gradient).all()
                assert_same(value, plain, TOLERANCE[dtype], "loss")
                assert_same(gradient, plain_gradient, TOLERANCE[dtype], "input gradient")
                assert_same(weights, plain_weights, TOLERANCE[dtype], "weight gradient")
                near = torch.zeros(11, 5, dtype=dtype)  # logits that differ in their last digits
                near[:, 4] = torch.arange(11, dtype=dtype) / 64 + 200
                (value, _, weights), (plain, _, plain_weights) = both(
                    even.new_full((1, 5), 64), torch.tensor([4]), near
                )
                assert_same(value, plain, TOLERANCE[dtype], "loss of near ones")
                assert_same(weights, plain_weights, TOLERANCE[dtype], "weight gradient of near ones")
        with cases.case("a masked vocabulary"):
            # A bias of -inf: on whole shards, on the first row of one, on all rows but one.
            for masked in (slice(9, 11), slice(0, 1), slice(0, 10), slice(3, 9)):
                bias = torch.zeros(11, dtype=torch.float64)
                bias[masked] = float("-inf")
                allowed = torch.tensor([i for i in range(11) if bias[i] == 0])
                some = allowed[torch.arange(6) % len(allowed)]
                for settings in ({}, {"z_loss": 0.1, "reduction": "sum"}, {"soft_cap": 3.0}):
                    (value, gradient, _), (plain, plain_gradient, _) = both(x, some, bias=bias, **settings)
                    assert_same(value, plain, EXACT, "loss")
                    assert_same(gradient, plain_gradient, EXACT, "input gradient")
            (value, _, _), (plain, _, _) = both(x, torch.full((6,), 4), bias=bias)
            assert value.isinf() and plain.isinf(), "a masked target"
        with cases.case("kinds of targets"):
            for dtype in (torch.int32, torch.uint8):
                (value, _, _), (plain, _, _) = both(x, torch.arange(6), reduction="none")
                part = rotated_linear_cross_entropy(x, chunk(weight, ranks, rank), torch.arange(6).to(dtype), ring=ring)
                assert_same(part, plain.mean(), EXACT, "loss")
            assert value.shape == (6,)
        with cases.case("half precision"):
            half = random(11, 5, dtype=torch.bfloat16, seed=1)
            (value, gradient, _), (plain, _, _) = both(x.bfloat16(), targets, half, reduction="none")
            assert value.dtype == torch.float32 and gradient.dtype == torch.bfloat16
            exact = plain_loss(x.bfloat16().double() @ half.double().t(), targets, reduction="none")
            assert_same(value, exact, 1e-5, "losses from float32 logits")
            assert differs(plain, exact, 1e-5), "control: logits in bfloat16"
    cases.finish()


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_corners(ranks):
    run_ranks(_corners, ranks)


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024


def _peak_bytes(run) -> int:
    """The most by which `run()` raises this process' resident memory; slots in shared memory are part of it."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


@on_ranks(4)
def test_logits_never_exist_as_a_whole(rank, ranks):
    vocabulary, tokens, features = 128 * 1024, 1024, 16
    x = random(tokens, features, dtype=torch.float32, seed=rank)
    weight = random(vocabulary, features, dtype=torch.float32, seed=100, scale=0.25)
    targets = make_targets((tokens,), vocabulary, rank)
    shard = chunk(weight, ranks, rank).clone().requires_grad_()
    leaf = x.clone().requires_grad_()
    losses = []

    def rotated():
        losses.append(rotated_linear_cross_entropy(leaf, shard, targets, ring=ring, reduction="none"))
        losses[0].sum().backward()

    def plain(count):
        part = x[:count].clone().requires_grad_()
        values = F.cross_entropy(part @ weight.t(), targets[:count], reduction="none")
        values.sum().backward()
        assert_same(losses[0][:count], values, 1e-5, "losses")
        assert_same(leaf.grad[:count], part.grad, 1e-5, "input gradients")

    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        rotated_linear_cross_entropy(x[:1], torch.ones(ranks * 2, features)[:2], targets[:1].mul(0), ring=ring)
        peak = _peak_bytes(rotated)
        slots = sum(ring.slot_count(channel).bytes for channel in ("weight", "gradient"))
        assert ring.transport == "shm" and 3 * shard.nbytes < slots < peak, "slots are counted"
    whole = vocabulary * tokens * 4
    assert peak < whole / ranks, f"{peak / 2**20:.0f} MiB of {whole / 2**20:.0f} MiB of logits"
    assert shard.grad.isfinite().all() and shard.grad.any()
    if rank == 0:  # control: a plain head needs more for a quarter of the tokens
        assert _peak_bytes(lambda: plain(tokens // 4)) > whole / ranks


@on_ranks(3)
def test_nothing_is_saved_but_inputs(rank, ranks, ring):
    operation = make_head((64, 5), tokens=600)
    shards, inputs = operation.shards(rank, ranks), operation.inputs("2d", rank, 0)
    inputs[0].requires_grad_()
    saved = saved_tensors(lambda: operation.rotated(shards, inputs, ring=ring))
    assert max(tensor.numel() for tensor in saved) == inputs[0].numel(), [tuple(t.shape) for t in saved]
    before = ring.hops("weight"), ring.hops("gradient")
    rotated_result(operation, ring, "2d", 0, shards)
    assert ring.hops("weight") - before[0] == 2 * (ranks - 1)
    assert ring.hops("gradient") - before[1] == ranks - 1


@on_ranks(3)
def test_module(rank, ranks, ring):
    """The module is torch's head and loss in one, and trains as they do."""
    for bias, settings in product((False, True), SETTINGS):
        options = {key: value for key, value in settings.items() if key in ("soft_cap", "z_loss")}
        loss = nn.CrossEntropyLoss(**{key: value for key, value in settings.items() if key not in options})
        plain = nn.Linear(5, 11, bias, dtype=torch.float64)
        with torch.no_grad():
            for seed, parameter in enumerate(plain.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=seed))
        module = RotatedLinearCrossEntropy.from_module(plain, ring, loss, **options)
        assert isinstance(module, nn.Linear) and list(module.state_dict()) == list(plain.state_dict())
        assert all(f"{key}={value}" in repr(module) for key, value in settings.items())
        expected = copy.deepcopy(plain)
        optimizers = adamw(module.parameters()), adamw(expected.parameters())
        for step in range(2):
            batches = [make_head(settings=settings).inputs("3d", other, step) for other in range(ranks)]
            values = [plain_loss(expected(x), targets, **settings) for x, targets in batches]
            value = module(*batches[rank])
            assert_same(value, values[rank], EXACT, "loss")
            for optimizer in optimizers:
                optimizer.zero_grad()
            value.sum().backward()
            (sum(v.sum() for v in values) / ranks).backward()
            for optimizer in optimizers:
                optimizer.step()
        for name, parameter in expected.named_parameters():
            assert_same(full(module.get_parameter(name)), parameter, 1e-9, name)
            assert differs(full(module.get_parameter(name)), plain.get_parameter(name), 1e-3), "control: untrained"

    torch.manual_seed(0)
    fresh = RotatedLinearCrossEntropy(5, 11, ring=ring, reduction="sum", dtype=torch.float64)
    torch.manual_seed(0)
    assert_same(full(fresh.weight), nn.Linear(5, 11, False, dtype=torch.float64).weight, 0.0, "initial values")
    assert fresh.bias is None and (fresh.in_features, fresh.out_features) == (5, 11)
    assert local(fresh.weight).shape == chunk(torch.empty(11, 5), ranks, rank).shape
    assert RotatedLinearCrossEntropy(5, 11, True, "meta", ring=ring).bias.is_meta
    assert copy.deepcopy(fresh).reduction == "sum"
    head, at = nn.Linear(5, 11), RotatedLinearCrossEntropy.from_module
    for error, message, call in (
        (
            ValueError,
            "without class weights, got one with 11",
            lambda: at(head, ring, nn.CrossEntropyLoss(torch.ones(11))),
        ),
        (
            ValueError,
            "expected reduction from the loss or",
            lambda: at(head, ring, nn.CrossEntropyLoss(), reduction="sum"),
        ),
        (TypeError, "expected a CrossEntropyLoss, got a NLLLoss", lambda: at(head, ring, nn.NLLLoss())),
        (TypeError, "expected a Linear, got a Conv1d", lambda: at(nn.Conv1d(1, 1, 1), ring)),
        (ValueError, "RotatedLinearCrossEntropy: expected a reduction", lambda: at(head, ring, reduction="max")),
    ):
        with pytest.raises(error, match=message):
            call()
