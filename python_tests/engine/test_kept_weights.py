"""A forward that backward computes again keeps its weights for that backward: the values stay, the bytes halve."""

import copy

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import on_ranks
from models import batch_loss, make_model, mean_loss, train
from reference import assert_same, differs, full
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.options import RingOptions

TOLERANCE = 1e-9
STEPS = 4
ROOM = {"buffers": 1 << 20, "keep_recomputed": True}  # over shm the default is to keep nothing
NETWORK = {"transport": "c10d", "buffers": "auto", "keep_recomputed": None}
WAYS = (
    {},
    {"group": 8},
    {"group": 8, "route": "direct"},
    {"gradient_halves": True},
    {"gradient_route": "direct"},
    NETWORK,
    NETWORK | {"group": 8, "collective": True},
)


def keeps(ring, on):
    ring.communicator.executor.prefetch(True, ring.options.look_ahead, on)


def totals(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()


def step_bytes(ring, model, rank, step):
    """Bytes of weights that all ranks send in a forward and backward."""
    before = ring.bytes_sent("weight")
    batch_loss(model, rank, step).backward()
    model.zero_grad()
    return totals(ring.bytes_sent("weight") - before)


@on_ranks(few([3], [2, 3, 4]))
def test_the_plain_models_results(rank, ranks, cases):
    plain = make_model(checkpointed=False, blocks=3)
    train(plain, lambda step: mean_loss(plain, ranks, step), STEPS)
    kept = [weight for block in plain.blocks for weight in (block.up.weight, block.down.weight)]
    numbers = sum(weight.numel() for weight in kept)
    for way in WAYS:
        options = ROOM | way | ({"group": ranks} if "group" in way else {})
        with cases.case(str(options)), rtp_ext.Ring(timeout=60.0, **options) as ring:
            model = rtp_ext.fully_rotate(make_model(checkpointed=False, blocks=3), mesh=ring, bundle=False)
            train(model, lambda step, model=model: batch_loss(model, rank, step), STEPS)
            for name, parameter in plain.named_parameters():
                assert_same(full(model.get_parameter(name)), parameter, TOLERANCE, name)
            sent = []
            for on in (True, False):
                keeps(ring, on)
                sent.append([step_bytes(ring, model, rank, step) for step in range(3)][-1])
            widest = -(-plain.blocks[0].up.weight.shape[0] // ranks) * ranks  # of a collective: the largest shard
            rows = {23: widest, 10: -(-10 // ranks) * ranks} if options.get("collective") else {23: 23, 10: 10}
            numbers = sum(rows[weight.shape[0]] * weight.shape[1] for weight in kept)
            assert sent[1] - sent[0] == (ranks - 1) * numbers * 8, f"{sent}: expected {numbers} numbers less"


class Blocks(nn.Module):
    """Checkpointed blocks; `write(step, block)` runs between the forward that is computed again and its backward."""

    def __init__(self, count=3, width=12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.between = lambda layer: None

    def block(self, layer, x):
        y = layer(x)
        if torch._C._current_graph_task_id() == -1:
            y.register_hook(lambda gradient: self.between(layer))
        return torch.tanh(y)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False)
        return x


def gradients_of(model, x):
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    found = [x.grad, *(full(parameter.grad) for parameter in model.parameters())]
    model.zero_grad()
    return found


@on_ranks(3, **ROOM)
def test_written_weights_and_other_orders(rank, ranks, ring, cases):
    torch.manual_seed(0)
    plain = Blocks().double()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
    x = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = gradients_of(plain, x)

    def same():
        for ours, theirs in zip(gradients_of(model, x), expected, strict=True):
            assert_same(ours, theirs, TOLERANCE, "gradient")

    with cases.case("a write between the two passes"):
        for _ in range(2):
            same()
        before = ring.bytes_sent("weight")
        same()
        usual = ring.bytes_sent("weight") - before

        writes = []

        def write(layer):
            writes.append(layer)
            with torch.no_grad():
                layer.weight.mul_(1.5)

        model.between = write
        found = []
        for on in (True, False):
            before = ring.bytes_sent("weight")
            found.append(gradients_of(model, x))
            sent = ring.bytes_sent("weight") - before
            assert sent > usual, "expected the written weights to travel"
            for layer in reversed(writes):
                with torch.no_grad():
                    layer.weight.div_(1.5)
            assert len(writes) == 3
            writes.clear()
            keeps(ring, on=not on)
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
        assert differs(found[0][0], expected[0], TOLERANCE), "control: the written weights count"
        model.between = lambda layer: None
        keeps(ring, on=True)
        for _ in range(2):
            same()
        before = ring.bytes_sent("weight")
        same()
        sent = ring.bytes_sent("weight") - before
        assert sent == usual, f"expected to keep again: {sent}, {usual}"
    with cases.case("a backward that leaves what a forward kept"):
        y = model(x.clone().requires_grad_())
        torch.autograd.grad(y.square().sum(), model.layers[2].bias)
        for _ in range(3):
            same()
    with cases.case("a budget that fits one layer"):
        ring.communicator.executor.prefetch(True, 2 * 4 * 12 * 8 + 64, True)
        for _ in range(3):
            same()
        before = ring.bytes_sent("weight")
        same()
        assert usual < ring.bytes_sent("weight") - before


@on_ranks(2, **ROOM)
def test_storages_that_one_rank_holds(rank, ranks, ring):
    """Where storages of shards are replaced, what is kept does not depend on which rank still holds the old ones."""
    torch.manual_seed(0)
    plain = Blocks().double()
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
    x = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, held, sent = gradients_of(plain, x), [], []
    for step in range(6):
        keeps(ring, step < 3)
        before = ring.bytes_sent("weight")
        for ours, theirs in zip(gradients_of(model, x), expected, strict=True):
            assert_same(ours, theirs, TOLERANCE, "gradient")
        sent.append(ring.bytes_sent("weight") - before)
        for parameter in model.parameters():
            local = parameter.to_local().detach()
            if rank == 0:
                held.append(local.untyped_storage())
            with torch.no_grad():
                parameter._local_tensor.set_(local.clone())
    assert sent[2] < sent[5], f"expected fewer bytes with kept weights, got {sent}"


@on_ranks(2, **ROOM)
def test_copies_of_the_local_shard(rank, ranks, ring):
    """With a cast, a copy of the local shard is an operand: made again, where its own product needs it."""
    torch.manual_seed(0)
    plain = Blocks()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    results, sent = [], []
    for on in (True, False):
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring, mp_policy=policy)
        keeps(ring, on)
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1 + rank))
        before = ring.bytes_sent("weight")
        results.append([gradients_of(model, x) for _ in range(3)])
        sent.append(ring.bytes_sent("weight") - before)
    assert sent[0] < sent[1]
    for one, other in zip(*results, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert torch.equal(ours, theirs)


@on_ranks(2, **ROOM)
def test_two_models_whose_optimizers_step_in_backward(rank, ranks, ring, cases):
    """In turns, for so long that hops run ahead across the end of a forward."""

    plain, ours = ([make_model(checkpointed=False, blocks=blocks) for blocks in (2, 3)] for _ in range(2))
    ours = [rtp_ext.fully_rotate(each, mesh=ring, bundle=False) for each in ours]
    for parameter in [parameter for each in (*plain, *ours) for parameter in each.parameters()]:
        optimizer = torch.optim.SGD([parameter], lr=0.05)

        def step(_, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    sent = []
    for step in range(12):
        before = ring.bytes_sent("weight")
        for number in (0, 1) if step % 3 else (1, 0):
            batch_loss(ours[number], rank, step).backward()
            mean_loss(plain[number], ranks, step).backward()
        sent.append(ring.bytes_sent("weight") - before)
    for number, each in enumerate(plain):
        for name, parameter in each.named_parameters():
            with cases.case(f"{name} of model {number}"):
                assert_same(full(ours[number].get_parameter(name)), parameter, TOLERANCE, name)
    with cases.case("weights are kept"):
        assert min(sent) < sent[0], "in turns whose order was learned"


def test_what_no_ring_can_keep():
    for options, said in (({"buffers": "lean"}, "buffers='lean'"), ({"prefetch": False}, "prefetch=False")):
        with pytest.raises(ValueError, match=f"keep_recomputed None or False with {said}, got True"):
            RingOptions(keep_recomputed=True, **options)


def test_wrong_values_are_refused():
    expected = torch.ones(3, dtype=torch.float64)
    assert differs(expected + 1e-6, expected, TOLERANCE)
