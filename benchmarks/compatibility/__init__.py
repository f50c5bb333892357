"""Other people's frameworks and compilers, and versions of Python and torch."""
