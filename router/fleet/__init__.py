"""Everything a router knows about its workers, and where it learns it. Pure."""
