"""The connection to the broker: its guarantees, nats-py hardened to keep them, credentials and TLS."""
