"""torch.compile of models that no graph holds: on replicas, and cut by tensor parallelism. Their graphs break where
they rotate; steps are those of the eager model, and one graph of all is refused."""

import functools

import pytest
import replica_models
import tensor_models
import torch
from graph_cases import in_graphs
from grids import SWEEP, few
from harness import Cases, run_ranks
from reference import assert_same, differs, local
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import rtp_ext
from rtp_ext.outer import AllReduce, DiLoCo, Gossip, LocalSGD, PowerSGD, TopK, ZeroOuter

POLICIES = {
    "all-reduce": AllReduce,
    "ZeroOuter": ZeroOuter,
    "local SGD": lambda: LocalSGD(2),
    "DiLoCo": lambda: DiLoCo(2),
    "gossip": Gossip,
    "PowerSGD": lambda: AllReduce(PowerSGD(2)),
    "top-k": lambda: AllReduce(TopK(0.3)),
}
STEPS = 3


def _trained(model, call, losses):
    """Losses, parameters of this rank, and the hops of every step. `call` is what losses are computed with."""
    ring, policy = rtp_ext.ring_of(model), rtp_ext.outer_of(model)
    optimizer = replica_models.adamw(model)
    if not isinstance(policy, (AllReduce, ZeroOuter)):
        policy.attach(optimizer)
    found, hops = [], []
    for loss in losses:
        before = ring.hops("weight"), ring.hops("gradient")
        optimizer.zero_grad()
        value = loss(call)
        value.backward()
        optimizer.step()
        found.append(value.detach())
        hops.append((ring.hops("weight") - before[0], ring.hops("gradient") - before[1]))
    return found, {name: local(p).detach().clone() for name, p in model.named_parameters()}, hops


def _compare(cases, name, make, losses, **options):
    torch._dynamo.reset()
    eager, model, other = make(), make(), make()
    start = {name: local(p).detach().clone() for name, p in model.named_parameters()}
    expected, weights, hops = _trained(eager, eager, losses)
    counters.clear()
    found, theirs, their_hops = _trained(model, torch.compile(model, **options), losses)
    with cases.case(name):
        assert counters["stats"]["unique_graphs"] > 0 and counters["graph_break"], counters
        for step, (one, value) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, value, 1e-12, f"loss of step {step}")
        assert differs(expected[-1], expected[0], 1e-6), "control: losses of steps differ"
        for key, value in weights.items():
            assert_same(theirs[key], value, 1e-12, key)
        assert any(differs(value, start[key], 1e-6) for key, value in weights.items()), "control: it trains"
        assert their_hops == hops and hops[0] != (0, 0), f"expected {hops} hops, got {their_hops}"
    torch._dynamo.reset()
    with cases.case(f"{name}: one graph is refused"), pytest.raises(Unsupported):
        losses[0](torch.compile(other, fullgraph=True, **options))
    for each in (eager, model, other):
        rtp_ext.ring_of(each).close()


def _meshes(rank, ranks, shape, policies, plans, backend):
    cases = Cases()
    losses = [lambda call, step=step: replica_models.batch_loss(call, rank, step) for step in range(STEPS)]
    for name in policies:
        make = functools.partial(_replicated, shape, name)
        breaks = backend if SWEEP else "eager"  # where graphs break, which AOTAutograd does not decide
        _compare(cases, f"{name} on {shape}, {breaks}", make, losses, backend=breaks)
    for plan, embedding, dynamic in plans:
        mesh_shape = shape[::-1]
        batch = rank // mesh_shape[1]
        losses = [lambda call, step=step, batch=batch: tensor_models.batch_loss(call, batch, step) for step in range(2)]
        make = functools.partial(_parallel, mesh_shape, plan, embedding)
        case = f"ring x tp {mesh_shape}, {plan.__name__}, {backend}"
        _compare(cases, case, make, losses, backend=backend, dynamic=dynamic)
    cases.finish()


def _replicated(shape, policy):
    return replica_models.replicated(shape, outer=POLICIES[policy]())


def _parallel(shape, plan, embedding):
    return tensor_models.rotated(shape, ("ring", "tp"), plan(embedding))[0]


ALL_PLANS = [  # and `dynamic` of torch.compile: see docs/compile.md
    (tensor_models.replicated_activations, RowwiseParallel, None),
    (tensor_models.sequence_parallel, ColwiseParallel, False),
]


@in_graphs
@pytest.mark.parametrize("backend", few(["aot_eager"], ["aot_eager", "inductor"]))
@pytest.mark.parametrize("shape", few([(2, 2)], [(2, 2), (2, 3)]))
def test_replicas_and_tensor_parallelism_break_graphs(shape, backend):
    policies = few(["all-reduce"], list(POLICIES))
    # inductor asserts equal local sizes on all ranks for values that stay DTensors, which 7 features cannot have
    plans = few(ALL_PLANS[:1], ALL_PLANS if backend == "aot_eager" else ALL_PLANS[:1])
    run_ranks(_meshes, shape[0] * shape[1], shape, policies, plans, backend, timeout=600.0)
