"""Accepted requests: tokens become text, text becomes numbered chunks, chunks are kept until no client can need
them."""
