"""rtp_ext.optim.Muon between replicas, and with tensor parallelism, against whole models in one process."""

import itertools

import torch
from grids import few
from harness import on_ranks
from matrix_optimizers import CLOSE, POLICIES
from matrix_optimizers import Muon as Stock
from pipeline_models import LARGEST_NORM, Pipeline, batch, make_parts
from pipeline_models import loss_of as whole_loss
from pretended_hosts import pretend_hosts
from reference import assert_same, differs, random, wholes
from replica_models import DIMS, Tiny, all_losses, batch_loss, mesh_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from workers import Replica, Workers, assert_trained_alike

import rtp_ext
from rtp_ext.optim import Muon, matrices
from rtp_ext.outer import AllReduce, ZeroOuter

SHAPE = (2, 2)
EXACT = 1e-10  # float64
CLIP = 0.1


class Deep(Tiny):
    """With a stray matrix, which is gathered."""

    def __init__(self):
        super().__init__()
        self.stray = nn.Parameter(random(7, 7, dtype=torch.float64, seed=90) * 0.3)

    def block(self, x):
        return super().block(x @ self.stray)


def optimizers_of(model, exchange=None):
    hidden, rest = matrices(model)
    hidden = [*hidden, model.stray, model.embed.weight]  # the last one is tied to the head
    rest = [p for p in rest if all(p is not each for each in hidden)]
    settings = {"lr": 0.02, "weight_decay": 0.1}
    first = Stock(hidden, **settings) if exchange is None else Muon(hidden, exchange=exchange, **settings)
    return [first, torch.optim.SGD(rest, lr=0.05, momentum=0.9)]


def train(model, optimizers, losses, clip, steps=3):
    """`losses(step)`: the losses of the micro-batches of a step."""
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    for step in range(steps):
        model.zero_grad()
        every = losses(step)
        for number, loss in enumerate(every):
            if isinstance(model.mix.weight, DTensor):
                rtp_ext.set_requires_all_reduce(model, number + 1 == len(every))
            loss().backward()
        clip(model.parameters(), CLIP)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()


def assert_alike(model, plain, tolerance=EXACT):
    for (name, expected), found in zip(plain.named_parameters(), wholes(model.parameters()), strict=True):
        assert_same(found, expected.detach(), tolerance, name)


def reduced_cases(rank, ranks, cases, shape=SHAPE):
    def together(model):
        return lambda step: [lambda m=m: all_losses(model, ranks, 2 * step + m, 1 / ranks) for m in range(2)]

    def own(model):
        return lambda step: [lambda m=m: batch_loss(model, rank, 2 * step + m) for m in range(2)]

    plain = Deep()
    start = [parameter.detach().clone() for parameter in plain.parameters()]
    train(plain, optimizers_of(plain), together(plain), nn.utils.clip_grad_norm_)
    assert all(differs(p, before, 1e-6) for p, before in zip(plain.parameters(), start, strict=True)), "control"
    for policy, exchange in itertools.product((AllReduce, ZeroOuter), ("gram", "whole")):
        with cases.case(f"{policy.__name__}, {exchange}, {shape}"):
            model = rtp_ext.fully_rotate(
                Deep(), mesh=mesh_of(shape, ("replicas", "ring")), dims=DIMS, outer=policy(), timeout=30.0
            )
            optimizers = optimizers_of(model, exchange)
            train(model, optimizers, own(model), nn.utils.clip_grad_norm_)
            assert_alike(model, plain)
            buffer = optimizers[0].state[model.mix.weight]["momentum_buffer"]
            assert buffer.placements == model.mix.weight.placements
            (plan,) = optimizers[0].plan().plans
            assert plan.size == (ranks if policy is ZeroOuter else shape[1]), "all ranks that hold parts"
            rtp_ext.ring_of(model).close()


def apart_cases(rank, cases):
    for exchange, name in few([("gram", name) for name in POLICIES], itertools.product(("gram", "whole"), POLICIES)):
        policy, act = POLICIES[name]

        def ours(model, exchange=exchange):
            return Muon([model.mix.weight, model.mlp[0].weight, model.mlp[2].weight], lr=0.02, exchange=exchange)

        def stock(model):
            return Stock([model.mix.weight, model.mlp[0].weight, model.mlp[2].weight], lr=0.02)

        with cases.case(f"{name}, {exchange}"):
            workers, alone = Workers(SHAPE, act, stock), Workers(SHAPE, lambda workers: None, stock)
            replica = Replica(rank, SHAPE, policy(), ours)
            for each in (replica, workers, alone):
                each.train(3)
            assert_trained_alike(replica, workers, "Muon", CLOSE)
            assert differs(workers.weights, alone.weights, 1e-4), "control: replicas met"
            assert differs(*alone.weights, 1e-4), "control: they differ where they do not"
            (plan,) = replica.optimizer.plan().plans
            assert plan.size == 2, "the ring of one replica"


class Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 14), nn.Linear(14, 5)
        self.double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def parallel_cases(rank, cases):
    """Two rings, each of a half of what tensor parallelism has cut, whose ranks have the same batch."""
    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=("ring", "tp"))
    for exchange in ("gram", "whole"):
        with cases.case(f"tensor parallelism, {exchange}"):
            plain = Parallel()
            model = parallelize_module(Parallel(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            rtp_ext.fully_rotate(model, mesh=mesh, dims=rtp_ext.RotationDims(ring="ring"), timeout=30.0)
            for each, cls, batches in ((plain, Stock, (0, 1)), (model, Muon, (rank // 2,))):
                options = {} if each is plain else {"exchange": exchange}
                optimizer = cls([each.up.weight, each.down.weight], lr=0.1, **options)
                for step in range(3):
                    optimizer.zero_grad()
                    inputs = [random(4, 5, dtype=torch.float64, seed=10 * batch + step) for batch in batches]
                    (sum(each(x).square().mean() for x in inputs) / len(inputs)).backward()
                    optimizer.step()
            assert_alike(model, plain)
            (plan,) = optimizer.plan().plans
            assert plan.size == 4


class Several:
    """Optimizers as one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def pipeline_cases(cases):
    """Two stages on each ring, whose matrices one optimizer has."""

    def split(cls, parameters):
        parameters = list(parameters)
        hidden = [p for p in parameters if p.dim() == 2]
        return Several(cls(hidden, lr=0.02), torch.optim.SGD([p for p in parameters if p.dim() != 2], lr=0.05))

    with cases.case("stages of a pipeline"):
        mesh, steps = init_device_mesh("cpu", SHAPE, mesh_dim_names=("pp", "ring")), 2
        pipeline = Pipeline(ScheduleInterleaved1F1B, mesh)
        pipeline.optimizer = split(Muon, pipeline.parameters)
        parts = make_parts()
        plain = nn.Sequential(*parts)
        optimizer = split(Stock, plain.parameters())
        for step in range(steps):
            pipeline.step(step)
            optimizer.zero_grad()
            every = [batch(place, step) for place in range(2)]
            (sum(whole_loss(plain(ids), targets) for ids, targets in every) / 2).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), LARGEST_NORM)
            optimizer.step()
        for index, stage in pipeline.stages.items():
            assert_alike(stage, nn.Sequential(*parts[pipeline.slices[index]]))
        (plan,) = pipeline.optimizer.optimizers[0].plan().plans
        assert plan.size == 2 and len(pipeline.stages) == 2
        pipeline.close()


def two_level_cases(rank, ranks, cases):
    pretend_hosts(rank, 2)
    with cases.case("a ring of four over two hosts"):
        plain = Parallel()
        model = rtp_ext.fully_rotate(Parallel(), route="two-level", timeout=30.0)
        assert rtp_ext.ring_of(model).hop_route == "two-level"
        for each, cls, batches in ((plain, Stock, range(ranks)), (model, Muon, (rank,))):
            optimizer = cls([each.up.weight, each.down.weight], lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                inputs = [random(4, 5, dtype=torch.float64, seed=10 * batch + step) for batch in batches]
                (sum(each(x).square().mean() for x in inputs) / len(inputs)).backward()
                optimizer.step()
        assert_alike(model, plain)


@on_ranks(4)
def test_two_by_two(rank, ranks, cases):
    reduced_cases(rank, ranks, cases)
    apart_cases(rank, cases)
    parallel_cases(rank, cases)
    pipeline_cases(cases)
    two_level_cases(rank, ranks, cases)


@on_ranks(6)
def test_three_replicas(rank, ranks, cases):
    """Shards of 7 rows are cut over the replicas along the other side: parts are tiles, which go whole."""
    reduced_cases(rank, ranks, cases, (3, 2))
