"""Chooses a worker for each request: the prefixes that a model's workers hold, the cost at each worker, and policies.

Pure."""
