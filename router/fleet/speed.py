"""How fast a worker is, as its events show; pure."""

from tokenbus.protocol.wire import messages

_WEIGHT_OF_FASTER = 0.1
_WEIGHT_OF_SLOWER = 0.001
"""What a worker does at its best says how fast it is; at other times it has other things to do as well."""
_MIN_SAMPLES = 10
"""Signs before there is an estimate."""
_WINDOW_S = 0.2
"""Of work that a sign is made of: single events come late, and then two at once."""


class _BestTime:
    """About the shortest time that is seen more than by chance."""

    def __init__(self) -> None:
        self._value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        weight = _WEIGHT_OF_FASTER if value < self._value else _WEIGHT_OF_SLOWER
        if self._count <= _MIN_SAMPLES:
            weight = max(weight, 1.0 / self._count)
        self._value += weight * (value - self._value)

    @property
    def value(self) -> float:
        """0 while too little is known."""
        return self._value if self._count >= _MIN_SAMPLES else 0.0


class _Window:
    """Time and work of events that followed each other, until there is enough of it for a sign."""

    def __init__(self) -> None:
        self.best = _BestTime()
        self._seconds = self._weighted_s = 0.0
        self._tokens = 0

    def add(self, seconds: float, weight: float, tokens: int) -> None:
        self._seconds += seconds
        self._weighted_s += seconds * weight
        self._tokens += tokens
        if self._seconds >= _WINDOW_S:
            self.best.add(self._weighted_s / self._tokens)
            self._seconds = self._weighted_s = 0.0
            self._tokens = 0


class Speed:
    """How long a worker takes for a token of a prompt, and from one token of a stream to the next."""

    def __init__(self) -> None:
        self._prefill = _Window()
        self._itl = _Window()

    def __repr__(self) -> str:
        return f"<Speed {self.prefill_s_per_token:.6f} s, {self.itl_s:.4f} s>"

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds for a token of a prompt; 0 while it is not known."""
        return self._prefill.best.value

    @property
    def itl_s(self) -> float:
        """Seconds between two tokens of a stream; likewise."""
        return self._itl.best.value

    def observe(self, before: messages.Load, after: messages.Load, seconds: float) -> None:
        """Learns from two events that followed each other, between which there was work all the time."""
        computed = after.computed_tokens - before.computed_tokens
        generated = after.generated_tokens - before.generated_tokens
        if before.queued_prefill_tokens > after.queued_prefill_tokens and computed > 0:
            self._prefill.add(seconds, 1.0, computed)
        elif not before.queued_prefill_tokens and not after.queued_prefill_tokens and generated > 0 and before.running:
            self._itl.add(seconds, before.running, generated)
