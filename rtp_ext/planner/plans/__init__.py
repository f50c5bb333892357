"""The fastest plan that fits, and when rotation wins."""
