"""Every rotated operation in a region of selective activation checkpointing, where it is one operator, with random
draws, writes and counters around it."""

import copy
from typing import Any

import pytest
import torch
from autograd_subjects import SUBJECTS, Subject, converted, features, numbers
from grids import few
from harness import on_ranks, run_ranks
from reference import assert_same, full, random
from selective import aten, region, rotations
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

import rtp_ext
from rtp_ext.nn import Flyweight, RotatedMoE

TOLERANCE = 1e-10
TIMEOUT = 30.0
VARIANTS = [(False, "shm"), (True, "c10d")]  # in place over c10d: the local shards travel


class OtherInputs(nn.Module):
    """Attention whose biases are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, kdim=4, vdim=5, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x[..., :4], x[..., :5], need_weights=False)[0]


MORE = {
    **SUBJECTS,
    "attention of other inputs": Subject(OtherInputs, features(2, 3, 6)),
    "embedding with max_norm": Subject(
        lambda: nn.Embedding(5, 7, max_norm=1.0), lambda rank: [numbers(3, 4, seed=rank)]
    ),
}


_RETURNING: Any = type(create_selective_checkpoint_contexts([])[1])


class Recorder(_RETURNING):
    """Notes which operators selective activation checkpointing sees."""

    def __init__(self) -> None:
        super().__init__(None, {}, False)
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != aten.detach.default:  # which a checkpoint adds itself
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def seen_twice(model: nn.Module, inputs: list[Tensor]) -> tuple[list[str], list[str]]:
    """The calls of a region in its forward and in its recomputation."""
    modes = Recorder(), Recorder()
    with set_checkpoint_early_stop(False):
        weighed(checkpoint(model, *inputs, use_reentrant=False, context_fn=lambda: modes)).backward()
    return modes[0].seen, modes[1].seen


def weighed(y: Tensor) -> Tensor:
    return (y * random(*y.shape, dtype=torch.float64, seed=9)).sum()


@on_ranks(few([2], [2, 3]))
def test_operations(rank, ranks, cases):
    for in_place, transport in VARIANTS:
        with rtp_ext.Ring(transport=transport, timeout=TIMEOUT, route="ring", prefetch=False) as ring:
            for label, subject in MORE.items():
                plain = subject.make()
                model = subject.rotate(copy.deepcopy(plain), ring, in_place)
                batches = subject.batches(ranks, True)
                with cases.case(f"{label}, in_place={in_place}: in a first forward and again"):
                    mine = [t.detach().clone().requires_grad_(t.requires_grad) for t in batches[rank]]
                    forward, again = seen_twice(model, mine)
                    assert forward == again, f"{forward}, then {again}"
                    assert 0 < len(forward) < 40, f"not what the operation is made of: {forward}"
                losses = [weighed(plain(*batch)) for batch in batches]
                (sum(losses) / ranks).backward()
                hops: dict[str | None, Any] = {}
                for policy in (None, "full", "nothing", "everything", "matrices", "rotations"):
                    with cases.case(f"{label}, in_place={in_place}, {policy}"):
                        mine = [t.detach().clone().requires_grad_(t.requires_grad) for t in batches[rank]]
                        model.zero_grad()
                        before = ring.hops("weight"), ring.hops("gradient")
                        loss = weighed(region(model, policy, *mine))
                        loss.backward()
                        hops[policy] = ring.hops("weight") - before[0], ring.hops("gradient") - before[1]
                        assert_same(loss, losses[rank], TOLERANCE, "loss")
                        theirs = dict(plain.named_parameters())
                        for name, parameter in model.named_parameters():
                            expected = theirs[name.removeprefix("module.")].grad
                            assert_same(full(parameter.grad), expected, TOLERANCE, f"gradient of {name}")
                        for ours, expected in zip(mine, batches[rank], strict=True):
                            if expected.grad is not None:
                                assert_same(ours.grad, expected.grad * ranks, TOLERANCE, "input gradient")
                if label in ("norm", "embedding with max_norm"):
                    continue
                with cases.case(f"{label}, in_place={in_place}: hops"):
                    forwards = 2 if label.startswith("attention") else 1  # rotations
                    sent = forwards * (ranks if in_place else ranks - 1)
                    saved, twice = hops[None], (hops[None][0] + sent, hops[None][1])
                    expected = {None: saved, "full": twice, "nothing": twice, "matrices": twice}
                    expected |= {"everything": saved, "rotations": saved}
                    assert hops == expected, hops


class Drawing(nn.Module):
    """A module that draws random numbers within its rotation, and more behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), 0.5)


@on_ranks(2, transport="shm", route="ring")
def test_around_operations(rank, ranks, ring, cases):
    torch.manual_seed(7)
    x = random(4, 6, dtype=torch.float64, seed=rank)

    def gradients(model: nn.Module, policy: str | None) -> list[Tensor]:
        torch.manual_seed(rank)  # of what dropout draws
        model.zero_grad()
        given = x.clone().requires_grad_()
        weighed(region(model, policy, given)).backward()
        return [given.grad, *(full(parameter.grad) for parameter in model.parameters())]

    drawing = Drawing().double()
    cuts = {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 0}
    drawing.inner = Flyweight(drawing.inner, ring, shard_dims=cuts, combine="sum", added_once=("2.bias",))
    capped = RotatedMoE(6, 5, 3, 2, capacity_factor=0.8, dtype=torch.float64, ring=ring)
    for label, model in (("random numbers", drawing), ("experts with a capacity", capped)):
        expected = gradients(model, None)
        for policy in ("full", "rotations"):  # torch writes to what dropout and scatter have made
            with cases.case(f"{label}, {policy}"):
                for ours, right in zip(gradients(model, policy), expected, strict=True):
                    assert_same(ours, right, TOLERANCE, "gradient")

    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 6), nn.Conv1d(4, 5, 1)).double()
    model = converted(copy.deepcopy(plain), ring, False)
    gradients(model, None)

    def counted(model: nn.Module, policy: str | None) -> int:
        given = x.clone().requires_grad_()
        with FlopCounterMode(display=False) as counter:
            weighed(region(model, policy, given)).backward()
        return counter.get_total_flops()

    with cases.case("products that other modes count"):
        plainly = counted(plain, None)
        again = plainly + 2 * (2 * 4 * 6 * 7) + 2 * 4 * 5 * 6
        counts = {policy: counted(model, policy) for policy in (None, "full", "nothing", "everything", "rotations")}
        expected = {None: plainly, "full": again, "nothing": again, "everything": plainly, "rotations": plainly}
        assert counts == expected, f"expected {expected}, got {counts}"

    with cases.case("what a policy is given"):
        seen: list[Any] = []

        def policy(context: Any, operator: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
            if operator.namespace == "rtp_ext" and not context.is_recompute:  # torch 2.11 asks again
                seen.append((operator, [[tuple(each.shape) for each in group] for group in arguments]))
            return CheckpointPolicy.PREFER_RECOMPUTE

        weighed(region(model[0], lambda: policy, x.clone().requires_grad_())).backward()
        rows = -(-7 // ranks) if rank == 0 else 7 // ranks
        assert seen == [(rotations.linear.default, [[(4, 6)], [(rows, 6), (rows,)]])], seen
    with cases.case("an operator is none to call"), pytest.raises(RuntimeError, match="got one of the operator"):
        rotations.linear.default([x], [x])


def _disagree(rank: int, ranks: int, between: type[nn.Module]) -> str:
    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> bool:
        return rank == 0 and operator == rotations.linear.default

    torch.manual_seed(7)
    middle = between(6) if between is nn.LayerNorm else between()
    model = rtp_ext.fully_rotate(nn.Sequential(nn.Linear(6, 6), middle, nn.Linear(6, 6)), timeout=TIMEOUT)
    with pytest.raises(ValueError, match="the ranks of the ring disagree") as raised:
        region(model, lambda: policy, random(4, 6, dtype=torch.float32, seed=rank)).sum().backward()
    # The next forward finds the ring as it was.
    model.zero_grad()
    region(model, "rotations", random(4, 6, dtype=torch.float32, seed=rank)).sum().backward()
    return str(raised.value)


@pytest.mark.parametrize("between", [nn.Tanh, nn.LayerNorm])
def test_ranks_that_save_differently(between):
    """Also where what follows the layer in the region is gathered."""
    for told in run_ranks(_disagree, 2, between):
        assert "in which the output of 0 is saved (rank 0), got" in told, told
        assert "in which the output of 0 is recomputed on rank 1" in told, told


@on_ranks(2)
def test_a_rank_that_saves_differently_later(rank):
    """One rank saves other operations in a later step than both ranks have agreed on before."""
    saves = True

    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> bool:
        return saves and operator == rotations.linear.default

    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model = rtp_ext.fully_rotate(plain, timeout=TIMEOUT, transport="shm")
    x = random(4, 6, dtype=torch.float32, seed=rank)
    for each in (True, False):
        saves = each
        region(model, lambda: policy, x).sum().backward()
    saves = rank == 0
    with pytest.raises(rtp_ext.RotationError, match=r"out of step|did not answer"):
        region(model, lambda: policy, x).sum().backward()
