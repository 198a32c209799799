"""Puts load on a running system and measures what its clients see. docs/bench.md explains the numbers."""
