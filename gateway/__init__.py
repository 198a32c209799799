"""The HTTP APIs of a Tokenbus system, OpenAI's and Anthropic's, over a NATS client like any other."""

if __name__ != "tokenbus.gateway":
    raise ImportError("import tokenbus.gateway: it is no package of its own")
