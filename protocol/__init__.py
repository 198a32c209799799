"""What clients, routers and workers must agree on: messages, subjects, codec, errors, limits, hashing, prompts."""

if __name__ != "tokenbus.protocol":
    raise ImportError("import tokenbus.protocol: protocol is a folder of the repository, not a package of its own")
