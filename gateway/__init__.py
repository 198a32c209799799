"""The OpenAI-compatible HTTP API of a Tokenbus system: a NATS client like any other."""

if __name__ != "tokenbus.gateway":
    raise ImportError("import tokenbus.gateway: gateway is a folder of the repository, not a package of its own")
