"""Tensor parallelism under rotation: against one process on the batches of all ring positions."""

from harness import Cases, run_ranks
from reference import assert_same, full
from tensor_models import (
    EXACT,
    Tiny,
    adamw,
    batch_loss,
    batch_number,
    replicated_activations,
    rotated,
    sequence_parallel,
    step_on,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


def check_training(model, mesh, plain, steps, stock):
    batch, batches = batch_number(mesh)
    optimizer, reference = adamw(model, stock), adamw(plain, stock=True)
    for step in range(steps):
        losses = [batch_loss(plain, i, step) for i in range(batches)]
        gradients, norm = step_on(model, optimizer, batch_loss(model, batch, step), step == 0, stock)
        expected, expected_norm = step_on(plain, reference, sum(losses) / batches, step == 0, stock=True)
        for name, gradient in gradients.items():
            assert_same(gradient, expected[name], EXACT, f"{name} gradient")
        assert_same(norm, expected_norm, EXACT, f"norm of step {step}")
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(parameter), other, EXACT, name)


def _trains_as_one(rank, ranks, meshes):
    """The first of four ranks with torch's own optimizer and clipping of DTensors."""
    cases = Cases()
    for number, (shape, names, activations, embedding, tied, steps) in enumerate(meshes):
        with cases.case(f"{shape} {names} {activations.__name__} {embedding.__name__} tied {tied}"):
            model, mesh = rotated(shape, names, activations(embedding), tied)
            check_training(model, mesh, Tiny(tied), steps, stock=ranks == 4 and number == 0)
    cases.finish()


def test_four_ranks():
    run_ranks(
        _trains_as_one,
        4,
        [
            ((2, 2), ("ring", "tp"), sequence_parallel, RowwiseParallel, False, 4),
            ((2, 2), ("tp", "ring"), replicated_activations, RowwiseParallel, True, 3),
            ((2, 2), ("tp", "ring"), sequence_parallel, ColwiseParallel, False, 3),
        ],
    )


def test_six_ranks():
    run_ranks(
        _trains_as_one,
        6,
        [
            ((3, 2), ("ring", "tp"), sequence_parallel, ColwiseParallel, False, 4),
            ((2, 3), ("ring", "tp"), replicated_activations, RowwiseParallel, True, 3),
        ],
    )


def test_eight_ranks():
    case = ((2, 2, 2), ("replicas", "ring", "tp"), sequence_parallel, RowwiseParallel, False, 4)
    run_ranks(_trains_as_one, 8, [case])
