"""Models that a worker loads when they are asked for, and unloads to make room for others."""
