"""Closed forms as others published them."""
