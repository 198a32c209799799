"""The settings of a worker's frontend."""
