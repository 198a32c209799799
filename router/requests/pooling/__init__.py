"""Requests with one answer and no stream: embeddings and ranked documents."""
