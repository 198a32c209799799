"""Finding a model's files and what they advise."""
