"""Notices that a client has gone: nobody listens on its inbox, and two seconds later still nobody does."""

PROBE_AFTER_S = 2.0
"""A client that reconnects looks the same for a moment."""
RECONNECT_GRACE_S = 10.0
"""After the frontend's own reconnect: the clients are reconnecting too."""


class ClientLiveness:
    """Which clients of which streams are missed. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._probe_at: dict[str, float] = {}
        self._probed_at: dict[str, float] = {}
        self._ignore_until = 0.0

    def __repr__(self) -> str:
        return f"<Presence {len(self._probe_at) + len(self._probed_at)} missed>"

    def no_responders(self, key: str, now: float) -> None:
        """A notice came for an ordinary chunk."""
        if now >= self._ignore_until and key not in self._probed_at:
            self._probe_at.setdefault(key, now + PROBE_AFTER_S)

    def probe_no_responders(self, key: str, now: float) -> bool:
        """A notice came for the probe; whether the client is gone."""
        return self._probed_at.pop(key, None) is not None and now >= self._ignore_until

    def due_probes(self, now: float) -> list[str]:
        """The streams whose clients are to be probed now; probes that nobody answered have arrived."""
        for key in [key for key, at in self._probed_at.items() if now - at >= PROBE_AFTER_S]:
            del self._probed_at[key]
        due = [key for key, at in self._probe_at.items() if at <= now]
        for key in due:
            del self._probe_at[key]
            self._probed_at[key] = now
        return due

    def forget(self, key: str) -> None:
        """The stream has ended, or its client has shown that it is there."""
        self._probe_at.pop(key, None)
        self._probed_at.pop(key, None)

    def reconnected(self, now: float) -> None:
        """The frontend itself was away: what was noticed says nothing."""
        self._probe_at.clear()
        self._probed_at.clear()
        self._ignore_until = now + RECONNECT_GRACE_S

    def check_integrity(self) -> None:
        assert not self._probe_at.keys() & self._probed_at.keys(), (self._probe_at, self._probed_at)
