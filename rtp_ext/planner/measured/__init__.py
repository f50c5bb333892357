"""Measured runs, and constants fitted to them."""
