"""How strategies take turns: one strategy of a run, those of other packages, whether these compute the same,
and what the paper says of its method."""
