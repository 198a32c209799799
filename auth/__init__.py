"""Lets plain NATS clients in by their API keys: answers the broker's auth callout, and closes connections that a key no
longer allows."""

if __name__ != "tokenbus.auth":
    raise ImportError("import tokenbus.auth: it is not a package of its own")
