"""Checks of what clients, routers and workers send."""
