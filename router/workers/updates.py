"""The effects of a worker's message on requests placed earlier."""

from typing import NamedTuple

from tokenbus.protocol.wire import internal
from tokenbus.router.workers.event_log import AppliedSnapshot
from tokenbus.router.workers.worker import Worker


class FleetUpdate(NamedTuple):
    """The effects of one message; empty for most."""

    worker: Worker | None = None
    """The incarnation that sent the message, unless it is unknown or refused."""
    entries: tuple[internal.Events, ...] = ()
    """Entries of its event log that are now in order, with nothing missing before them."""
    finished: tuple[str, ...] = ()
    """Keys of requests that have ended."""
    lost: Worker | None = None
    """The incarnation superseded by a newer one: it gave up its streams."""
    left: bool = False
    """The worker has stopped, and has ended all its streams itself."""
    snapshot: AppliedSnapshot | None = None
    """The snapshot that has just closed a gap."""
    refused: str | None = None
    """Why the card was refused; None if the same incarnation was refused before."""
