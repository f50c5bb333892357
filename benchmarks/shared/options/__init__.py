"""What several benchmarks can be asked for."""
