"""Shards that stay on the host. CPU ranks stand for a device: see offload_cases.Negated."""

from harness import on_ranks
from offload_cases import offload_cases


@on_ranks(4, timeout=300.0)
def test_four_ranks(rank, ranks, cases):
    offload_cases(rank, ranks, cases)
