"""Search for the fastest plan that fits, and comparison of rotation with other plans."""
