"""Tables and pages, from lines of results."""
