"""Finds a model by its name, and the engine that serves it. Nothing here imports an engine's library."""
