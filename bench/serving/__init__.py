"""Benchmarks of the whole system, from the client's request to the last chunk."""
