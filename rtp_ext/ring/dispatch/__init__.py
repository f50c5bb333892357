"""Tensors and dispatch modes with rules of their own: wrapper subclasses, selective activation checkpointing."""
