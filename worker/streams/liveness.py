"""Decides whether a client is gone.

The broker sends a no-responders notice when a chunk finds no subscriber. A client that reconnects looks the same for a
moment, so two seconds later an empty chunk probes its inbox again; a notice for that one means that the client is
gone."""

PROBE_AFTER_S = 2.0
"""Longer than a client takes to reconnect."""
RECONNECT_GRACE_S = 10.0
"""Notices are ignored this long after the frontend's own reconnect, since clients are reconnecting too."""


class ClientLiveness:
    """Tracks each stream whose client seems gone: reported, then probed. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._probe_at: dict[str, float] = {}
        self._probed_at: dict[str, float] = {}
        self._ignore_until = 0.0

    def __repr__(self) -> str:
        return f"<ClientLiveness {len(self._probe_at) + len(self._probed_at)} missed>"

    def no_responders(self, key: str, now: float) -> None:
        """Handles a notice for an ordinary chunk: schedules a probe."""
        # while a probe is under way, notices of earlier chunks still arrive
        if now >= self._ignore_until and key not in self._probed_at:
            self._probe_at.setdefault(key, now + PROBE_AFTER_S)

    def probe_no_responders(self, key: str, now: float) -> bool:
        """Handles a notice for a probe; returns whether the client is gone."""
        return self._probed_at.pop(key, None) is not None and now >= self._ignore_until

    def due_probes(self, now: float) -> list[str]:
        """Returns the streams to probe now. A probe that has had no notice for that long has reached its client."""
        # a notice takes milliseconds; after two seconds there will be none
        for key in [key for key, at in self._probed_at.items() if now - at >= PROBE_AFTER_S]:
            del self._probed_at[key]
        due = [key for key, at in self._probe_at.items() if at <= now]
        for key in due:
            del self._probe_at[key]
            self._probed_at[key] = now
        return due

    def forget(self, key: str) -> None:
        """Forgets a stream that has ended, or whose client has shown that it is alive."""
        self._probe_at.pop(key, None)
        self._probed_at.pop(key, None)

    def reconnected(self, now: float) -> None:
        """Discards earlier notices, which prove nothing, since the frontend itself was disconnected."""
        self._probe_at.clear()
        self._probed_at.clear()
        self._ignore_until = now + RECONNECT_GRACE_S

    def check_integrity(self) -> None:
        """Asserts that no stream is both waiting for its probe and probed."""
        assert not self._probe_at.keys() & self._probed_at.keys(), (self._probe_at, self._probed_at)
