"""The worker: a frontend that owns NATS and the streams, and an engine process that owns the device."""

if __name__ != "tokenbus.worker":
    raise ImportError("import tokenbus.worker: it is no package of its own")
