"""Grammars of answers: what a model may write, given its chat format, the tools and their schemas."""
