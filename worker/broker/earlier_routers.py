"""Finds out whether there are routers of earlier versions, which take only a worker's own entries as signs of life.

No router says that it knows no beats. But each asks every new worker for a snapshot, since it misses an entry 0 (the
first one is 1), and so does each that starts, reconnects or finds a gap. Routers that know beats say so when they ask.
Whether one that does not is still there shows an empty message to the subject on which it wanted the snapshot: routers
ignore it, and the broker reports if nothing listens there any more."""

_WAIT_S = 3.0
"""Routers have this long to ask, after a start or a reconnect."""
_PROBE_INTERVAL_S = 2.0
_MAX_INBOXES = 1_024
"""Each router has one for each worker."""


class EarlierRouters:
    """The routers of earlier versions that a process knows, by the subjects on which they wanted snapshots. Times are
    seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._inboxes: dict[str, None] = {}
        """The subjects, the oldest first."""
        self._wait_until = now + _WAIT_S
        self._probed: str | None = None
        self._probe_at = now

    def __repr__(self) -> str:
        return f"<EarlierRouters, {len(self._inboxes)} inboxes>"

    def __len__(self) -> int:
        return len(self._inboxes)

    def are_none(self, now: float) -> bool:
        """Whether every router knows beats, as far as can be known."""
        return not self._inboxes and now >= self._wait_until

    def heard(self, inbox: str, now: float) -> None:
        """Notes that a router of an earlier version wants a snapshot there."""
        if not self._inboxes:
            self._probe_at = now + _PROBE_INTERVAL_S
        self._inboxes.pop(inbox, None)
        self._inboxes[inbox] = None
        if len(self._inboxes) > _MAX_INBOXES:
            del self._inboxes[next(iter(self._inboxes))]

    def reconnected(self, now: float) -> None:
        """Waits again: routers that came meanwhile have not been heard."""
        self._wait_until = now + _WAIT_S

    def to_probe(self, now: float) -> str | None:
        """Returns the subject to probe now, if any is due."""
        if not self._inboxes or now < self._probe_at:
            return None
        self._probed, self._probe_at = next(iter(self._inboxes)), now + _PROBE_INTERVAL_S
        return self._probed

    def gone(self, now: float) -> None:
        """Notes that nothing listens on the probed subject: the next one is to be probed at once."""
        if self._probed is not None:
            self._inboxes.pop(self._probed, None)
            self._probed, self._probe_at = None, now
