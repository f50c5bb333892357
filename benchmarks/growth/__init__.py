"""How costs grow with layers, ranks and parameters."""
