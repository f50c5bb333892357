"""Random training programs on a ring and in one process: a seed determines a program, and both runs must agree.

    check(rank, ranks, seed)
    check(rank, ranks, seed, brief=True)
    check(rank, ranks, seed, wide=True)

A program is a model of random blocks (some checkpointed, some frozen, the head tied or not), a ring with random options
on a random mesh, and a list of actions: steps of one or more micro-batches, of different sizes and empty on some ranks,
evaluations, forwards without a backward, parameters that are frozen or thawed, clipping, a state dict that is saved and
loaded into a model with other options, ranks that are late. A brief program has a single block of one of few sizes, and
two actions, since DTensor takes long for every shape that is not in its caches.

A wide program draws more: replicas with any outer policy, compared with plain workers that follow its algorithm;
torch.compile with several backends; a moving average of the weights that is evaluated; modules that are swapped after
conversion; micro-batches that are not reduced; shards that stay on the host; gradient routes; the form of the
optimizer's step.
"""

from programs.drawn import ACTIONS, Program
from programs.run import Run

__all__ = ["ACTIONS", "Program", "Run", "check"]


def check(rank: int, ranks: int, seed: int, brief: bool = False, wide: bool = False) -> int:
    """Runs the program of `seed`. Returns the number of its actions. Raises AssertionError if a number differs."""
    run = Run(rank, Program.draw(seed, ranks, brief, wide))
    try:
        run.run()
    except AssertionError:
        raise
    except Exception as error:
        raise RuntimeError(f"{run.program}: {type(error).__name__}: {error}") from error
    finally:
        run.close()
    return len(run.program.actions)
