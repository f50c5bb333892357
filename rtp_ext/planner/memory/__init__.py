"""Memory of each GPU."""
