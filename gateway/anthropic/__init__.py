"""Anthropic's API: its requests become the wire's, chunks become its messages, events and errors."""
