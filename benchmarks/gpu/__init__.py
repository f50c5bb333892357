"""Benchmarks that need a GPU, and predictions for GPUs."""
