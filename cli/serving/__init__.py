"""Commands that serve, and how `tokenbus up` keeps its processes running."""
