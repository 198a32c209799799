"""The worker: a front that owns NATS and the streams, and an engine process that owns the device."""
