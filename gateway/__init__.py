"""The OpenAI-compatible HTTP API of a Tokenbus system, which is a NATS client like any other."""

if __name__ != "tokenbus.gateway":
    raise ImportError("import tokenbus.gateway: it is no package of its own")
