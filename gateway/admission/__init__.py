"""Admits, authenticates, logs and measures requests: keys, tenants, aliases, limits."""
