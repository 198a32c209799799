"""Reads tool calls: three kinds of calls, and values in the notations of models, written again as JSON."""
