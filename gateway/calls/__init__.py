"""Serves calls that get a single reply and generate nothing, in any API."""
