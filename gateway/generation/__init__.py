"""Serves completions in any API: one wire request, one stream of typed events, and a dialect on both sides."""
