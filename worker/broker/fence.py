"""Decides whether a frontend may still publish (decision 0012).

Routers give up on a worker that is silent for 2 s, and place its requests elsewhere. A frontend that was frozen or has
lost the broker must therefore stop before they do, or two workers would answer the same request. It may publish only
while its own event loop runs and the broker answers its pings.

Messages leave a frontend in order, so an answered ping shows that everything before it has arrived. Other messages from
the broker prove nothing: they still come in while the outgoing path is blocked."""

FENCE_S = 1.5
"""Shorter than the silence after which routers give up on a worker, so that the worker stops before they act."""


class Fence:
    """Decides whether a frontend may publish. Once the fence is down, nothing may be published until `reset`. Times are
    seconds of `protocol.bus.clock`, which also counts suspension."""

    def __init__(self, now: float) -> None:
        self._last_tick_at = now
        self._answered_at = now
        self._is_down = False

    def __repr__(self) -> str:
        return f"<Fence {'down' if self._is_down else 'up'}>"

    def tick(self, now: float) -> None:
        """Shows that the event loop is running; call it several times in each `FENCE_S`."""
        # a loop that was blocked for too long must not raise its own fence again
        if self.check(now):
            self._last_tick_at = now

    def ping_answered(self, sent_at: float) -> None:
        """Notes that the broker has answered a ping that was sent at `sent_at`."""
        # answers may be reported out of order
        self._answered_at = max(self._answered_at, sent_at)

    def check(self, now: float) -> bool:
        """Returns whether anything may be published now; takes the fence down if not."""
        if now - self._last_tick_at >= FENCE_S or now - self._answered_at >= FENCE_S:
            self._is_down = True
        return not self._is_down

    def reset(self, now: float) -> None:
        """Raises the fence again: a new epoch begins on a new connection."""
        self._last_tick_at = self._answered_at = now
        self._is_down = False
