"""Reads tool calls: three kinds of calls, with values in models' notations, rewritten as JSON."""
