"""KV blocks that workers of one model fetch from each other instead of computing them."""
