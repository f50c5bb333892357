"""What needs a GPU, or counts what would run on one."""
