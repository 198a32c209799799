"""The contract between a worker's bus side and its engines: requests, outputs, settings, errors."""
