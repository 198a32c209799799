"""Requests in a router, from their receipt to a worker's accept or to a terminal sent by the router."""
