"""What this package adds to torch itself: rules of DTensor parameters and optimizers, and of compilers."""
