"""Tells an application how its client disconnected before the response was complete."""

import enum
from collections.abc import MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
"""The scope of a request, as ASGI has it."""
_KEY = "tokenbus.disconnect"


class Disconnect(enum.StrEnum):
    """The ways in which a connection ends before its response is complete."""

    GONE = "gone"
    """The client has closed it."""
    SLOW = "slow"
    """For too long little or nothing could be written to it: the client does not read, or its machine does not
    answer."""


def note_disconnect(scope: Scope, disconnect: Disconnect) -> None:
    """Records how a request's connection ended; the server calls this before it tells the application."""
    scope[_KEY] = disconnect


def disconnect_of(scope: Scope) -> Disconnect | None:
    """Returns how the connection of a request ended, or None if its response was complete or it is still open."""
    disconnect: Disconnect | None = scope.get(_KEY)
    return disconnect
