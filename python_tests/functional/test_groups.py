"""MLPs, vocabulary heads, experts and transposed linear layers in groups: the shards of several owners are one operand.
The results are those of the plain operation, the bytes those of single shards, the slots those of the footprint."""

import copy
from functools import partial
from itertools import product

import torch
from grids import few
from harness import on_ranks
from live_bytes import STEADY, assert_pool
from operation_checks import EXACT, check_controls, check_frozen, check_pass, train
from operations.bundles import make_experts, make_head, make_mlp
from operations.layers import make_linear
from reference import assert_same, random
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import rtp_ext

WIDE = 64
TOLERANCES = {torch.float32: (2e-6, 5e-6), torch.bfloat16: (2e-2, 2e-2)}

MLPS = {
    "gated": partial(make_mlp, (WIDE, 24, WIDE), bias=False),
    "gated, uneven, biases": partial(make_mlp, (WIDE, 17, 5), "geglu"),
    "gated, recomputed": partial(make_mlp, (WIDE, 17, 5), recompute=True),
    "gated, transposed": partial(make_mlp, (WIDE, 17, 5), transposed=True),
    "without a gate": partial(make_mlp, (5, 13, 7), "gelu_tanh"),
    "without a gate, transposed, recomputed": partial(make_mlp, (5, 13, 7), "gelu", transposed=True, recompute=True),
    "last shards empty": partial(make_mlp, (6, 2, 1)),
}
SUM = {"reduction": "sum"}
HEADS = {
    "head": partial(make_head, (24, 5), SUM, bias=False),
    "head, uneven": partial(make_head, (11, 5), {"label_smoothing": 0.3, "soft_cap": 3.0, "z_loss": 0.05, **SUM}),
    "head, a token of the vocabulary is ignored": partial(make_head, (11, 5), {"ignore_index": 9, **SUM}),
    "head, transposed": partial(make_head, (11, 5), {"ignore_index": 1, **SUM}, transposed=True),
    "head, many tokens": partial(make_head, (11, 5), SUM, tokens=300),
    "head, last shards empty": partial(make_head, (5, 4), SUM),
}
EXPERTS = {
    "experts": make_experts,
    "experts, biases": partial(make_experts, (7, 6, 4), biases=("up_bias", "down_bias")),
    "experts, transposed, recomputed": partial(make_experts, (7, 6, 4), transposed=True, recompute=True),
    "experts, last shards empty": partial(make_experts, (2, 6, 4), routing="sentinel"),
    "experts, all tokens to the last": partial(make_experts, routing="last"),
}
LINEARS = {
    "linear, transposed": partial(make_linear, transposed=True),
    "linear, transposed, last shards empty": partial(make_linear, (6, 2), transposed=True, bias=False),
}
OPERATIONS = MLPS | HEADS | EXPERTS | LINEARS


def rings(ranks):
    """Options of rings on all routes of weights and gradients, with single shards and groups; and route gather."""
    larger = list(range(2, ranks + 1))
    for number, (route, gradients) in enumerate(product(("ring", "direct"), ("chain", "direct"))):
        for group in (1, *few(larger[number % len(larger) :][:1], larger)):
            yield {"route": route, "gradient_route": gradients, "group": group, "prefetch": 0}
    yield {"route": "gather"}


def sent(ring):
    return [count(channel) for channel in ("weight", "gradient") for count in (ring.bytes_sent, ring.hops)]


@on_ranks(few([3, 4], [2, 3, 4]))
def test_results(ranks, cases):
    """The bytes and hops of groups are those of single shards."""
    expected = {}
    operations = {name: make() for name, make in OPERATIONS.items()}
    named = product(("gated, uneven, biases", "head, uneven", "experts, biases"), TOLERANCES)
    narrow = {(name, dtype): OPERATIONS[name](dtype=dtype) for name, dtype in named}
    for options in rings(ranks):
        with rtp_ext.Ring(timeout=60.0, **options) as ring:
            for name, operation in operations.items():
                before = sent(ring)
                for form in ("2d", "empty on rank 0"):
                    with cases.case(f"{name} {options} {form}"):
                        check_pass(operation, ring, form)
                with cases.case(f"bytes of {name} {options}"):
                    counts = [after - start for after, start in zip(sent(ring), before, strict=True)]
                    of_single_shards = (name, options.get("gradient_route"), ring.route)
                    assert counts == expected.setdefault(of_single_shards, counts)
            for name in MLPS:
                with cases.case(f"{name} {options}, many tokens"):
                    check_pass(operations[name], ring, "many")
            for (name, dtype), operation in narrow.items():
                with cases.case(f"{name} {options} {dtype}"):
                    check_pass(operation, ring, tolerances=TOLERANCES[dtype])


@on_ranks([3])
def test_training(rank, ranks, cases):
    for options in (each for each in rings(ranks) if each.get("group") != 1):
        with rtp_ext.Ring(timeout=60.0, **options) as ring:
            for name in ("gated, uneven, biases", "head, uneven", "experts, biases"):
                with cases.case(f"{name} {options}"):
                    train(OPERATIONS[name](), rank, ranks, True, torch.float64, ring=ring)


@on_ranks([3])
def test_frozen_weights_inputs_and_controls(cases):
    with rtp_ext.Ring(timeout=60.0, group=2) as ring:
        linear = make_linear(transposed=True)
        for operation in (
            linear,
            make_mlp((5, 7, 6), bias=False),
            make_head(),
            make_experts(routing="distinct", choices=5),
        ):
            check_frozen(cases, operation, ring)
            check_controls(operation, ring, (EXACT, EXACT))


@on_ranks([3])
def test_gradients_in_fewer_bits(cases):
    for options, tolerance in (({"gradient_route": "direct"}, 2e-2), ({"gradient_travel": "int8"}, 3e-2)):
        with rtp_ext.Ring(timeout=60.0, group=2, **options) as ring:
            for name in ("gated, uneven, biases", "gated, transposed", "head, transposed", "experts, biases"):
                with cases.case(f"{name} {options}"):
                    operation = OPERATIONS[name](dtype=torch.float32)
                    check_pass(operation, ring, tolerances=(tolerance, tolerance), reduce_dtype=torch.bfloat16)


def products(operation, ring, form):
    shards = operation.shards(ring.rank, ring.size)
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in operation.inputs(form, ring.rank, 0)]
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        y = operation.rotated(shards, inputs, ring=ring)
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        y.sum().backward()
    return tuple(
        sum(event.name in ("aten::addmm", "aten::mm") for event in each.events()) for each in (forward, backward)
    )


@on_ranks(few([2, 3], [2, 3, 4]))
def test_products(ranks, cases):
    """ceil(R / g) groups: of an MLP two products forward and four backward, of a head one and three."""
    for group in range(1, ranks + 1):
        with rtp_ext.Ring(timeout=60.0, group=group) as ring:
            groups = -(-ranks // group)
            for transposed in (False, True):
                with cases.case(f"MLP, group {group} {transposed}"):
                    mlp = make_mlp((WIDE, 24, WIDE), bias=False, transposed=transposed)
                    apart = 1 + (transposed and group == 1)  # gate and up
                    assert products(mlp, ring, "many") == ((1 + apart) * groups, (2 + 2 * apart) * groups)
                with cases.case(f"head, group {group} {transposed}"):
                    head = make_head((24, 5), bias=False, transposed=transposed)
                    again = (ranks - 1) % group == 0  # logits of the own shard, which is a group of its own
                    assert products(head, ring, "2d") == (groups, 3 * groups + again)


@on_ranks(few([3], [2, 3, 4]))
def test_one_whole_product(rank, ranks, cases):
    """All shards in one group: the bits are those of products with whole weights."""
    for route in ("ring", "direct"):
        with rtp_ext.Ring(timeout=60.0, group=ranks, route=route) as ring:
            operation = make_mlp((WIDE, 24, 40), "reglu", torch.float32, bias=False)
            whole = operation.parameters
            x = random(150, WIDE, dtype=torch.float32, seed=5).requires_grad_()
            y = operation.rotated(operation.shards(rank, ranks), [x], ring=ring)
            both = x.detach() @ torch.cat([whole["gate"], whole["up"]]).t()
            turned = whole["down"].t().contiguous()  # as it travels
            gate, up = both.chunk(2, 1)
            with cases.case(f"{route} output"):
                assert torch.equal(y, (F.relu(gate) * up) @ turned)
                assert_same(y, operation.plain(whole, [x]), 1e-6, "output")
            dy = random(150, 40, dtype=torch.float32, seed=3)
            (dx,) = torch.autograd.grad(y, x, dy)
            d_values = dy @ turned.t()
            d_both = torch.cat([d_values * up * (gate > 0), d_values * F.relu(gate)], 1)
            with cases.case(f"{route} dx"):
                assert torch.equal(dx, d_both @ torch.cat([whole["gate"], whole["up"]]))


HIDDEN = (60, 120)


class Model(nn.Module):
    """MLPs of several sizes."""

    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.mlps = nn.Sequential(
            *(nn.Sequential(nn.Linear(30, size), nn.GELU(), nn.Linear(size, 30)) for size in hidden)
        )

    def forward(self, x):
        return self.mlps(x)


@on_ranks(few([3], [3, 4]))
def test_layers_ahead_with_transposed_shards_of_one_row_or_none(rank, ranks, cases):
    """Sent ahead, and with late gradients: steps of SGD as of one process on the batches of all ranks."""
    hidden = (2 * ranks - 3, 3, 11)  # of the last ranks, shards have one hidden feature, or none
    for options in ({"group": 2}, {"route": "gather"}, {"group": 2, "late_gradients": 2, "transport": "tcp"}):
        torch.manual_seed(0)
        plain = Model(hidden).double()
        with rtp_ext.Ring(timeout=60.0, **options) as ring, cases.case(f"{options}"):
            model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring)
            both = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (plain, model)]
            for step in range(4):
                batches = [random(7, 30, dtype=torch.float64, seed=10 * step + each) for each in range(ranks)]
                loss = model(batches[rank]).square().mean()
                loss.backward()
                losses = [plain(batch).square().mean() for batch in batches]
                (sum(losses) / ranks).backward()
                assert_same(loss, losses[rank], 1e-10, f"loss of step {step}")
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
            assert ring.prefetched()[1] > 0, "control: shards were sent ahead"


def test_the_pool_is_the_footprint():
    """To the byte: slots of groups, and the copies of transposed shards."""
    native = rtp_ext._native
    operations = [
        native.OperationFacts(
            "mlp",
            [native.ParameterFacts(*each) for each in (((hidden, 30),), ((hidden,),), ((30, hidden), 1), ((30,),))],
        )
        for hidden in HIDDEN
    ]
    sizes = set()
    for ranks, route, gradients in product((2, 3, 5), ("ring", "direct"), ("chain", "direct")):
        for group, dtype in product(range(1, ranks + 1), (torch.float32, torch.bfloat16)):
            ring = rtp_ext.Ring.emulated(ranks, group=group, route=route, gradient_route=gradients)
            narrow = {"param_dtype": dtype, "reduce_dtype": dtype} if dtype != torch.float32 else {}
            policy = torch.distributed.fsdp.MixedPrecisionPolicy(**narrow)
            model = rtp_ext.fully_rotate(Model(), mesh=ring, mp_policy=policy)
            for _ in range(STEADY):
                model(torch.ones(3, 30, requires_grad=True)).sum().backward()
            planned = native.footprint(
                operations,
                **dict(ranks=ranks, in_place=False, sends_anywhere=True, receives_anywhere=True, slot_cap=0),
                **dict(cast=bool(narrow), compute_bytes=dtype.itemsize, reduce_bytes=dtype.itemsize),
                **dict(route=route, gradient_route=gradients, group=group, gradients_apart=True),
                look_ahead=None,
            )
            assert_pool(ring, planned, f"{ranks} ranks, group {group}, {route}, {gradients}, {dtype}")
            sizes.add((planned.weight.bytes, dtype))
    assert len(sizes) > 6, "control: groups are of other sizes"
