"""A fixed sample of wide random programs: outer policies, compilers, moving averages, swapped modules, transports and
routes at once; and of those with a fault on one rank. More of both: `make soak`."""

import programs
import pytest
import torch
from grids import few
from harness import on_ranks, run_ranks
from programs import faults
from programs.drawn import BACKENDS, POLICIES, SWAPS, TWINS, WIDE_ACTIONS

# Ranks, and seeds of brief programs: each policy once at least, and one compiled program. `make sweep` runs more.
SAMPLE = {2: (3, 10, 23), 4: (10, 18, 19, 20, 22), 6: (0, 3, 11, 12, 22)}
FAULTS = few([(4, 0), (3, 3)], [(ranks, seed) for ranks in (2, 3, 4) for seed in range(20)])


@on_ranks(SAMPLE, timeout=3000.0)
def test_wide_programs(rank, ranks, cases):
    seeds = few([*SAMPLE[ranks]], [*range(100)])
    brief = True
    for seed in seeds:
        with cases.case(f"seed {seed}, {ranks} ranks"):
            torch._dynamo.reset()
            programs.check(rank, ranks, seed, brief, wide=True)


@pytest.mark.parametrize(("ranks", "seed"), FAULTS)
def test_a_fault_of_one_rank_is_told_by_the_others(ranks, seed):
    found = faults.problems(seed, run_ranks(faults.plant, ranks, seed, timeout=120.0, lost=faults.lost(seed, ranks)))
    assert not found, "\n".join(found)


# -- controls ----------------------------------------------------------------------------------------------------------


CHANGES = [
    *((policy, "rule") for policy in ("local SGD", "gossip", "DiLoCo")),
    ("top-k", "compressor"),
    ("zero", "twin"),
    ("all-reduce", "weight"),
    ("all-reduce", None),
]


@on_ranks(2)
def test_wrong_numbers_are_found(rank, ranks, cases):
    """The plain workers omit the rule between replicas or the moving average, or a weight is wrong by a
    ten-thousandth."""
    for policy, change in CHANGES:
        program = programs.Program.draw(1, ranks, brief=True, wide=True)
        program.dtype, program.policy, program.replicas, program.backend = torch.float64, policy, 2, None
        program.actions, program.frozen, program.twin = ["step", "step", "evaluate"], set(), "averaged"
        for options in program.options:
            options["in_place"] = options["offload"] = False
        run, found = programs.Run(rank, program), []

        def compare(*what, run=run, found=found, **floor):  # and goes on, so that no rank waits for another
            try:
                programs.Run.compare(run, *what, **floor)
            except AssertionError as error:
                found.append(str(error))

        run.compare = compare
        if change == "rule":
            run.workers.rule = lambda workers: None
        elif change == "compressor":
            run.compressed = None
        elif change == "twin":
            run.twin.averaged[0].update_parameters = lambda model: None
        elif change == "weight":
            with torch.no_grad():
                run.plain.blocks[0].norm.weight.mul_(1 + 1e-4)
        run.run()
        run.close()
        told = [None] * ranks
        torch.distributed.all_gather_object(told, len(found))
        with cases.case(f"{policy}, another {change}"):
            assert any(told) == (change is not None), (told, found)


def test_faults_that_are_not_told_are_found():
    program = programs.Program.draw(0, 3, wide=True)
    fault = faults.Fault.draw(program)
    good = f"exchange; who failed: global rank {fault.rank} (no answer)"
    other = f"exchange; who failed: global rank {(fault.rank + 1) % 3} (no answer)"
    for kind, text, seconds, wrong in (
        ("RingTimeout", good, 2.0, False),
        ("RingTimeout", other, 2.0, True),
        ("RingTimeout", good, 60.0, True),
        ("KeyError", good, 2.0, True),
        ("none", "6 steps without an error", 2.0, True),
    ):
        told = [None if rank == fault.rank else faults.Told(rank, kind, text, seconds) for rank in range(3)]
        assert bool(faults.problems(0, told)) == wrong, (kind, text, seconds)


def test_what_is_drawn():
    drawn = [programs.Program.draw(seed, ranks, wide=True) for seed in range(100) for ranks in (2, 3, 4, 6)]
    assert {program.policy for program in drawn} == set(POLICIES)
    assert {program.backend for program in drawn} == set(BACKENDS) and {program.twin for program in drawn} == set(TWINS)
    assert {action for program in drawn for action in program.actions} == {*WIDE_ACTIONS, "turns"} and len(SWAPS) == 5
    assert {(program.replicas, program.ring) for program in drawn} >= {(2, 3), (3, 2), (2, 2), (4, 1), (1, 3)}
    faulty = [faults.Fault.draw(program) for program in drawn]
    assert {fault.place for fault in faulty} == set(faults.PLACES)
    assert {fault.afterwards for fault in faulty} == set(faults.AFTERWARDS)
