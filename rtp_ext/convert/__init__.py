"""Whole models: `fully_rotate`, and what its conversion leaves in a model."""

from rtp_ext.convert.model import fully_rotate, outer_of, ring_of

__all__ = ["fully_rotate", "outer_of", "ring_of"]
