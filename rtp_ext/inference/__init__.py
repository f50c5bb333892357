"""Models that compute forwards only, with weights spread over ranks that never wait for each other."""
