"""Grammars of answers: what a model may write, out of its chat format, the tools and their schemas."""
