"""AllReduce with compressors, on 4 x 1 and 2 x 2 ranks."""

from compression_cases import compressed_cases, compressed_state_cases
from harness import on_ranks


@on_ranks(4, timeout=300.0)
def test_four_ranks(rank, ranks, cases, tmp_path):
    folder = str(tmp_path)
    compressed_cases(rank, ranks, cases)
    compressed_state_cases(rank, ranks, cases, folder)
