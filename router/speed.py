"""How fast a worker is, as its events show; pure."""

from protocol import messages

_WEIGHT_OF_FASTER = 0.1
_WEIGHT_OF_SLOWER = 0.001
"""What a worker does at its best says how fast it is; at other times it has other things to do as well."""
_FEWEST = 20
"""Signs before there is an estimate: one event may have been late."""
_SHORTEST_S = 0.001


class _Best:
    """About the shortest time that is seen more than by chance."""

    def __init__(self) -> None:
        self._value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        weight = _WEIGHT_OF_FASTER if value < self._value else _WEIGHT_OF_SLOWER
        if self._count <= _FEWEST:
            weight = max(weight, 1.0 / self._count)
        self._value += weight * (value - self._value)

    @property
    def value(self) -> float:
        """0 while too little is known."""
        return self._value if self._count >= _FEWEST else 0.0


class Speed:
    """How long a worker takes for a token of a prompt, and from one token of a stream to the next."""

    def __init__(self) -> None:
        self._prefill = _Best()
        self._gap = _Best()

    def __repr__(self) -> str:
        return f"<Speed {self.prefill_s:.6f} s, {self.gap_s:.4f} s>"

    @property
    def prefill_s(self) -> float:
        """Seconds for a token of a prompt; 0 while it is not known."""
        return self._prefill.value

    @property
    def gap_s(self) -> float:
        """Seconds between two tokens of a stream; likewise."""
        return self._gap.value

    def observe(self, before: messages.Load, after: messages.Load, seconds: float) -> None:
        """Learns from two events that followed each other, between which there was work all the time."""
        if seconds < _SHORTEST_S:
            return
        computed = after.computed_tokens - before.computed_tokens
        generated = after.generated_tokens - before.generated_tokens
        if before.queued_prefill_tokens > after.queued_prefill_tokens and computed > 0:
            self._prefill.add(seconds / computed)
        elif not before.queued_prefill_tokens and not after.queued_prefill_tokens and generated > 0 and before.running:
            self._gap.add(seconds * before.running / generated)
