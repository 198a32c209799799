"""Lets workers of one model fetch KV blocks from each other instead of computing them."""
