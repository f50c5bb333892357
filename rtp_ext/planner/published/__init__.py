"""Published closed forms."""
