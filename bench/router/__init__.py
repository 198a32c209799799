"""Benchmarks of the router: its index of prefixes, its choice of workers and its cost in a whole system."""
