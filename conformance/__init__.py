"""Holds a running system against the wire's rules, one by one, for people who write their own parts of it.

Nothing here uses the project's message structs: it reads and writes raw JSON and MessagePack, so that it would notice
if they were wrong.
"""

if __name__ != "tokenbus.conformance":
    raise ImportError("import tokenbus.conformance: it is no package of its own")
