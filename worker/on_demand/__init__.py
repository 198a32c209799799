"""Models that a worker loads when a request names them, and unloads to make room for others."""
