"""The plan of a conversion as data: the movement of each parameter, and its bytes."""
