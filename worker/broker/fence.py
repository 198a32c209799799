"""Decides whether a frontend may still speak: not after it stood still, and not unless the broker answers its pings.

What a frontend publishes arrives in order, so an answered ping shows that everything before it got there. Any
other message from the broker shows only that the way in is open: with the way out blocked and others' messages coming
in, a frontend that trusted them would go on speaking behind its router's terminal."""

FENCE_S = 1.5
"""Shorter than the silence after which routers give a worker up, so that it is silent before they act."""


class Fence:
    """Once it has fallen it stays down until the broker is reached anew. Times are seconds of `protocol.clock`."""

    def __init__(self, now: float) -> None:
        self._last_tick_at = now
        self._answered_at = now
        self._is_down = False

    def __repr__(self) -> str:
        return f"<Fence {'down' if self._is_down else 'up'}>"

    @property
    def is_down(self) -> bool:
        return self._is_down

    def tick(self, now: float) -> None:
        """The loop runs: to be called several times in `FENCE_S`."""
        if self.check(now):
            self._last_tick_at = now

    def ping_answered(self, sent_at: float) -> None:
        """The broker has answered a ping that was sent at that time."""
        self._answered_at = max(self._answered_at, sent_at)

    def check(self, now: float) -> bool:
        """Whether anything may be written now."""
        if now - self._last_tick_at >= FENCE_S or now - self._answered_at >= FENCE_S:
            self._is_down = True
        return not self._is_down

    def reset(self, now: float) -> None:
        """A new life begins, on a new connection."""
        self._last_tick_at = self._answered_at = now
        self._is_down = False
