"""What clients, routers and workers must agree on: messages, subjects, codec, errors, limits, hashing, prompts."""

if __name__ != "tokenbus.protocol":
    raise ImportError("import tokenbus.protocol: it is no package of its own")
