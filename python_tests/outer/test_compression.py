"""AllReduce with compressors, on 4 x 1 and 2 x 2 ranks."""

from compression_cases import compressed_cases, compressed_state_cases
from harness import Cases, run_ranks


def _four(rank, ranks, folder):
    cases = Cases()
    compressed_cases(rank, ranks, cases)
    compressed_state_cases(rank, ranks, cases, folder)
    cases.finish()


def test_four_ranks(tmp_path):
    run_ranks(_four, 4, str(tmp_path), timeout=300.0)
