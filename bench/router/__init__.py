"""Benchmarks of the router: its index of prefixes, its choice of workers and what it costs in a whole system."""
