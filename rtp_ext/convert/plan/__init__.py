"""The plan of a conversion as data: what becomes of each parameter, and the bytes that it costs."""
