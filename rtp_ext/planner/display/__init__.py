"""Reports as text and as figures."""
