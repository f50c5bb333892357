"""Rotated operations: what travels, what it takes of memory, and how long it takes."""
