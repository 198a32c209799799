"""Decides whether a front may still speak: not after it stood still, and not without a recent sign of the broker."""

FENCE_S = 1.5
"""Shorter than the silence after which routers give a worker up, so that it is silent before they act."""


class Fence:
    """Once it has fallen it stays down until the broker is reached anew. Times are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self._heard_at = now
        self._is_down = False

    def __repr__(self) -> str:
        return f"<Fence {'down' if self._is_down else 'up'}>"

    @property
    def is_down(self) -> bool:
        return self._is_down

    def tick(self, now: float) -> None:
        """The loop runs: to be called several times in `FENCE_S`."""
        if self.holds(now):
            self._ticked_at = now

    def heard(self, at: float) -> None:
        """Something came from the broker at that time."""
        self._heard_at = max(self._heard_at, at)

    def holds(self, now: float) -> bool:
        """Whether anything may be written now."""
        if now - self._ticked_at >= FENCE_S or now - self._heard_at >= FENCE_S:
            self._is_down = True
        return not self._is_down

    def raise_again(self, now: float) -> None:
        """A new life begins, on a new connection."""
        self._ticked_at = self._heard_at = now
        self._is_down = False
