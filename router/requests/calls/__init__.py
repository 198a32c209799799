"""Clients' calls: requests with one reply and no stream, such as those for embeddings and for tokens."""
