"""Parses a model's output by its format: from tokens to reasoning, content and tool calls."""
