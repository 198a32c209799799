"""Fetches models from the Hub into its cache before an engine loads them. Nothing here imports an engine's library."""
