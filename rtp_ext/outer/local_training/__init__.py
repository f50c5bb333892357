"""Local training: replicas train on their own gradients and combine weights after steps of the optimizer."""
