"""Some ranks run a model as graphs and others eagerly, as happens when only one rank reaches torch's recompile_limit:
hops and gathers are the same, so nothing hangs, and all train like one process."""

import torch
from harness import on_ranks
from models import batch_loss, make_model, mean_loss
from reference import assert_same, differs, whole_gradients

import rtp_ext


@on_ranks(2)
def test_compiled_on_one_rank_alone(rank, ranks, cases):
    for checkpointed, inside, odd in ((True, True, 0), (False, False, 1)):
        with cases.case(f"checkpointed {checkpointed}, inside {inside}, compiled on rank {odd}"):
            torch._dynamo.reset()
            plain = make_model(blocks=2, checkpointed=checkpointed, inside=inside)
            model = make_model(blocks=2, checkpointed=checkpointed, inside=inside)
            for each in (plain, model):
                each.blocks[1].checkpointed = None
            rtp_ext.fully_rotate(model, transport="shm", timeout=10.0)
            call = torch.compile(model, backend="eager") if rank == odd else model
            for step in range(2):
                for each in (model, plain):
                    each.zero_grad()
                loss = batch_loss(call, rank, step)
                loss.backward()
                mean_loss(plain, ranks, step).backward()
                with torch.no_grad():
                    assert_same(batch_loss(call, rank, 9), batch_loss(plain, rank, 9), 1e-10, "evaluated")
                found = whole_gradients(model)
                for name, expected in whole_gradients(plain).items():
                    assert_same(found[name], expected, 1e-9, f"step {step}: {name}")
            assert differs(found["norm.weight"], plain.norm.weight.grad * (1 + 1e-6), 1e-9), "control"
            rtp_ext.ring_of(model).close()
