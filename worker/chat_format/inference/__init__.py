"""Reads chat formats out of chat templates."""
