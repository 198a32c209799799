"""What a router learns from a message of a worker, for requests that it placed earlier."""

from typing import NamedTuple

from tokenbus.protocol.wire import messages
from tokenbus.router.fleet.event_log import AppliedSnapshot


class LostWorker(NamedTuple):
    """One life of a worker that is over, or seems to be."""

    card: messages.Card
    was_behind: bool
    """What its streams had said is not known for certain."""


class FleetUpdate(NamedTuple):
    """What a message of a worker changed for requests placed earlier."""

    first_token_sent: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    lost: LostWorker | None = None
    """A new life has begun: the streams of this one were given up."""
    left: bool = False
    """The worker has withdrawn, and has ended all its streams itself."""
    snapshot: AppliedSnapshot | None = None
    """What the worker holds, after a gap in what was known."""
    refused: str | None = None
    """Why a card was not believed."""
