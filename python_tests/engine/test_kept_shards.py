"""Quantized shards that are kept from forward to backward: the same bits as without, half the quantizations, and the
bytes that the planner counts."""

import pytest
import torch
from grids import few
from harness import Cases, run_ranks
from reference import adamw
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.nn import RotatedMLP
from rtp_ext.planner import Strategy
from rtp_ext.planner.rotation.operations import RotatedOperation, Weight, rtp_bytes

BLOCKS, FEATURES, HIDDEN = 4, 20, 39  # 4 blocks of two weights: 16 quantizations a step become 8
RINGS = (
    {"transport": "c10d", "prefetch": 0},
    {"transport": "shm", "prefetch": 1, "slot_cap": 400},
    {"transport": "tcp", "prefetch": 2, "late_gradients": 1},
)


class Block(nn.Module):
    def __init__(self, how=None):
        super().__init__()
        self.up, self.down, self.how = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES), how

    def products(self, x):
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        return self.products(x) if self.how is None else checkpoint(self.products, x, use_reentrant=self.how)


def _model(ring, how=None):
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Embedding(17, FEATURES), *(Block(how) for _ in range(BLOCKS)))
    return rtp_ext.fully_rotate(blocks, mesh=ring, bundle=False)


def _batch(rank, step):
    return torch.randint(17, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


def _local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def _train(ring, rank, how=None, accumulated=1):
    """Returns outputs, gradients and parameters of three steps, and how often the last one quantized."""
    model, found = _model(ring, how), []
    optimizer = adamw(model.parameters(), lr=0.01)
    for step in range(3):
        before = ring.quantized()
        optimizer.zero_grad()
        for part in range(accumulated):
            output = model(_batch(rank, step + 7 * part))
            output.square().sum().backward()
            found.append(output.detach())
        found += [_local(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        count = ring.quantized() - before
    return found + [_local(parameter) for parameter in model.parameters()], count


def _equal(ones, others):
    assert len(ones) == len(others)
    return [torch.equal(one, other) for one, other in zip(ones, others, strict=True)]


def _same_bits(rank, ranks):
    cases = Cases()
    for options in RINGS:
        results = {}
        for keep in (False, True):
            with rtp_ext.Ring(travel="int8", keep_quantized=keep, timeout=60.0, **options) as ring:
                for how, accumulated in ((None, 1), (None, 2), (True, 1), (False, 1)):
                    results[how, accumulated, keep] = _train(ring, rank, how, accumulated)
                assert options["prefetch"] == 0 or ring.prefetched()[1] > 0
                assert (ring.slot_count("kept").bytes > 0) == keep
        for how, accumulated in ((None, 1), (None, 2), (True, 1), (False, 1)):
            with cases.case(f"{options} checkpoint {how} accumulated {accumulated}"):
                (exact, often), (kept, seldom) = (results[how, accumulated, keep] for keep in (False, True))
                assert all(_equal(exact, kept))
                if "slot_cap" in options or how is not None:
                    assert seldom < often
                else:  # the embedding travels in forward only
                    assert (often, seldom) == (17 * accumulated, 9 * accumulated)
    with rtp_ext.Ring(travel="int8", keep_quantized=True, timeout=60.0) as ring:
        _stale(cases, ring, rank)
    cases.finish()


def _gradients(ring, rank, between=None, write=None):
    """Returns gradients of a step. `between`: changes the model between a forward without a backward and the step;
    `write`: between forward and backward."""
    model = _model(ring)
    if between is not None:
        model(_batch(rank, 0))
        between(model)
    loss = model(_batch(rank, 1)).square().sum()
    if write is not None:
        write(model)
    loss.backward()
    return [_local(parameter.grad) for parameter in model.parameters()]


def _twice(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def _load(model):
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def _unseen(model):
    for parameter in model.parameters():
        parameter._local_tensor.data.mul_(2)


def _assigned(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def _stale(cases, ring, rank):
    with rtp_ext.Ring(travel="int8", timeout=60.0) as other:
        plain = _gradients(other, rank)
        for write in (_twice, _load, _unseen, _assigned):
            with cases.case(f"{write.__name__} between two forwards"):
                expected = _gradients(other, rank, between=write)
                assert all(_equal(_gradients(ring, rank, between=write), expected))
                assert not any(_equal(plain, expected)), "control: parameters of before the change"
        with cases.case("control: a stale shard shows"):
            # a write that neither autograd nor a version shows: the backward takes what its forward kept
            early, now = _gradients(ring, rank, write=_unseen), _gradients(other, rank, write=_unseen)
            assert _equal(early, plain)[:-2] == [True] * (len(plain) - 2) and not any(_equal(early, now)[:-2])


@pytest.mark.parametrize("ranks", few([3], [2, 3]))
def test_three_steps_of_the_same_bits(ranks):
    run_ranks(_same_bits, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_the_ring_keeps(ranks):
    """The kept bytes match the planner's calculation; nothing else changes, and nothing leaks."""
    ring = rtp_ext.Ring.emulated(ranks, travel="int8", keep_quantized=True)
    other = rtp_ext.Ring.emulated(ranks, travel="int8")
    operations = [
        RotatedOperation("embedding", (Weight((18, 12), 1),)),
        RotatedOperation("linear", (Weight((24, 12)), Weight((24,)))),
        RotatedOperation("bundle", (Weight((36, 24)), Weight((24, 36), 1))),
    ]
    channels = ("weight", "gradient", "scratch")

    def model(on):
        mlp = RotatedMLP(24, 36, bias=False, activation="gelu", ring=on)
        return nn.Sequential(rtp_ext.fully_rotate(nn.Sequential(nn.Embedding(18, 12), nn.Linear(12, 24)), mesh=on), mlp)

    made, plain, ids = model(ring), model(other), torch.arange(7)
    with torch.no_grad():
        made(ids)
    assert ring.slot_count("kept").bytes == 0, "a forward without a backward"
    for _ in range(3):
        made(ids).sum().backward()
        plain(ids).sum().backward()
    held = rtp_bytes(operations, ranks, travel="int8", keep_quantized=True)
    kept = ring.slot_count("kept")
    assert kept.bytes == kept.peak_bytes == held.kept_bytes > 24 * 12 // ranks
    counts = [[each.slot_count(channel).bytes for channel in channels] for each in (ring, other)]
    assert counts[0] == counts[1] and other.slot_count("kept").bytes == 0
    assert rtp_bytes(operations, ranks, travel="int8").kept_bytes == 0
    for _ in range(3):
        made(ids)
    assert ring.slot_count("kept").bytes == kept.bytes, "forwards share one copy"
    ring.clear_slots()
    assert ring.slot_count("kept").bytes == 0


def test_forwards_before_their_backwards_and_models_that_end():
    ring = rtp_ext.Ring.emulated(3, travel="int8", keep_quantized=True)
    for _ in range(4):  # models that are dropped after a forward
        model = rtp_ext.fully_rotate(nn.Sequential(nn.Linear(9, 12), nn.Linear(12, 9)), mesh=ring, bundle=False)
        x = torch.ones(2, 9, requires_grad=True)
        model(x)
        most = ring.slot_count("kept").slots
        del model
    assert most <= 4, "two shards of the model before, whose weights have been freed"
    model = rtp_ext.fully_rotate(nn.Linear(9, 12), mesh=ring)
    before = ring.quantized()
    losses = [model(torch.ones(2, 9, requires_grad=True)).sum() for _ in range(3)]
    for loss in losses:
        loss.backward()
    assert ring.quantized() - before == 3, "backwards quantized nothing"
    model(torch.ones(2, 9)).sum().backward()
    assert ring.quantized() - before == 4, "a backward without an input gradient moves no weights"


def test_refused():
    for travel in (None, "bfloat16"):
        with pytest.raises(ValueError, match=f"expected keep_quantized=False, or travel 'int8'.*travel {travel!r}"):
            rtp_ext.Ring.emulated(2, travel=travel, keep_quantized=True)
        with pytest.raises(ValueError, match="rtp_bytes: expected keep_quantized False without travel int8"):
            rtp_bytes([RotatedOperation("linear", (Weight((4, 4)),))], 2, travel=travel, keep_quantized=True)
        with pytest.raises(ValueError, match="strategy: expected keep_quantized False without travel int8"):
            Strategy(rtp=2, travel=travel, keep_quantized=True)
    with pytest.raises(ValueError, match="strategy: expected offload False with keep_quantized"):
        Strategy(rtp=2, travel="int8", keep_quantized=True, offload=True)
    with pytest.raises(ValueError, match="keep_quantized needs rtp of at least 2"):
        Strategy(keep_quantized=True)
    ring = rtp_ext.Ring.emulated(2, travel="int8", keep_quantized=True)
    with pytest.raises(ValueError, match="Ring: expected keep_quantized=False with offload_policy=CPUOffloadPolicy"):
        ring.offload(CPUOffloadPolicy())
