"""Chooses a worker for each request: which prefixes the workers of a model hold, what each would cost, and policies.

Pure."""
