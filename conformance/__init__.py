"""Checks a running system against the rules of docs/wire.md, for people who write clients, routers or workers.

It reads and writes raw JSON and MessagePack and uses none of the project's own message types, so that mistakes in them
are found too."""

if __name__ != "tokenbus.conformance":
    raise ImportError("import tokenbus.conformance: it is not a package of its own")
