"""The planner against runs, published ones and our own, and the pages that say so."""
