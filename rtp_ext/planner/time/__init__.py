"""How long a step takes."""
