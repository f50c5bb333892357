"""Rotated operations in graphs of torch.compile."""
