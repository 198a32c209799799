"""Tells an application how its client was lost before the response was complete; pure."""

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
    """Nothing, or too little, could be written to it for too long: the client does not read, or its machine does not
    answer."""


def note_disconnect(scope: Scope, disconnect: Disconnect) -> None:
    """Notes how the connection of a request ended; the server does so before the application hears of it."""
    scope[_KEY] = disconnect


def disconnect_of(scope: Scope) -> Disconnect | None:
    """Returns how the connection of a request ended, or None if its response was complete or it is still open."""
    disconnect: Disconnect | None = scope.get(_KEY)
    return disconnect
