"""Parameters sharded over a ring: how they are cut, initialised, loaded and gathered."""
