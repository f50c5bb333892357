"""What a forward keeps for its backward, where the operation has another plan by then: outputs and gradients are those
of the plain operation."""

import dataclasses
from functools import partial
from itertools import product

import pytest
import torch
from grids import few
from harness import on_ranks
from operation_checks import EXACT, Result, assert_result, leaves, loss, plain_results
from operations.bundles import make_experts, make_head, make_mlp
from operations.layers import make_embedding, make_linears
from reference import assert_same, differs, full, random
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

import rtp_ext
from rtp_ext.functional import Prepared
from rtp_ext.functional.mlp import MLP
from rtp_ext.ring.routes import route_planner
from rtp_ext.ring.routes.route_planner import Device, Link

WIDE = 64
MLPS = {
    "gated": partial(make_mlp, (WIDE, 24, WIDE), bias=False),
    "gated, uneven, biases": partial(make_mlp, (WIDE, 17, 5), "geglu"),
    "gated, transposed": partial(make_mlp, (WIDE, 17, 5), transposed=True),
    "gated, recomputed": partial(make_mlp, (WIDE, 17, 5), recompute=True),
    "without a gate": partial(make_mlp, (5, 13, 7), "gelu_tanh"),
    "last shards empty": partial(make_mlp, (6, 2, 1)),
}
OTHERS = {
    "linears": partial(make_linears, {"q": 8, "k": 3, "v": 5}),
    "embedding": make_embedding,
    "head": partial(make_head, (11, 5), {"label_smoothing": 0.3, "soft_cap": 3.0, "reduction": "sum"}),
    "experts": partial(make_experts, (7, 6, 4), biases=("up_bias", "down_bias")),
}


def plan(ring, prepared, way):
    """Plans an operation anew, and those that have no plan yet. `way`: shards in a product, or gather."""
    ring.gate.gathers, ring.gate.group = way == "gather", 1 if way == "gather" else way
    ring.route_plan = dataclasses.replace(ring.route_plan, group=ring.gate.group)  # of what is not planned by tokens
    for ready in prepared.found.values():
        ready.plan(ring, None)


def result(operation, ring, form, before, after, *, checkpointed):
    """Of a forward with one plan and a backward after another was made. Without a checkpoint, a second forward is in
    between, and half of the loss is its own."""
    shards, prepared = operation.shards(ring.rank, ring.size), Prepared()
    inputs = leaves(operation.inputs(form, ring.rank, 10))

    def forward(*given):
        return operation.rotated(shards, given, ring=ring, prepared=prepared)

    plan(ring, prepared, before)
    y = checkpoint(forward, *inputs, use_reentrant=False) if checkpointed else forward(*inputs)
    plan(ring, prepared, after)
    both = [y, y if checkpointed else forward(*inputs)]
    (sum(loss(each, ring.rank, 10) for each in both) / 2).backward()
    return Result(y.detach(), [x.grad for x in inputs], {name: shard.grad for name, shard in shards.items()})


def check(cases, ring, name, form):
    operation, ways = (MLPS | OTHERS)[name](), [*range(1, ring.size + 1), "gather"]
    expected = plain_results(operation, ring.size, form, 10)[ring.rank]
    for before, after, checkpointed in product(ways, ways, (True, False)):
        if before != after:
            with cases.case(f"{name}, {form}, {ring.route}: {before} -> {after}, checkpointed {checkpointed}"):
                found = result(operation, ring, form, before, after, checkpointed=checkpointed)
                assert_result(found, expected, ring, operation.cuts, EXACT, EXACT)


@on_ranks(few([3], [2, 3, 4]))
def test_operations(ranks, cases):
    with rtp_ext.Ring(timeout=60.0) as ring:
        for name, form in product(MLPS | OTHERS, ("many", "empty on rank 0")):
            check(cases, ring, name, form)
    for options in ({"route": "ring", "gradient_halves": True}, {"route": "direct", "gradient_route": "direct"}):
        with rtp_ext.Ring(timeout=60.0, **options) as ring:
            check(cases, ring, "gated, uneven, biases", "many")


@on_ranks(3)
def test_values_in_the_order_of_the_first_plan_give_other_gradients(cases):
    """Control: a recomputation has the second plan."""
    operation = MLPS["gated, uneven, biases"]()
    with rtp_ext.Ring(timeout=60.0) as ring:
        expected = plain_results(operation, ring.size, "many", 10)[ring.rank]
        for before, after in ((1, 2), (2, 3), (3, 1)):
            with cases.case(f"{before} -> {after}"), pytest.MonkeyPatch.context() as patch:
                patch.setattr(MLP, "backward", staticmethod(partial(in_order_of, before, MLP.backward)))
                found = result(operation, ring, "many", before, after, checkpointed=True)
                assert_same(found.output, expected.output, EXACT, "output")
                assert differs(found.input_gradients[0], expected.input_gradients[0], 1e-3)


def in_order_of(group, backward, call, settings, gradients, inputs, parameters, kept, needs):
    return backward(call, settings, gradients, inputs, parameters, [kept[0], torch.tensor([group])], needs)


@on_ranks([2, 3])
def test_experts_that_a_recomputation_chooses_anew(rank, ranks, cases):
    """As where a router has another plan, whose sums are rounded otherwise: the gradients are those of the experts that
    the recomputation has chosen."""
    operation = OTHERS["experts"]()

    def shifted(form, each, seed):
        x, index, weights = operation.inputs(form, each, seed)
        return [x, (index + 1) % 7, weights]

    expected = plain_results(operation, ranks, "many", 10)[rank]
    anew = plain_results(dataclasses.replace(operation, inputs=shifted), ranks, "many", 10)[rank]
    with rtp_ext.Ring(timeout=60.0) as ring:
        shards, prepared = operation.shards(rank, ranks), Prepared()
        batches = iter([operation.inputs("many", rank, 10), shifted("many", rank, 10)])
        x, _, weights = inputs = leaves(operation.inputs("many", rank, 10))

        def forward(x, weights):
            return operation.rotated(shards, [x, next(batches)[1], weights], ring=ring, prepared=prepared)

        y = checkpoint(forward, x, weights, use_reentrant=False)
        loss(y, rank, 10).backward()
        found = Result(y.detach(), [each.grad for each in inputs], {name: each.grad for name, each in shards.items()})
        with cases.case("gradients"):
            assert_result(found, dataclasses.replace(anew, output=expected.output), ring, operation.cuts, EXACT, EXACT)
            assert differs(x.grad, expected.input_gradients[0], 1e-3), "control: it chose others"


LINK = Link(bytes_per_second=400e9, seconds_per_hop=6e-6, source="assumed")
DEVICE = Device(flops=1e9, multiprocessors=0, seconds_per_launch=20e-6, source="assumed")
FEW, MANY = 8, 64  # tokens, for which the planner makes one group of all shards, and single shards


def predicted(ranks, tokens, *_, **__):
    return {"rotate": 1.0, "gather": 9.0} | {
        route_planner.way_of(group): 0.5 if group == ranks and tokens <= FEW else 9.0
        for group in route_planner.group_choices(ranks)
    }


class Model(nn.Module):
    """Gated MLPs, each behind a linear layer."""

    def __init__(self, checkpointed):
        super().__init__()
        config = LlamaConfig(hidden_size=24, intermediate_size=37, num_attention_heads=2, mlp_bias=True)
        self.linears = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.mlps = nn.ModuleList(LlamaMLP(config) for _ in range(2))
        self.checkpointed = checkpointed
        for number, parameter in enumerate(self.parameters()):
            parameter.data = random(*parameter.shape, dtype=torch.float64, seed=number, scale=0.3)

    def forward(self, x):
        for linear, mlp in zip(self.linears, self.mlps, strict=True):
            x = linear(x)
            x = x + (checkpoint(mlp, x, use_reentrant=False) if self.checkpointed else mlp(x))
        return x


@on_ranks(few([2], [2, 4]), timeout=300.0)
def test_models_that_are_planned_anew(rank, ranks, cases):
    """Forward 4 plans anew, by the many tokens of forward 3, whose backward follows together with its own."""
    route_planner.device_of = lambda device, dtype: DEVICE
    route_planner.predict = predicted
    for way in ("eager", "checkpointed", "compiled"):
        with cases.case(way):
            ring = rtp_ext.Ring(transport="shm", timeout=60.0)
            ring.gate.link = LINK
            plain = Model(False)
            model = rtp_ext.fully_rotate(Model(way == "checkpointed"), mesh=ring)
            call = torch.compile(model, backend="aot_eager", dynamic=True) if way == "compiled" else model
            plans, losses, expected = [], [], 0.0
            for forward, tokens in enumerate((FEW, FEW, MANY, MANY)):
                sizes = [tokens if each else FEW for each in range(ranks)]
                batches = leaves([random(size, 24, dtype=torch.float64, seed=forward) for size in sizes])
                (x,) = leaves([batches[rank]])
                y = call(x)
                assert_same(y, plain(batches[rank]), EXACT, f"output {forward}")
                losses.append((x, batches[rank], loss(y, rank, forward)))
                expected += sum(loss(plain(batch), each, forward) for each, batch in enumerate(batches)) / ranks
                plans.append({name: (each.route, each.group) for name, each in ring.gate.plans.items()})
                if forward != 2:
                    sum(each for _, _, each in losses).backward()
                    expected.backward()
                    for number, (x, same, _) in enumerate(losses):
                        assert_same(x.grad, ranks * same.grad, EXACT, f"input gradient {forward} {number}")
                    losses, expected = [], 0.0
            for (name, ours), right in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert_same(full(ours.grad), right.grad, EXACT, name)
            third, fourth = plans[2:]
            assert len(fourth) == 4 and all(fourth[name] != third[name] for name in fourth), f"{third} {fourth}"
            ring.close()
