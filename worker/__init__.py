"""The worker: a front that owns NATS and the streams, and an engine process that owns the device."""

if __name__ != "tokenbus.worker":
    raise ImportError("import tokenbus.worker: worker is a folder of the repository, not a package of its own")
