"""Ranks that gather or reduce different modules, or whose optimizers have made different numbers of steps, get an error
that names both on every rank. The same programs without the difference are right."""

import pytest
import torch
from harness import on_ranks
from reference import assert_same, wholes
from torch import nn
from torch.utils.checkpoint import checkpoint

import rtp_ext

TIMEOUT = 20.0
D = torch.float64


class _Expert(nn.Module):
    """Parameters of its own: gathered."""

    def __init__(self, rows=16):
        super().__init__()
        self.w = nn.Parameter(torch.randn(rows, 8, dtype=D) / 8)

    def forward(self, x):
        return torch.tanh(x @ self.w.t()) @ self.w / self.w.shape[0]


def _norm(value):
    made = nn.LayerNorm(8, dtype=D)
    nn.init.constant_(made.weight, value)
    return made


class _Two(nn.Module):
    """Two parts, of which a forward uses those in `use`."""

    def __init__(self, part, recomputed=False):
        super().__init__()
        self.lin, self.a, self.b = nn.Linear(8, 8, dtype=D), part(0), part(1)
        self.recomputed = recomputed

    def forward(self, x, use="ab"):
        h = self.lin(x)
        call = (lambda part: checkpoint(part, h, use_reentrant=False)) if self.recomputed else lambda part: part(h)
        return {name: call(getattr(self, name)) for name in use}


class _Tables(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.lin = nn.Linear(8, 8, dtype=D)
        self.a, self.b = (nn.Embedding(5, 8, dtype=D, **options) for _ in range(2))

    def forward(self, x, use="ab"):
        ids = torch.arange(4)
        return {name: self.lin(getattr(self, name)(ids)) for name in use}


class _Adapters(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8, dtype=D)

    def forward(self, x, use="ab"):
        h = self.lin(x)
        return {name: h * getattr(self, name) for name in use}


def _add(model):
    for name, value in (("a", 1.5), ("b", 0.5)):
        setattr(model, name, nn.Parameter(torch.full((8,), value, dtype=D)))


def _batch(rank, step=0):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(rank + 10 * step), dtype=D)


def _whole_model(model, x, name):
    return model(x, name)[name]


def _part_alone(model, x, name):
    return getattr(model, name)(x)


def _one_loss(model, x, name):
    return model(x.requires_grad_())[name]


LARGE = 20_000  # rows of more than 1 MiB: gathered at their use

# name: model, what is called of it, with the part that a rank uses, words of both operations
PROGRAMS = {
    "experts in forward": (lambda: _Two(lambda _: _Expert(LARGE)), _whole_model, "all_gather of {}.w"),
    "experts of unequal sizes": (lambda: _Two(lambda i: _Expert(LARGE + 999 * i)), _whole_model, "all_gather of {}.w"),
    "experts in backward": (
        lambda: _Two(lambda _: _Expert(LARGE)),
        _one_loss,
        "reduce_scatter of the gradient of {}.w",
    ),
    "experts in a recomputation": (lambda: _Two(lambda _: _Expert(), True), _one_loss, "all_gather of {}.w"),
    "norms alone": (lambda: _Two(lambda i: _norm(1.0 + i)), _part_alone, "all_gather of {}.weight and 1 more"),
    "bilinears": (lambda: _Two(lambda _: _Bilinear()), _part_alone, "all_gather of {}.weight and 1 more"),
    "sparse tables": (lambda: _Tables(sparse=True), _one_loss, "all_gather of the sparse gradient of {}"),
    "renormalised tables": (lambda: _Tables(max_norm=0.1), _whole_model, "all_reduce of the rows of {}"),
    "adapters": (_Adapters, _one_loss, "all_reduce of the gradient of {}"),
    "heads that rotate": (lambda: _Two(lambda _: nn.Linear(8, 3, dtype=D)), _one_loss, "{} backward"),
}


class _Bilinear(nn.Bilinear):
    def __init__(self):
        super().__init__(8, 8, 3, dtype=D)

    def forward(self, x):
        return super().forward(x, x)


def _made(make, convert, **options):
    torch.manual_seed(0)
    model = make()
    if convert:
        model = rtp_ext.fully_rotate(model, timeout=TIMEOUT, **options)
    if isinstance(model, _Adapters):
        _add(model)
    return model


def _gradients(model):
    given = [p.grad for p in model.parameters()]
    return wholes(grad if grad is None or not grad.is_sparse else grad.to_dense() for grad in given)


@on_ranks([2, 3])
def test_ranks_that_gather_or_reduce_other_modules_get_errors_that_name_both(rank, ranks, cases):
    names = [*PROGRAMS]
    for name in names:
        make, call, words = PROGRAMS[name]
        with cases.case(name):
            # All ranks use the same part: as one process.
            # A shard that was sent ahead has the names of its pass, which may follow the one that differs.
            ring = rtp_ext.Ring(timeout=TIMEOUT, prefetch=name != "heads that rotate")
            plain, model = _made(make, False), _made(make, True, mesh=ring)
            for part in "ab":
                y = call(model, _batch(rank), part)
                assert torch.allclose(y, call(plain, _batch(rank), part), atol=1e-12), part
                for r in range(ranks):
                    (call(plain, _batch(r), part).square().sum() / ranks).backward()
                y.square().sum().backward()
            for (key, p), found in zip(plain.named_parameters(), _gradients(model), strict=True):
                expected = None if p.grad is None else p.grad.to_dense()
                assert_same(found, expected, 1e-9, key)
            # The last rank uses another one.
            mine = "b" if rank == ranks - 1 else "a"
            with pytest.raises(rtp_ext.RotationError, match="out of step") as caught:
                call(model, _batch(rank), mine).square().sum().backward()
            text = str(caught.value)
            for part in "ab":
                assert words.format(part) in text, (part, text)
            rtp_ext.ring_of(model).close()


class _Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.Tanh()) if kind == "rotates" else _Expert()

    def forward(self, x):
        return self.parts(x)


def _train(model, optimizer, rank, sizes):
    """Steps after `sizes` micro-batches each."""
    number = 0
    for size in sizes:
        for _ in range(size):
            model(_batch(rank, number)).square().mean().backward()
            number += 1
        optimizer.step()
        optimizer.zero_grad()


@on_ranks()
@pytest.mark.parametrize(("ranks", "transport"), [(2, "tcp"), (3, "shm")])
def test_ranks_whose_optimizers_have_made_other_numbers_of_steps_get_errors_that_name_both(
    rank, ranks, cases, transport
):
    for kind in ("rotates", "gathered"):
        with cases.case(kind):
            plain = _made(lambda kind=kind: _Net(kind), False)
            model = _made(lambda kind=kind: _Net(kind), True, transport=transport)
            reference, optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model))
            # The same steps on all ranks, with forwards alone in between: as one process.
            number = 0
            for size in (3, 2, 1):
                for _ in range(size):
                    for r in range(ranks):
                        (plain(_batch(r, number)).square().mean() / ranks).backward()
                    model(_batch(rank, number)).square().mean().backward()
                    number += 1
                with torch.no_grad():
                    assert torch.allclose(model(_batch(rank)), plain(_batch(rank)), atol=1e-12)
                for each in (reference, optimizer):
                    each.step()
                    each.zero_grad()
            for (key, p), found in zip(plain.named_parameters(), wholes(model.parameters()), strict=True):
                assert_same(found, p, 1e-10, key)
            # 3 + 3 on the first rank, 2 + 2 + 2 on the others.
            words = [f"after {count} updates by optimizers" for count in (3, 4)]
            with pytest.raises(rtp_ext.RotationError, match="out of step") as caught:
                _train(model, optimizer, rank, (3, 3) if rank == 0 else (2, 2, 2))
            assert all(word in str(caught.value) for word in words), str(caught.value)
            assert ("parts.0 forward" if kind == "rotates" else "parts.w") in str(caught.value)
            rtp_ext.ring_of(model).close()
