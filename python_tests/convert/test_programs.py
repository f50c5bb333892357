"""Random programs on a ring, against the same in one process. More of them: `make soak`."""

import programs
import pytest
import torch
from harness import Cases, run_ranks

import rtp_ext


def _run(rank, ranks, seeds):
    cases = Cases()
    for seed in seeds:
        with cases.case(f"seed {seed}"):
            programs.check(rank, ranks, seed)
    cases.finish()


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(4)), (3, range(3)), (4, range(2))])
def test_random_programs(ranks, seeds):
    run_ranks(_run, ranks, seeds)


def _wrong(rank, ranks):
    """A control: a weight that is wrong by a ten-thousandth is found."""
    program = programs.Program.draw(1, ranks)
    program.dtype, program.actions = torch.float64, ["step", "evaluate"]  # less than float32 is allowed
    run = programs.Run(rank, program)
    with torch.no_grad():
        run.plain.embed.weight.mul_(1 + 1e-4)
    with pytest.raises((AssertionError, rtp_ext.RotationError)) as caught:
        run.run()
    run.close()
    return str(caught.value)


def test_a_wrong_number_is_found():
    """By a rank that has a batch; the other may hear of it from its neighbour."""
    assert any("loss of micro-batch" in told and "exceeds" in told for told in run_ranks(_wrong, 2))
    drawn = [programs.Program.draw(seed, 4) for seed in range(200)]
    kinds = {kind for program in drawn for kind, *_ in program.blocks}
    actions = {action for program in drawn for action in program.actions}
    assert len(kinds) == 6 and actions == set(programs.ACTIONS)
