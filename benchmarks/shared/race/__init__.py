"""How strategies take turns: one strategy of a run, those of other packages, and whether these compute the same."""
