"""The connection to the broker: what may be expected of it, nats-py hardened to keep to that, and who a process
is there."""
