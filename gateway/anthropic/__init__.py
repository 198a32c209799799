"""Anthropic's API: turns its requests into the wire's, and chunks into its messages, events and errors."""
