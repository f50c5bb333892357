"""Inputs of the planner: model, cluster and strategy."""
