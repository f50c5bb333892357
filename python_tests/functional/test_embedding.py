"""Rotated embeddings give what nn.Embedding gives in one process: see reference.py for what is compared and how."""

import functools
from itertools import product

import pytest
import torch
from grids import RINGS, pairs
from harness import Cases, run_ranks
from reference import (
    STEPS,
    TOLERANCE,
    adamw,
    assert_same,
    chunk,
    differs,
    double_copy,
    full,
    local,
    random,
    reference_pass,
    trained_tolerance,
)
from torch import nn

import rtp_ext
from rtp_ext.functional import rotated_embedding
from rtp_ext.nn import RotatedEmbedding

TIMEOUT = 30.0
SIZES = [(5, 7), (1, 6), (50, 3)]  # vocabulary, features; both with fewer rows than ranks somewhere
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
FORMS = ["2d", "1d", "int32", "strided", "scalar", "empty", "empty on rank 0", "one row"]


def make_embedding(size: tuple[int, int], dtype: torch.dtype, padding_idx: int | None = None) -> nn.Embedding:
    module = nn.Embedding(*size, dtype=dtype, padding_idx=padding_idx)
    with torch.no_grad():
        module.weight.copy_(random(*size, dtype=dtype, seed=1))
    return module


def make_ids(form: str, vocabulary: int, rank: int, seed: int = 10) -> torch.Tensor:
    """The local ids of a rank; the ranks have different numbers of them."""
    generator = torch.Generator().manual_seed(seed + rank)
    ids = torch.randint(vocabulary, (2, 4 + rank), generator=generator)
    if form == "1d":
        return ids[0]
    if form == "int32":
        return ids.int()
    if form == "strided":
        return ids.t()
    if form == "scalar":
        return ids[0, 0]
    if form == "empty" or (form == "empty on rank 0" and rank == 0):
        return ids[:, :0]
    if form == "one row":  # all tokens meet the same row: the sum of many contributions
        return torch.full_like(ids, vocabulary - 1)
    return ids


def loss(y: torch.Tensor, rank: int, seed: int = 30) -> torch.Tensor:
    return (y * random(*y.shape, dtype=torch.bfloat16, seed=seed + rank).to(y.dtype)).sum()


def gradient_tolerance(dtype: torch.dtype, whole: torch.Tensor, part: torch.Tensor) -> float:
    """Of a shard whose largest value is smaller than that of the whole gradient."""
    if part.numel() == 0 or not part.any():
        return 0.0
    return TOLERANCE[dtype] * (whole.abs().max() / part.abs().max()).item()


@functools.cache
def reference(form: str, size: tuple[int, int], dtype: torch.dtype, padding: int | None, ranks: int):
    """ids and outputs of all ranks, and the plain module with its averaged gradient."""
    module = double_copy(make_embedding(size, dtype, padding))
    ids = [make_ids(form, size[0], rank) for rank in range(ranks)]
    outputs, _ = reference_pass(module, ids, loss)
    return ids, outputs, module


def check_pass(module: RotatedEmbedding, form: str, padding: int | None, dim: int) -> None:
    ring, dtype, size = module.ring, module.weight.dtype, (module.num_embeddings, module.embedding_dim)
    ids, outputs, expected = reference(form, size, dtype, padding, ring.size)
    module.zero_grad()
    y = module(ids[ring.rank])
    loss(y, ring.rank).backward()

    assert y.dtype == dtype, f"output dtype: expected {dtype}, got {y.dtype}"
    assert_same(y, outputs[ring.rank], 0.0, "output")  # rows are copied, never summed
    right = chunk(expected.weight.grad, ring.size, ring.rank, dim)
    tolerance = gradient_tolerance(dtype, expected.weight.grad, right)
    assert_same(local(module.weight.grad), right, tolerance, "weight gradient")
    assert_same(local(module.weight), chunk(expected.weight, ring.size, ring.rank, dim), 0.0, "weight at home")


def _passes(rank, ranks, transport):
    cases = Cases()
    for route in ("ring", "direct"):
        with rtp_ext.Ring(transport=transport, route=route, timeout=TIMEOUT) as ring:
            for shard_dim, case in product((0, 1), pairs(SIZES, DTYPES, (None, 0, -1), (False, True), forms=FORMS)):
                size, dtype, padding, in_place, form = case
                plain = make_embedding(size, dtype, padding)
                module = RotatedEmbedding.from_module(plain, ring, shard_dim=shard_dim, in_place=in_place)
                with cases.case(f"{route} shard_dim={shard_dim} {case}"):
                    check_pass(module, form, padding, shard_dim)
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport"), RINGS)
def test_one_pass(ranks, transport):
    run_ranks(_passes, ranks, transport)


def _controls(rank, ranks):
    """The comparisons fail where one rank's contribution is missing, gradients are summed, or padding is ignored."""
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for dtype, shard_dim in product(DTYPES, (0, 1)):
            plain = make_embedding((16, 17), dtype, padding_idx=3)
            expected, lacking = double_copy(plain), double_copy(plain)
            unpadded = nn.Embedding.from_pretrained(expected.weight.detach().clone(), freeze=False)
            ids = [torch.arange(16).repeat(2) for _ in range(ranks)]
            outputs, _ = reference_pass(expected, ids, loss)
            reference_pass(lacking, ids, lambda y, other: loss(y, other) * (other != (rank + 1) % ranks))
            reference_pass(unpadded, ids, loss)
            module = RotatedEmbedding.from_module(plain, ring, shard_dim=shard_dim)
            y = module(ids[rank])
            loss(y, rank).backward()
            right, wrong, ignored = (
                chunk(reference.weight.grad, ranks, rank, shard_dim) for reference in (expected, lacking, unpadded)
            )
            actual = local(module.weight.grad)
            tolerance = gradient_tolerance(dtype, expected.weight.grad, right)
            assert not differs(actual, right, tolerance)
            assert differs(actual, right * ranks, tolerance)
            assert differs(actual, wrong, tolerance)
            holds_padding = shard_dim == 1 or rank == 3 // (16 // ranks)
            assert differs(actual, ignored, tolerance) == holds_padding
            outputs[rank][5] = outputs[rank][6]
            assert differs(y, outputs[rank], 0.0)


def test_tolerances_fail_on_wrong_results():
    run_ranks(_controls, 2)


def _training(rank, ranks, transport):
    cases = Cases()
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        for shard_dim, (size, dtype, in_place) in product((0, 1), pairs(SIZES, DTYPES, (False, True))):
            plain = make_embedding(size, dtype)
            expected = double_copy(plain)
            module = RotatedEmbedding.from_module(plain, ring, shard_dim=shard_dim, in_place=in_place)
            optimizers = adamw(expected.parameters()), adamw(module.parameters())
            for step in range(STEPS):
                ids = [make_ids("2d", size[0], other, 100 * step) for other in range(ranks)]
                for optimizer in optimizers:
                    optimizer.zero_grad()
                reference_pass(expected, ids, lambda y, other, step=step: loss(y, other, 100 * step))
                loss(module(ids[rank]), rank, 100 * step).backward()
                for optimizer in optimizers:
                    optimizer.step()
            whole = full(module.weight)
            with cases.case(f"{size} {dtype} shard_dim={shard_dim} in_place={in_place}"):
                tolerance = trained_tolerance(dtype, expected.weight.abs().max().item())
                assert_same(whole, expected.weight, tolerance, "weight")
                assert differs(whole, plain.weight, tolerance), "control: untrained parameters pass"
    cases.finish()


@pytest.mark.parametrize(("ranks", "transport"), [(1, "shm"), (2, "c10d"), (3, "shm"), (4, "c10d")])
def test_parameters_after_adamw_steps(ranks, transport):
    run_ranks(_training, ranks, transport)


def _hops(rank, ranks):
    """Backward sends no weights; a frozen table sends nothing back; ids out of range move nothing."""
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        module = RotatedEmbedding.from_module(make_embedding((16, 17), torch.float32), ring)
        y = module(make_ids("2d", 16, rank))
        assert (ring.hops("weight"), ring.hops("gradient")) == (ranks - 1, 0)
        loss(y, rank).backward()
        assert (ring.hops("weight"), ring.hops("gradient")) == (ranks - 1, ranks - 1)
        module.weight.requires_grad_(False)
        assert not module(make_ids("2d", 16, rank)).requires_grad
        for bad in (torch.tensor([0, 16]), torch.tensor([-1, 3])):
            with pytest.raises(IndexError, match=r"16.*(-1|16)"):
                module(bad)
        for bad in (torch.tensor([0.5]), torch.tensor([True])):
            with pytest.raises(TypeError, match="int64"):
                module(bad)
        y = module(make_ids("2d", 16, rank))
        assert_same(y, nn.functional.embedding(make_ids("2d", 16, rank), full(module.weight)), 0.0, "after errors")


def test_what_travels_and_what_is_refused():
    run_ranks(_hops, 3)


@pytest.mark.parametrize("shard_dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_emulated_ring_is_a_table_of_repeated_shards(ranks, shard_dim):
    weight = random(4, 6, dtype=torch.float64, seed=1).requires_grad_()
    plain = weight.detach().clone().requires_grad_()
    ids = torch.randint(4 * (ranks if shard_dim == 0 else 1), (3, 5), generator=torch.Generator().manual_seed(0))
    y = rotated_embedding(ids, weight, ring=rtp_ext.Ring.emulated(ranks), shard_dim=shard_dim)
    expected = nn.functional.embedding(ids, plain.repeat(*((ranks, 1) if shard_dim == 0 else (1, ranks))))
    loss(y, 0).backward()
    loss(expected, 0).backward()
    assert_same(y, expected, 0.0, "output")
    assert_same(weight.grad, plain.grad / ranks, 1e-12, "weight gradient")
    if ranks > 1:
        assert differs(weight.grad, plain.grad, 1e-12)


def _construct(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for shard_dim in (0, 1):
            module = RotatedEmbedding(10, 7, padding_idx=2, ring=ring, shard_dim=shard_dim)
            assert isinstance(module, nn.Embedding)
            assert (module.num_embeddings, module.embedding_dim, module.padding_idx) == (10, 7, 2)
            assert list(module.state_dict()) == ["weight"] and module.weight.shape == (10, 7)
            assert local(module.weight).shape == chunk(torch.empty(10, 7), ranks, rank, shard_dim).shape
            whole = full(module.weight)
            assert not whole[2].any() and whole.unique().numel() == 9 * 7 + 1
        assert RotatedEmbedding(10, 7, ring=ring, device="meta").weight.is_meta
        return whole.tolist()


def test_constructor_is_that_of_nn_embedding():
    values = run_ranks(_construct, 3)
    assert values[0] == values[1] == values[2]
