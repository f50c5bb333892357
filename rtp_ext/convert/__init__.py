"""Conversion of whole models: `fully_rotate`, and the scopes, hooks and methods that it installs in a model."""

from rtp_ext.convert.model import fully_rotate, outer_of, ring_of

__all__ = ["fully_rotate", "outer_of", "ring_of"]
