"""Replicas that train apart and come together after steps of the optimizer."""
