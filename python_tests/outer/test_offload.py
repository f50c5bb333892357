"""Shards that stay on the host. CPU ranks stand for a device: see offload_cases.Negated."""

from harness import Cases, run_ranks
from offload_cases import offload_cases


def _four(rank, ranks):
    cases = Cases()
    offload_cases(rank, ranks, cases)
    cases.finish()


def test_four_ranks():
    run_ranks(_four, 4, timeout=300.0)
