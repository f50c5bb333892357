"""The facts of operations (csrc/schedule/operations.h), which explain and the planner count with, against the bytes
that the engine sends: weights in forward, weights in backward, gradients."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from grids import few
from harness import on_ranks
from operation_checks import loss
from operations.bundles import BOTH, make_experts, make_head, make_mlp
from operations.layers import make_convolution, make_embedding, make_linear, make_linears
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import rtp_ext
from rtp_ext import _native
from rtp_ext.convert.plan.traffic import Passes, RingFacts, rotation_traffic
from rtp_ext.functional import rotated_linear_cross_entropy
from rtp_ext.functional._operation import OPERATIONS
from rtp_ext.parameters.sharding import frozen_of

FLOAT = torch.float32
# by key of the table: uses with sizes that no number of ranks divides, and the parameters that are not trained
USES: dict[str, list[tuple[Any, tuple[str, ...]]]] = {
    "linear": [
        (partial(make_linear, (23, 37)), ()),
        (partial(make_linear, (23, 37)), ("weight",)),
        (partial(make_linear, (23, 37), transposed=True), ("bias",)),
        (partial(make_linears, {"q": 17, "k": 5, "v": 1}, 11), ("k",)),
    ],
    "partial linear": [
        (partial(make_linear, (23, 37), dim=1), ()),
        (partial(make_linear, (23, 37), dim=1), ("weight",)),
    ],
    "embedding": [(partial(make_embedding, (29, 15)), ()), (partial(make_embedding, (29, 15), dim=1), ())],
    "mlp": [(make_mlp, ()), (partial(make_mlp, (5, 7, 6), "gelu"), ("down", "down_bias"))],
    "experts": [(partial(make_experts, biases=BOTH), ()), (make_experts, ("up",))],
    "linear cross-entropy": [
        (partial(make_head, (37, 5), {"reduction": "sum"}), ()),
        (partial(make_head, (37, 5), {"reduction": "sum"}, transposed=True), ("bias",)),
    ],
    "convolution": [(partial(make_convolution, "2d"), ())],
}
RINGS = [
    {},
    {"transport": "shm", "route": "direct", "gradient_halves": True},
    {"transport": "c10d", "slot_cap": 200},
    {"transport": "c10d", "route": "direct", "gradient_route": "direct", "group": 2},
    {"transport": "c10d", "travel": "int8", "gradient_route": "direct", "gradient_travel": "int8"},
    {"transport": "c10d", "route": "gather", "gradient_route": "direct", "gradient_travel": "int8", "slot_cap": 200},
    {"transport": "shm", "travel": "bfloat16", "slot_cap": 200},
]


def _sent(ring, forward):
    """What a forward and its backward send."""
    channels = ["weight", "gradient"]
    counts = [[ring.bytes_sent(channel) for channel in channels]]
    y = forward()
    counts.append([ring.bytes_sent(channel) for channel in channels])
    loss(y, ring.rank).backward()
    counts.append([ring.bytes_sent(channel) for channel in channels])
    (forwards, none), (backwards, gradients) = [
        [after - before for before, after in zip(*each, strict=True)] for each in pairwise(counts)
    ]
    assert none == 0
    return forwards, backwards, gradients


def _counted(ring, key, parameters, **more):
    passes = Passes(OPERATIONS[key], f"rotated_{key}", FLOAT, FLOAT, FLOAT, **more)
    traffic = rotation_traffic(passes, parameters, RingFacts.of(ring))
    return tuple(sum(getattr(each, what) for each in traffic) for what in ("forward", "backward", "gradients"))


def _compare(ring, key, forward, parameters, **more):
    actual = _sent(ring, forward)
    assert _counted(ring, key, parameters, **more) == actual
    other = _counted(ring, key, [*parameters, parameters[0]], **more)  # of some ranks, whose shards are not empty
    assert ring.size == 1 or any(ring.exchange(other != actual)), "control: a parameter more"


def _frozen(ring):
    """Yields uses with weights in blocks, and trained biases: the operation, its forward, its parameters."""
    generator = torch.Generator().manual_seed(ring.rank)
    x = torch.randn(5 + ring.rank, 24, generator=generator, requires_grad=True)
    config = MixtralConfig(hidden_size=24, intermediate_size=32, num_local_experts=5)
    models = {
        "linear": nn.Sequential(nn.Linear(24, 37)),
        "mlp": nn.Sequential(nn.Linear(24, 320, bias=False), nn.GELU(), nn.Linear(320, 37)),
        "experts": nn.Sequential(MixtralExperts(config)),
        "linear cross-entropy": nn.Sequential(nn.Linear(24, 131, bias=False)),
    }
    index = torch.arange(2 * len(x)).view(-1, 2) % 5
    for key, model in models.items():
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter.requires_grad_(name.endswith("bias")), std=0.1)
        rtp_ext.fully_rotate(model, mesh=ring, frozen="nf4")
        weights = [each for each in model.parameters() if frozen_of(each) is not None]
        parameters = [frozen_of(each).facts for each in weights]
        biases = [each for each in model.parameters() if each.requires_grad]
        parameters += [_native.ParameterFacts(each.shape) for each in biases]
        assert len(weights) == (2 if key in ("mlp", "experts") else 1)
        run = partial(model, x) if key in ("linear", "mlp") else partial(model[0], x, index, index / 9)
        if key == "linear cross-entropy":
            targets = index[:, 0]
            run = partial(rotated_linear_cross_entropy, x, weights[0], targets, ring=ring, reduction="sum")
        yield key, run, parameters


@on_ranks(few([3], [1, 2, 3, 4]))
@pytest.mark.parametrize("options", RINGS, ids=str)
def test_bytes_of_every_operation(rank, ranks, cases, options):
    options = options | ({"group": min(options["group"], ranks)} if "group" in options else {})
    with rtp_ext.Ring(timeout=30.0, **options) as ring:
        for key, uses in USES.items():
            for number, (make, frozen) in enumerate(uses):
                operation = make(dtype=FLOAT)
                names = list(operation.parameters)
                facts = [
                    _native.ParameterFacts(whole.shape, operation.cuts[name], trained=name not in frozen)
                    for name, whole in operation.parameters.items()
                ]
                shards = operation.shards(rank, ranks, [name for name in names if name not in frozen])
                inputs = [x.requires_grad_() if x.is_floating_point() else x for x in operation.inputs("2d", rank, 3)]
                with cases.case(f"{key} {number}"):
                    transposed = key == "linear" and operation.cuts[names[0]] == 1
                    run = partial(operation.rotated, shards, inputs, ring=ring, name=f"rotated_{key}")
                    _compare(ring, key, run, facts, transposed=transposed)
        if options.get("route") == "gather":  # refuses blocks
            return
        for key, run, parameters in _frozen(ring):
            with cases.case(f"{key}, in blocks"):
                _compare(ring, key, run, parameters, in_blocks=True)


def test_every_operation_of_the_table_is_here():
    """But for virtual copies of modules: python_tests/nn/test_flyweight_behaviour.py compares their bytes."""
    assert set(USES) == set(OPERATIONS) - {"flyweight"}
