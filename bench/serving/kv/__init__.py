"""Blocks of keys and values: copied, fetched, kept and found again."""
