"""The worker: a frontend owns the broker connection and the streams, an engine process owns the device."""

if __name__ != "tokenbus.worker":
    raise ImportError("import tokenbus.worker: it is not a package of its own")
