"""Rotated operations: their shards, memory and time."""
