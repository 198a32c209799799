"""The commands that get models, load them in running workers, and let them go."""
