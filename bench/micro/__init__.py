"""Benchmarks of single parts in one process."""
