"""The contract between clients, routers and workers: messages, encoding, subjects, errors, limits, block hashes."""
