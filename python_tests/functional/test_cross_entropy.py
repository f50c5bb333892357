"""A rotated vocabulary head with its cross-entropy gives what torch gives from whole logits: see operation_checks.py.

In bfloat16 the logits, their softmax and all sums are float32, since products of bfloat16 numbers are exact there: the
loss is as good as in float32, and a gradient is rounded once, when it is handed over.
"""

import dataclasses
from itertools import product

import pytest
import torch
from grids import RINGS, pairs
from harness import Cases, run_ranks
from operation_checks import (
    EXACT,
    FORMS,
    ROUNDING,
    Operation,
    assert_result,
    check_checkpointing,
    check_controls,
    check_frozen,
    check_pass,
    make_features,
    plain_results,
    rotated_result,
    scale_of,
    token_shape,
    train,
)
from reference import assert_same, chunk, differs, random
from torch import nn
from torch.nn import functional as F

import rtp_ext
from rtp_ext.functional import rotated_linear_cross_entropy
from rtp_ext.parameters.sharding import shard_parameter

TIMEOUT = 30.0
SIZES = [(11, 5), (3, 6), (17, 16)]  # vocabulary, features; the second has fewer rows than ranks
TOLERANCES = {
    torch.float64: (EXACT, EXACT),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (1e-5, ROUNDING),
}
SETTINGS = [
    {"reduction": "mean"},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "mean", "soft_cap": 2.0},
    {"reduction": "none", "z_loss": 0.1},
    {"reduction": "mean", "ignore_index": 2},
    {"reduction": "none", "label_smoothing": 0.3, "soft_cap": 3.0, "z_loss": 0.05, "ignore_index": 1},
]


def make_targets(shape: tuple[int, ...], vocabulary: int, seed: int, ignored: int = -100) -> torch.Tensor:
    """Every third one is ignored, but the first."""
    targets = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))
    if targets.numel() > 1:
        targets.view(-1)[2::3] = ignored
        targets.view(-1)[0] = 0  # not an ignored one
    return targets


def plain_loss(z, targets, reduction="mean", ignore_index=-100, label_smoothing=0.0, soft_cap=None, z_loss=0.0):
    """`z` [..., V]"""
    if soft_cap is not None:
        z = soft_cap * torch.tanh(z / soft_cap)
    flat, kept = targets.reshape(-1), targets.ne(ignore_index)
    losses = F.cross_entropy(
        z.reshape(-1, z.shape[-1]), flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    ).view(targets.shape)
    if z_loss > 0:
        losses = losses + z_loss * torch.logsumexp(z, -1).square() * kept
    if reduction == "mean":
        return losses.sum() / kept.sum()
    return losses.sum() if reduction == "sum" else losses


def make_head(
    size=SIZES[0], settings=None, dtype=torch.float64, bias=True, transposed=False, tokens=None, scale=None
) -> Operation:
    """`tokens`: of every rank, instead of a few."""
    vocabulary, features = size
    settings = settings or {}
    weight = random(vocabulary, features, dtype=dtype, seed=1, scale=scale or features**-0.5)
    parameters = {"weight": weight.t().contiguous() if transposed else weight}
    if bias:
        parameters["bias"] = random(vocabulary, dtype=dtype, seed=2)

    def plain(p, batch):
        z = F.linear(batch[0], p["weight"].t() if transposed else p["weight"], p.get("bias"))
        return plain_loss(z, batch[1], **settings)

    def rotated(p, batch, **options):
        given = {**settings, "transposed": transposed, **options}
        return rotated_linear_cross_entropy(batch[0], p["weight"], batch[1], p.get("bias"), **given)

    def inputs(form, rank, seed):
        ignored = settings.get("ignore_index", -100)
        if tokens is not None:
            x = random(tokens + rank, features, dtype=dtype, seed=seed + rank)
            return [x, make_targets((tokens + rank,), vocabulary, seed + rank, ignored)]
        targets = make_targets(token_shape(form, rank), vocabulary, seed + rank, ignored)
        if form == "strided":
            targets = torch.stack([targets, targets], -1)[..., 0]
        return [make_features(form, rank, features, dtype, seed), targets]

    return Operation(parameters, {"weight": int(transposed), "bias": 0}, plain, rotated, inputs)


def _passes(rank, ranks, transport):
    """Over c10d the shards themselves travel."""
    cases = Cases()
    in_place = transport == "c10d"
    for route in ("ring",) if in_place else ("ring", "direct"):
        with rtp_ext.Ring(transport=transport, route=route, timeout=TIMEOUT) as ring:
            for settings, variant in product(SETTINGS, (False, True)):
                with cases.case(f"{route} {settings} bias={variant}"):
                    operation = make_head(settings=settings, bias=variant, transposed=variant)
                    check_pass(operation, ring, in_place=in_place)
                if route == "direct" or (in_place and settings is not SETTINGS[-1]):
                    continue
                with cases.case(f"{route} {settings} many chunks, bias={variant}"):
                    operation = make_head(settings=settings, bias=variant, transposed=not variant, tokens=530)
                    check_pass(operation, ring, in_place=in_place)
            dtypes = TOLERANCES if route == "ring" else (torch.float64,)
            for size, dtype, form in pairs(SIZES, dtypes, forms=FORMS):
                settings = {"reduction": "none" if form == "3d" else "sum" if "empty" in form else "mean"}
                with cases.case(f"{route} {size} {dtype} {form}"):
                    operation = make_head(size, settings, dtype)
                    check_pass(operation, ring, form, TOLERANCES[dtype], in_place=in_place)
            for dtype in (torch.float32, torch.bfloat16):
                with cases.case(f"{route} {dtype} many chunks"):
                    operation = make_head(SIZES[2], SETTINGS[-1], dtype, tokens=530)
                    check_pass(operation, ring, tolerances=TOLERANCES[dtype], in_place=in_place)
            if in_place:
                with cases.case("c10d out of place"):
                    check_pass(make_head(), ring)
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport"), RINGS)
def test_one_pass(ranks, transport):
    run_ranks(_passes, ranks, transport)


def _controls(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for dtype, tokens in product(TOLERANCES, (None, 530)):
            settings = {"reduction": "none"}
            check_controls(make_head((17, 16), settings, dtype, tokens=tokens), ring, TOLERANCES[dtype])
        for settings in SETTINGS[1:]:  # each setting matters
            operation = make_head(settings=settings)
            actual = check_pass(operation, ring)
            kept = {key: value for key, value in settings.items() if key == "reduction"}
            ignorant = dataclasses.replace(operation, plain=make_head(settings=kept).plain)
            without = plain_results(ignorant, ranks, "2d", 10)[rank]
            assert differs(actual.output, without.output, 1e-3), settings


def test_tolerances_refuse_wrong_results():
    run_ranks(_controls, 2)
    run_ranks(_controls, 4)


def _behaviours(rank, ranks, transport, in_place):
    """Training with evaluations and doubled forwards, frozen parameters, checkpointing, DTensors."""
    cases = Cases()
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        rotation = {"ring": ring, "in_place": in_place}
        for settings in (SETTINGS[0], SETTINGS[-1]):
            operation = make_head(settings=settings)
            with cases.case(f"training {settings}"):
                train(operation, rank, ranks, True, torch.float64, **rotation)
            with cases.case(f"training float32 {settings}"):
                train(make_head(settings=settings, dtype=torch.float32), rank, ranks, False, torch.float32, **rotation)
            check_checkpointing(cases, operation, ring, in_place=in_place)
            check_frozen(cases, operation, ring, in_place=in_place)
            check_frozen(cases, make_head(settings=settings, tokens=530, bias=False), ring, in_place=in_place)
            with cases.case(f"DTensor {settings}"):
                shards = {
                    name: shard_parameter(nn.Parameter(whole.clone()), ring, operation.cuts[name])
                    for name, whole in operation.parameters.items()
                }
                actual = rotated_result(operation, ring, "3d", 10, shards, in_place=in_place)
                actual.gradients = {name: gradient.to_local() for name, gradient in actual.gradients.items()}
                expected = plain_results(operation, ranks, "3d", 10)[rank]
                assert_result(actual, expected, ring, operation.cuts, EXACT, EXACT)
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport", "in_place"), [(1, "shm", False), (3, "shm", False), (4, "c10d", True)])
def test_training_freezing_and_checkpointing(ranks, transport, in_place):
    run_ranks(_behaviours, ranks, transport, in_place)


def _precision(rank, ranks):
    """Float32 parameters: autocast to bfloat16, and a compute and a reduce dtype of their own."""
    cases = Cases()
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for settings, tokens in product((SETTINGS[0], SETTINGS[-1]), (None, 530)):
            rounded = make_head((17, 16), settings, torch.bfloat16, tokens=tokens)
            parameters = {name: whole.float() for name, whole in rounded.parameters.items()}
            expected = plain_results(rounded, ranks, "2d", 10)[rank]

            def autocast(shards, inputs, rounded=rounded, **options):
                with torch.autocast("cpu", torch.bfloat16):
                    y = rounded.rotated(shards, inputs, **options)
                assert y.dtype == torch.float32, "as torch's cross_entropy under autocast"
                return y

            with cases.case(f"autocast {settings} {tokens}"):
                wide = Operation(
                    parameters,
                    rounded.cuts,
                    rounded.plain,
                    autocast,
                    lambda form, r, seed, rounded=rounded: [
                        t.float() if t.is_floating_point() else t for t in rounded.inputs(form, r, seed)
                    ],
                )
                actual = rotated_result(wide, ring, "2d", 10, wide.shards(rank, ranks))
                assert all(gradient.dtype == torch.float32 for gradient in actual.gradients.values())
                assert_result(actual, expected, ring, wide.cuts, 1e-5, ROUNDING)
                for name, whole in expected.gradients.items():  # summed in float32
                    part = chunk(whole, ranks, rank, wide.cuts[name])
                    assert_same(actual.gradients[name], part, 1e-5 * scale_of(whole, part), name)
            for reduce_dtype in (None, torch.bfloat16):
                with cases.case(f"reduce {reduce_dtype} {settings} {tokens}"):
                    mixed = Operation(parameters, rounded.cuts, rounded.plain, rounded.rotated, rounded.inputs)
                    dtypes = {"compute_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
                    actual = rotated_result(mixed, ring, "2d", 10, mixed.shards(rank, ranks), **dtypes)
                    assert all(gradient.dtype == torch.float32 for gradient in actual.gradients.values())
                    # In bfloat16 every rank rounds the product of each of its chunks, and each sum.
                    rounds = 2 * ranks * (5 if tokens else 1) if reduce_dtype else 1
                    assert_result(actual, expected, ring, mixed.cuts, 1e-5, rounds * ROUNDING)
    cases.finish()


@pytest.mark.parametrize("ranks", [2, 3])
def test_autocast_and_mixed_precision(ranks):
    run_ranks(_precision, ranks)


def _errors(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        operation = make_head()
        shards = operation.shards(rank, ranks)
        x, targets = operation.inputs("2d", rank, 0)
        swapped = chunk(operation.parameters["weight"], ranks, 1 - rank)
        few = chunk(random(9, dtype=torch.float64, seed=1), ranks, rank)
        for error, message, wrong in (
            (IndexError, r"lm_head: expected targets in \[0, 11\) or -100, got 11", {"targets": targets.clamp(min=11)}),
            (IndexError, r"lm_head: expected targets in \[0, 11\) or 3, got -100", {"ignore_index": 3}),
            (TypeError, "lm_head: expected integer targets, got torch.float64", {"targets": targets.double()}),
            (TypeError, "lm_head: expected integer targets, got torch.bool", {"targets": targets > 0}),
            (ValueError, r"lm_head: expected targets of shape \((3|4),\), got \(2,\)", {"targets": targets[:2]}),
            (ValueError, r"lm_head: expected an input of 5 features, got shape \(\d, 4\)", {"x": x[:, :4]}),
            (TypeError, "lm_head: expected an input of dtype torch.float64, got torch.float32", {"x": x.float()}),
            (ValueError, "lm_head: weight shards do not belong together.*11, 5", {"weight": swapped}),
            (ValueError, r"lm_head: expected a whole bias of shape \(11,\), got \(9,\)", {"bias": few}),
            (ValueError, "lm_head: expected a reduction of none, mean, sum, got 'max'", {"reduction": "max"}),
            (ValueError, "lm_head: expected label_smoothing in .*got 1.5", {"label_smoothing": 1.5}),
            (ValueError, "lm_head: expected a positive soft_cap or None, got 0", {"soft_cap": 0.0}),
            (ValueError, "lm_head: expected z_loss >= 0, got -1", {"z_loss": -1.0}),
        ):
            arguments = {"x": x, "weight": shards["weight"], "targets": targets, "bias": shards["bias"], **wrong}
            with pytest.raises(error, match=message):
                rotated_linear_cross_entropy(**arguments, ring=ring, name="lm_head")
        check_pass(operation, ring)  # the ring lives on


def test_wrong_arguments():
    run_ranks(_errors, 2)
