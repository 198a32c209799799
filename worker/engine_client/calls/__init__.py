"""Calls to an engine beside its streams."""
