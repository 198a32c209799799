"""Everything a router knows about its workers, and how it learns it. Pure."""
