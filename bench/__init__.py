"""Benchmarks of the worker and the router, and the models and traces that they need."""
