"""Times of one layer and of a training step, and measures of overlap."""
