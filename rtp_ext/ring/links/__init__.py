"""How ranks reach each other: where they are, over which process groups and transport."""
