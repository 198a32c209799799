"""A worker's frontend: the composition root, its replicas, and their settings and metrics."""
