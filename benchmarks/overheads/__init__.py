"""Ranks that fail, long runs, sanitizers, and the page of what came of them."""
