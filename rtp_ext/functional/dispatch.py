"""Experts that are divided among ranks: tokens travel to the ranks of their experts, and outputs back."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rtp_ext.ring.autograd import first_order_only, summing_dtype, unseen
from rtp_ext.ring.expert_ring import Division, ExpertRing
from rtp_ext.ring.links.agree import expect_same


def dispatched(
    experts: ExpertRing,
    division: Division,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    wanted: Sequence[bool],
    name: str,
) -> Tensor:
    """Returns `y[t] = sum_k weights[t, k] * MLP_e(x[t])`, e = index[t, k], where ranks have different experts.

    Each pair of a token and an expert is a row that travels to the rank of the expert, and its output returns. Every
    rank takes part, with no rows too: a rank may have no tokens, and an expert none. With a capacity C of `experts`
    every rank sends E C rows, C to each expert: see RotationDims.expert_capacity.

        x [T, D], index [T, K], weights [T, K]   index: an integer in [0, E]; E selects no expert
        returns [T, D], in the dtype of the outputs

    Args:
        division: of the E experts.
        compute: the outputs [n, D] of rows [n, D], given for each row, as [n, 1], the number of the expert among those
            of this rank's part, and a weight of 1.
        wanted: which parameters of the experts require gradients.
        name: of the layer.

    The ranks compare the layer, and exchange numbers of rows, once in a forward: the only wait of the host for the
    device. Raises ValueError on every rank where they are about to compute different layers, dtypes, sizes or
    gradients. With a capacity no host waits for a GPU, which compares, and ends with an assertion. Collective.
    """
    capacity, choices = experts.capacity, index.shape[1]
    enabled = torch.is_grad_enabled()
    asks = f"gradients of tokens {enabled and x.requires_grad}, parameters {[enabled and each for each in wanted]}"
    rule = "" if capacity is None else f", {capacity} rows of each rank"
    facts = f"{name}: {division.experts} experts{rule}, {x.shape[1]} features, {x.dtype}, {asks}"
    spread = x.unsqueeze(1).expand(-1, choices, -1).reshape(-1, x.shape[1])
    if capacity is None:
        flat = index.reshape(-1)
        owner = division.owners[flat]
        counts = torch.zeros(experts.size + 1, dtype=torch.int64, device=owner.device)  # bincount would wait for a GPU
        leaving = counts.scatter_add_(0, owner, torch.ones_like(owner))[: experts.size]
        sizes = _sizes(experts, leaving, facts, name)
        rows = owner.argsort(stable=True)[: sum(sizes[0])]  # in the order of ranks; those of no expert come last
        theirs = _travel(experts, division.numbers[flat[rows]], *sizes, name)
    else:
        index, rows = _rows_of_all(division, index, capacity)
        sizes = _fixed_sizes(experts, division, capacity, facts, name)
        mine = torch.arange(division.parts[experts.rank], device=index.device)
        theirs = mine.unsqueeze(1).expand(-1, capacity).reshape(-1).repeat(experts.size)
        spread = F.pad(spread, (0, 0, 0, 1))  # zeros for rows without a choice
    call = f"call {experts.calls}"
    arrived = _Travel.apply(spread.index_select(0, rows), experts, *sizes, name, f"tokens of {call}")
    theirs = theirs.unsqueeze(1)
    with experts.ended_by_errors(name):  # the ranks of other experts wait for the outputs
        outputs = compute(arrived, theirs, arrived.new_ones(theirs.shape, dtype=torch.float32))
    back = _Travel.apply(outputs, experts, *reversed(sizes), name, f"outputs of {call}")
    weights = weights.masked_fill(index == division.experts, 0)  # E selects no expert; a weight may be NaN
    each = back.new_zeros(len(spread), back.shape[1]).index_copy(0, rows, back)[: index.numel()]
    wide = summing_dtype(back.dtype)
    return (each.view(*index.shape, back.shape[1]).to(wide) * weights.to(wide).unsqueeze(-1)).sum(1).to(back.dtype)


def fixed_starts(experts: ExpertRing, division: Division) -> tuple[int, ...]:
    """Returns where the rows of each expert, or slice, of this rank's part begin in their order, and the end, if ranks
    send fixed numbers of rows; else nothing."""
    each, own = (experts.capacity or 0) * experts.size, division.parts[experts.rank]
    if not each:
        return ()
    rows = [each] * own
    if division.sliced:  # each slice has the rows of its expert
        rows = [*rows, *[0] * (max(division.parts) - own)] * experts.inner.size
    return tuple(itertools.accumulate(rows, initial=0))


def within_capacity(index: Tensor, experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Returns `index` [T, K] with E (no expert) for choices after the first `capacity` of an expert, in the order of
    GShard, and the place of each choice among those of its expert, without a host read."""
    chosen = index.t().reshape(-1)  # all first choices, then all second ones, ...
    ordered, order = chosen.sort(stable=True)
    places = torch.arange(chosen.numel(), device=index.device) - torch.searchsorted(ordered, ordered)
    place = torch.empty_like(chosen).scatter_(0, order, places).view(index.shape[::-1]).t()
    return index.masked_fill(place >= capacity, experts), place


def _rows_of_all(division: Division, index: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Returns `index` without the choices above the capacity, and for each of the E `capacity` rows, in the order of
    ranks and their experts, its choice: T K for none."""
    index, place = within_capacity(index, division.experts, capacity)
    end = division.experts * capacity
    row = (division.places[index] * capacity + place).masked_fill(index == division.experts, end).reshape(-1)
    choices = torch.arange(row.numel(), device=row.device)
    return index, choices.new_full((end + 1,), row.numel()).scatter_(0, row, choices)[:end]


def refuse(experts: ExpertRing, name: str, error: Exception) -> None:
    """Takes the place of `dispatched` on a rank with wrong arguments: the other ranks get to know its `error`, which it
    raises. Collective."""
    none = torch.zeros(experts.size, dtype=torch.int64, device=experts.device)
    facts = f"{name} is refused: {type(error).__name__}: {error}"
    if _compares_on_host(experts):
        _sizes(experts, none, facts, name, error)
        return
    _exchange(experts, none, facts, name)
    experts.end(error)
    raise error


def _compares_on_host(experts: ExpertRing) -> bool:
    """Returns whether the host reads what the ranks tell each other; else a GPU compares it."""
    return experts.capacity is None or experts.device.type == "cpu"


def _fixed_sizes(
    experts: ExpertRing, division: Division, capacity: int, facts: str, name: str
) -> tuple[list[int], list[int]]:
    """Returns the numbers of rows as `_sizes`, which follow from the capacity. No host waits for a GPU: the device
    compares the facts."""
    leaving = [part * capacity for part in division.parts]
    arriving = [leaving[experts.rank]] * experts.size
    told = torch.zeros(experts.size, dtype=torch.int64, device=experts.device)
    if _compares_on_host(experts):
        _sizes(experts, told, facts, name)
    else:
        sent, received = _exchange(experts, told, facts, name)
        torch._assert_async((sent == received).all())
    return leaving, arriving


@unseen
def _exchange(experts: ExpertRing, leaving: Tensor, facts: str, name: str) -> tuple[Tensor, Tensor]:
    """Returns a number for each rank, with a digest of `facts`, and what the ranks have sent: [N, 2] both."""
    experts.calls += 1
    sent = torch.stack([leaving, torch.full_like(leaving, _digest(facts))], 1)
    ones = [1] * experts.size
    return sent, _travel(experts, sent, ones, ones, name, f"numbers of rows of divided experts, call {experts.calls}")


@unseen
def _sizes(
    experts: ExpertRing, leaving: Tensor, facts: str, name: str, refused: Exception | None = None
) -> tuple[list[int], list[int]]:
    """Returns the numbers of rows that go to each rank, and that come from each."""
    ours, theirs = torch.stack(_exchange(experts, leaving, facts, name)).tolist()
    digest = ours[0][1]
    differ = any(each != digest for _, each in theirs)
    answers = experts.exchange(facts) if differ else []
    try:
        if refused is not None:
            raise refused
        named = [f"rank {member}" for member in experts.members]
        expect_same("the ranks of divided experts disagree", answers or [facts], named=named.__getitem__)
    except (TypeError, ValueError, IndexError) as error:
        experts.end(error)  # the other ranks of this rank's ring have begun to rotate
        raise
    return [rows for rows, _ in ours], [rows for rows, _ in theirs]


@functools.lru_cache(maxsize=4096)
def _digest(facts: str) -> int:
    return int.from_bytes(hashlib.sha256(facts.encode()).digest()[:7], "little")


@unseen
def _travel(
    experts: ExpertRing, sent: Tensor, leaving: list[int], arriving: list[int], name: str, identity: str = ""
) -> Tensor:
    received = sent.new_empty(sum(arriving), *sent.shape[1:])
    experts.bytes_sent += (sum(leaving) - leaving[experts.rank]) * sent.shape[1:].numel() * sent.itemsize
    return experts.all_to_all(received, sent.contiguous(), arriving, leaving, name, identity)


class _Travel(torch.autograd.Function):
    """Rows [n, D] to other ranks; their gradients come back. what: the rows, which a backward may send in another order
    than the other ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, experts: ExpertRing, leaving: list[int], arriving: list[int], name: str, what: str
    ):
        ctx.way = experts, arriving, leaving, name, f"gradients of {name}: {what}"
        return _travel(experts, rows, leaving, arriving, name)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor):
        experts, *way = ctx.way
        return _travel(experts, gradient, *way), None, None, None, None, None
