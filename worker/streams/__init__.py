"""Accepted requests: their outputs become numbered chunks, which are kept until no client can need them."""
