"""GGUF models that make one row of numbers of an input: embeddings and scores."""
