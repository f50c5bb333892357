"""Command line options that several benchmarks share."""
