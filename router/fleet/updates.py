"""The effects that a worker's message has on requests that were placed earlier."""

from typing import NamedTuple

from tokenbus.protocol.wire import messages
from tokenbus.router.fleet.event_log import AppliedSnapshot


class LostWorker(NamedTuple):
    """An incarnation of a worker that is over, or seems to be."""

    card: messages.Card
    was_behind: bool
    """Its event log had a gap, so its streams may have published more than this router knows."""


class FleetUpdate(NamedTuple):
    """The effects of one message; those of most messages are empty."""

    first_token_sent: tuple[str, ...] = ()
    """Keys of requests that have published tokens."""
    finished: tuple[str, ...] = ()
    """Keys of requests that have ended."""
    lost: LostWorker | None = None
    """The incarnation that a newer one has replaced: it gave up its streams."""
    left: bool = False
    """The worker has stopped, and has ended all its streams itself."""
    snapshot: AppliedSnapshot | None = None
    """The snapshot that has just closed a gap."""
    refused: str | None = None
    """Why the card was refused; None if the same incarnation was refused before."""
