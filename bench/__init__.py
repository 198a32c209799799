"""Benchmarks of the worker and the router, and the models they need."""
