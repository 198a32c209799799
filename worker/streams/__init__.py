"""Accepted requests: tokens become text, text becomes numbered chunks, chunks are kept until nobody can need them."""
