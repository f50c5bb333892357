"""Gathered parameters and their gradients travel in buckets, and gradients only to the ranks that keep them."""

import copy

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from live_bytes import LiveBytes
from reference import assert_same, full
from torch import Tensor, nn

import rtp_ext
from rtp_ext.parameters import gather

EXACT = 1e-9
ROWS, WIDTH = 1000, 256  # rows that three ranks divide unevenly


class _Table(nn.Module):
    """A table, gathered while in use, whose gradient takes no memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * self.weight.sum()


def _counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the bytes that this rank sends in collectives."""
    sent: dict[str, int] = {}

    def count(name: str, place: int, share) -> None:
        stock = getattr(dist, name)

        def counting(*tensors, **options):
            sent[name] = sent.get(name, 0) + int(tensors[place].nbytes * share(dist.get_world_size()))
            return stock(*tensors, **options)

        monkeypatch.setattr(dist, name, counting)

    count("all_to_all_single", 1, lambda ranks: (ranks - 1) / ranks)
    count("all_reduce", 0, lambda ranks: 2 * (ranks - 1) / ranks)
    return sent


@on_ranks(3)
def test_gradients_are_sent_once_and_take_the_memory_of_a_shard(rank, ranks):
    gather._BUCKET["cpu"] = 1 << 14
    model = rtp_ext.fully_rotate(nn.Sequential(nn.Linear(2, 2), _Table()), timeout=60.0)
    whole, flag = ROWS * WIDTH * 4, 4
    largest = -(-ROWS // ranks) * WIDTH * 4
    x = torch.full((1, 2), rank + 1.0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent = _counted(monkeypatch)
        for _ in range(2):
            sent.clear()
            model.zero_grad()
            with LiveBytes() as live:
                loss = model(x)
                forward = live.peak
                live.reset_peak()
                kept = live.current
                loss.backward()
            assert sent == {"all_to_all_single": (ranks - 1) * (largest + flag)}, sent
            assert forward < whole + largest + (1 << 16), f"forward: {forward} bytes"
            assert live.peak - kept < largest + (1 << 16) < whole / 2, f"backward: {live.peak - kept} bytes"


class _Odd(nn.Module):
    """Parameters of all kinds: uneven, empty on ranks, scalars, complex, frozen, unused, cut along their columns."""

    def __init__(self) -> None:
        super().__init__()
        conv = pytest.importorskip("transformers.pytorch_utils").Conv1D
        self.conv, self.norm = conv(7, 5).double(), nn.LayerNorm(7, dtype=torch.float64)
        self.tied = self.conv.weight  # [5, 7], which the layer cuts along its columns
        self.turn = nn.Parameter(torch.randn(7, 3, dtype=torch.complex128))
        self.bias, self.factor = nn.Parameter(torch.randn(1).double()), nn.Parameter(torch.tensor(0.5).double())
        self.other = nn.Parameter(torch.tensor(2.0).double())
        self.frozen = nn.Parameter(torch.randn(4, 7).double(), requires_grad=False)
        self.spare = nn.Parameter(torch.randn(4).double())

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x) + x @ self.tied) + self.frozen.sum(0) + self.bias
        z = y.to(torch.complex128) @ self.turn
        return (z.real * self.factor + z.imag * self.other).pow(2).mean()


@on_ranks(3)
@pytest.mark.parametrize("bucket", [64, 1 << 20])
def test_buckets_of_any_size_hold_the_same_values(rank, ranks, cases, bucket):
    gather._BUCKET["cpu"] = bucket
    torch.manual_seed(0)
    plain = _Odd()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=60.0)
    inputs = torch.randn(2, ranks, 4, 5, dtype=torch.float64)
    gradients = []
    for repeat in range(2):
        model.zero_grad()
        plain.zero_grad()
        for step in range(2):  # micro-batches
            model(inputs[step, rank]).backward()
            (sum(plain(x) for x in inputs[step]) / ranks).backward()
        found = {name: full(p.grad) if p.grad is not None else None for name, p in model.named_parameters()}
        for name, parameter in plain.named_parameters():
            with cases.case(f"{name}, {repeat}"):
                assert_same(found[name], parameter.grad, EXACT, name)
        gradients.append(found)
    with cases.case("again"):
        used = [name for name, gradient in found.items() if gradient is not None]
        assert "spare" not in used and "frozen" not in used and {"factor", "turn", "tied"} <= {*used}
        assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in used)
    with cases.case("the same bits of scalars on all ranks"):
        every = [None] * ranks
        dist.all_gather_object(every, (model.factor.grad.to_local().item(), model.other.grad.to_local().item()))
        assert len(set(every)) == 1
