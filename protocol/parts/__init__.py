"""Sends messages that are larger than the broker allows in parts."""
