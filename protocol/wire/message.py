"""What all messages of the wire have in common."""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything that is sent as one NATS message."""
