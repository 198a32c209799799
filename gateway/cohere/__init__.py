"""Endpoints in the form of Cohere and Jina."""
