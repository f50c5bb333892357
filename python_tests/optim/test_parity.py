"""rtp_ext.optim.Muon on shards against torch's Muon with a float32 iteration on whole matrices in one process."""

import torch
from grids import few
from harness import on_ranks
from muon_cases import LONG, SHAPES, Pair

SETTINGS = [
    {},
    {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0, "ns_steps": 3},
    {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": (2.0, -1.5, 0.5)},
    {"adjust_lr_fn": "original", "lr": torch.tensor(0.1)},
]


@on_ranks(few([1, 3], [1, 2, 3, 4]))
def test_parity(ranks, ring, cases):
    for exchange in ("gram", "whole", "auto"):
        for settings in SETTINGS:
            with cases.case(f"{exchange} {settings}"):
                pair = Pair(ring, SHAPES, exchange=exchange, **{"lr": 0.5, **settings})
                for _ in range(3):
                    pair.take_steps(1)
                    pair.assert_alike()
        with cases.case(f"{exchange}, in float64"):
            pair = Pair(ring, SHAPES, torch.float64, exchange=exchange, lr=0.5)
            pair.take_steps(3)
            pair.assert_alike(1e-12)
        with cases.case(f"{exchange}, in bfloat16"):
            # One step of the last digit of a weight of 0.1 to 1, where an update falls between two of them.
            pair = Pair(ring, SHAPES, torch.bfloat16, exchange=exchange, lr=0.5, weight_decay=0.0)
            pair.take_steps(1)
            pair.assert_alike(2e-3)
    with cases.case("control: each shard by itself"):
        cut = [shape for shape in LONG if shape.blocks == 1 and len(shape.shape) == 2]
        pair = Pair(ring, cut, lr=0.5, apart=True)
        pair.take_steps(1)
        assert all(error > 0.01 for _, error in pair.errors()) or ranks == 1, pair.errors()
    with cases.case("the momentum counts once in a step of micro-batches"):
        pair = Pair(ring, LONG, lr=0.5)
        for _ in range(2):
            pair.optimizer.zero_grad()
            pair.stock.zero_grad()
            for _ in range(3):
                pair.gradients(1 / 3)
            pair.optimizer.step()
            pair.stock.step()
        pair.assert_alike()
    with cases.case("rounds of few bytes give the same bits"):
        pairs = [Pair(ring, SHAPES, lr=0.5) for _ in range(2)]
        pairs[1].optimizer._round_bytes = 300
        for pair in pairs:
            pair.take_steps(2)
        rounds = [sum(len(plan.rounds) for plan in pair.optimizer.plan().plans) for pair in pairs]
        assert rounds[0] < rounds[1] or ranks == 1
        for one, other in zip(*(pair.parameters for pair in pairs), strict=True):
            assert torch.equal(getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other))
    with cases.case("frozen parameters stay, and join later"):
        pair = Pair(ring, LONG[:3], lr=0.5)
        for step in range(3):
            pair.optimizer.zero_grad()
            pair.stock.zero_grad()
            pair.gradients()
            if step < 2:
                for frozen in (pair.parameters[1], *pair.expected[1]):
                    frozen.grad = None
            pair.optimizer.step()
            pair.stock.step()
        pair.assert_alike()
    with cases.case("more steps than the Gram form allows"):
        pair = Pair(ring, LONG, lr=0.5, ns_steps=7)
        pair.take_steps(1)
        pair.assert_alike()
        assert {row.exchange for row in pair.optimizer.plan().rows} <= {"whole", "local"}
    with cases.case("gradients whose squares overflow"):
        pair = Pair(ring, LONG, lr=0.5)
        pair.gradients(1e25)
        pair.optimizer.step()
        pair.stock.step()
        pair.assert_alike()
    with cases.case("gradients of zero"):
        pair = Pair(ring, LONG, lr=0.5)
        pair.gradients(0.0)
        pair.optimizer.step()
        pair.stock.step()
        assert all(torch.isfinite(getattr(p, "_local_tensor", p)).all() for p in pair.parameters)
        pair.assert_alike()
