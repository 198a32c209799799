"""The OpenAI-compatible HTTP API of a Tokenbus system: a NATS client like any other."""
