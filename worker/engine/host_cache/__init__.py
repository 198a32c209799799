"""Copies of blocks and checkpoints that outlive the engine: slots, in memory or in a file, owned by the frontend."""
