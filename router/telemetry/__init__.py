"""The metrics of a router."""
