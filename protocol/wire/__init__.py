"""The contract: messages, their encoding, subjects, errors, limits and block hashes."""
