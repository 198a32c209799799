"""Copies of blocks that outlive the engine: slots in memory, or in a file, that the frontend owns."""
