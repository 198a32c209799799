"""The HTTP APIs of a Tokenbus system, OpenAI's and Anthropic's, implemented on an ordinary NATS client."""

if __name__ != "tokenbus.gateway":
    raise ImportError("import tokenbus.gateway: it is not a package of its own")
