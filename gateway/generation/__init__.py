"""Serves completions in any API: one request of the wire, one stream of typed events, and a dialect on both sides."""
