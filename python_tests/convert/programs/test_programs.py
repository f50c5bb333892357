"""A hundred random programs on a ring, half of them outside of sweeps, against the same in one process. More of them,
none brief: `make soak`."""

import programs
import pytest
import torch
from grids import SWEEP
from harness import Cases, run_ranks

import rtp_ext

NUMBERS = [(2, 4, 70), (3, 3, 17), (4, 2, 4)]  # ranks, and how many programs, and how many brief ones


def _run(rank, ranks, whole, brief):
    cases = Cases()
    for short, seeds in ((False, range(whole)), (True, range(1000, 1000 + brief))):
        for seed in seeds:
            with cases.case(f"seed {seed}, {ranks} ranks, brief={short}"):
                programs.check(rank, ranks, seed, short)
    cases.finish()
    return cases.count


@pytest.mark.parametrize(
    ("ranks", "whole", "brief"), NUMBERS if SWEEP else [(r, -(-n // 2), m // 2) for r, n, m in NUMBERS]
)
def test_random_programs(ranks, whole, brief):
    assert run_ranks(_run, ranks, whole, brief, timeout=300.0) == [whole + brief] * ranks


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
    """The error of a rank with a batch; the other rank may get it from its neighbour."""
    assert any("loss of micro-batch" in told and "exceeds" in told for told in run_ranks(_wrong, 2))


def test_what_is_drawn():
    assert sum(whole + brief for _, whole, brief in NUMBERS) == 100
    brief = [programs.Program.draw(seed, 2, brief=True) for seed in range(1000, 1070)]
    whole = [programs.Program.draw(seed, 4) for seed in range(200)]
    for drawn, more, values in ((whole, {"turns"}, 37), (brief, set(), 36)):
        kinds = {kind for program in drawn for kind, *_ in program.blocks}
        actions = {action for program in drawn for action in program.actions}
        assert len(kinds) == 6 and actions == {*programs.ACTIONS} | more
        options = {(name, str(value)) for program in drawn for each in program.options for name, value in each.items()}
        assert len(options) == values, "each value of each option"
