"""Times of one layer and of a step, and what they say about overlap."""
