"""Measured training steps, and calibration of the time model."""
