"""Everything that clients, routers and workers share: the wire, the connection to the broker, prompts, telemetry."""

if __name__ != "tokenbus.protocol":
    raise ImportError("import tokenbus.protocol: it is not a top-level package")
