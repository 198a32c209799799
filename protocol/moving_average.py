"""The mean of recent values."""


class MovingAverage:
    """An exponentially weighted mean in which each new value has `weight`: about the last 1 / `weight` count."""

    def __init__(self, weight: float) -> None:
        self.value: float | None = None
        """The mean; None before the first value."""
        self._weight = weight

    def __repr__(self) -> str:
        return f"<MovingAverage {self.value}>"

    def add(self, value: float) -> None:
        """Takes a new value into the mean."""
        self.value = value if self.value is None else self.value + self._weight * (value - self.value)
