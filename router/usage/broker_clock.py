"""The broker's clock, as one process knows it. Pure."""


class BrokerClock:
    """Unix time by the broker's clock, which all routers share: a step of this machine's own clock changes nothing.

    `now` is monotonic time in seconds."""

    def __init__(self, unix_time: float, now: float) -> None:
        """Begins with this machine's own time."""
        self._offset = unix_time - now

    def __repr__(self) -> str:
        return f"<BrokerClock {self._offset:+.3f} s>"

    def observe(self, broker_time: float, now: float) -> None:
        """Takes the time that the broker has shown at `now`."""
        self._offset = broker_time - now

    def at(self, now: float) -> float:
        return now + self._offset
