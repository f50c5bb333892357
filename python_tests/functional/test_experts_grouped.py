"""Experts whose products go to torch's grouped product give the same bits as the loop over experts: numbers are small
integers, so that sums in float32 are exact and each is rounded once. On CPUs the grouped product is torch's loop."""

from collections import Counter

import torch
from harness import on_ranks
from reference import chunk
from torch.utils._python_dispatch import TorchDispatchMode

import rtp_ext
from rtp_ext._native import kernels
from rtp_ext.functional import rotated_experts

BF16 = torch.bfloat16
TOKENS, CHOICES = 9, 2


class Calls(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counted[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def integers(*shape, seed):
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def results(ring, experts, features, hidden, *, transposed, biased, capability, dtype=BF16):
    """Output and gradients of one pass, and how often the grouped product was called."""
    rank, ranks = ring.rank, ring.size
    up, down = integers(experts, hidden, features, seed=1), integers(experts, features, hidden, seed=2)
    if transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    local_shards = {"up": up, "down": down}
    if biased:
        local_shards |= {"up_bias": integers(experts, hidden, seed=3), "down_bias": integers(experts, features, seed=4)}
    local_shards = {
        name: chunk(local, ranks, rank).contiguous().to(dtype).requires_grad_() for name, local in local_shards.items()
    }
    x = integers(TOKENS, features, seed=10 + rank).to(dtype).requires_grad_()
    generator = torch.Generator().manual_seed(20 + rank)
    index = torch.randint(experts, (TOKENS, CHOICES), generator=generator)
    weights = (2.0 ** -torch.randint(3, (TOKENS, CHOICES), generator=generator)).to(dtype).requires_grad_()
    kernels.choose_grouped_as_on(capability)
    try:
        with Calls() as calls:
            y = rotated_experts(
                x, index, weights, local_shards["up"], local_shards["down"], up_bias=local_shards.get("up_bias"),
                down_bias=local_shards.get("down_bias"), activation="relu", transposed=transposed, ring=ring,
            )  # fmt: skip
            gradients = torch.autograd.grad(
                y, [x, weights, *local_shards.values()], integers(*y.shape, seed=5).to(dtype)
            )
    finally:
        kernels.choose_grouped_as_on(0)
    return [y, *gradients], calls.counted["aten::_grouped_mm"]


@on_ranks([2, 3])
def test_the_grouped_product_gives_what_the_loop_gives(rank, ranks, ring, cases):
    for transposed in (False, True):
        for experts in (2 * ranks, 2 * ranks + 1):
            sizes = (experts, 16, 24)
            loop, none = results(ring, *sizes, transposed=transposed, biased=False, capability=0)
            # a choice of this rank alone: no hop depends on it
            made, grouped = results(ring, *sizes, transposed=transposed, biased=False, capability=9 * (rank != 1))
            with cases.case(f"{experts} experts, transposed {transposed}"):
                assert none == 0
                # of a shard with several experts: up, down, and the gradients of hidden values and of rows
                shards = sum(chunk(torch.empty(experts), ranks, owner).numel() > 1 for owner in range(ranks))
                assert grouped == (4 * shards if rank != 1 else 0), grouped
                for mine, expected in zip(made, loop, strict=True):
                    assert torch.equal(mine, expected)
    for sizes, more, products in (  # products that are grouped, of the four of a shard
        ((2 * ranks, 12, 20), {}, 0),  # rows of 24 and 40 bytes
        ((2 * ranks, 12, 24), {}, 1),  # down: its matrices lie along the hidden features
        ((2 * ranks, 16, 24), {"biased": True}, 2),  # gradients have no bias
        ((2 * ranks, 16, 24), {"dtype": torch.float32}, 0),
        ((ranks, 16, 24), {}, 0),  # one expert a shard
    ):
        more = {"biased": False, "dtype": BF16, **more}
        with cases.case(f"{sizes} {more}"):
            loop, _ = results(ring, *sizes, transposed=False, capability=0, **more)
            made, grouped = results(ring, *sizes, transposed=False, capability=9, **more)
            assert grouped == products * ranks
            assert all(torch.equal(mine, expected) for mine, expected in zip(made, loop, strict=True))


@on_ranks([2, 3])
def test_a_group_of_shards_is_one_grouped_product(ranks, ring, cases):
    sizes = (2 * ranks, 16, 24)
    loop, _ = results(ring, *sizes, transposed=False, biased=False, capability=0)
    with rtp_ext.Ring(timeout=30.0, group=ranks) as grouping, cases.case("all experts"):
        made, grouped = results(grouping, *sizes, transposed=False, biased=False, capability=9)
        assert grouped == 4
        assert all(torch.equal(mine, expected) for mine, expected in zip(made, loop, strict=True))


def test_what_is_grouped():
    rows, stack = torch.zeros(5, 16, dtype=BF16), torch.zeros(3, 16, 8, dtype=BF16)
    assert kernels.grouped_refusal(rows, stack) == "torch has no kernel for CPUs"
    for capability in (8, 9, 10, 12):
        found = None if capability in (9, 10) else "torch has no kernel for CPUs"
        kernels.choose_grouped_as_on(capability)
        try:
            assert kernels.grouped_refusal(rows, stack) == found
            if found is not None:
                continue
            assert kernels.grouped_refusal(rows, stack.transpose(1, 2).contiguous().transpose(1, 2)) is None
            assert "no kernel for Half" in kernels.grouped_refusal(rows.half(), stack.half())
            assert kernels.grouped_refusal(rows, stack[:1]) == "there is one group"
            assert "nothing to multiply" in kernels.grouped_refusal(rows[:0], stack)
            aside = torch.zeros(5 * 16 + 1, dtype=BF16)[1:].view(5, 16)
            for other in (aside, torch.zeros(5, 20, dtype=BF16)[:, :16]):
                assert "multiples of 16 bytes" in kernels.grouped_refusal(other, stack)
            assert "multiples of 16 bytes" in kernels.grouped_refusal(rows, torch.zeros(3, 16, 7, dtype=BF16))
            ends = torch.tensor([2, 2, 5], dtype=torch.int32)
            assert kernels.grouped_product(rows, stack, ends).shape == (5, 8)
        finally:
            kernels.choose_grouped_as_on(0)
