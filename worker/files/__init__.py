"""A model's files: where they are, what their headers and configurations say, how they are transferred."""
