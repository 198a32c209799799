"""Estimates how fast a worker computes prompts and generates tokens, from the loads in its events.

Only its best counts, since at other times it is doing other work as well: the mean follows faster samples quickly and
slower ones hardly at all. A busy worker must not be mistaken for a slow one. How fast KV blocks move between workers is
learned from their reported fetches, by a mean."""

import math
from typing import NamedTuple

from tokenbus.protocol.wire import internal, messages

FIRST_MB_PER_S = 60.0
"""The rate of NATS on one machine, assumed until a fetch has been measured."""
_FETCH_WEIGHT = 0.1
_MIN_FAILURE_MS = 50.0
"""A fetch that brought nothing in less time than this was refused, which says nothing about the rate."""

_WEIGHT_OF_FASTER = 0.1
_WEIGHT_OF_SLOWER = 0.001
_MIN_SAMPLES = 10
"""Samples needed before there is an estimate."""
_STEP_WEIGHT = 0.01
"""The newest step's weight among a model's: at least a hundred count."""
_MAX_STEP_RATIO = 4.0
"""A step counts as at most this many times what is expected."""
_MIN_SPREAD = 0.01
"""The variance of the steps' tokens, as a share of their mean square, from which a line can be fitted."""
_WINDOW_S = 0.2
"""The work that one sample spans. Single events would not do: occasionally one is late and two arrive at once."""


class _Mean:
    """A mean that follows its latest samples; a plain one at first, so that the first sample does not dominate."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.count = 0

    def add(self, sample: float, weight: float) -> None:
        self.count += 1
        if self.count <= _MIN_SAMPLES:
            weight = max(weight, 1.0 / self.count)
        self.value += weight * (sample - self.value)


class _BestTime(_Mean):
    """Approximates the shortest time that is not just an outlier."""

    def add_time(self, sample: float) -> None:
        self.add(sample, _WEIGHT_OF_FASTER if sample < self.value else _WEIGHT_OF_SLOWER)

    @property
    def known(self) -> float:
        """The estimate; 0 while there are too few samples."""
        return self.value if self.count >= _MIN_SAMPLES else 0.0


class _Window:
    """Accumulates the time and tokens of consecutive events until they suffice for one sample."""

    def __init__(self) -> None:
        self.best = _BestTime()
        self._seconds = self._weighted_s = 0.0
        self._tokens = 0

    def add(self, seconds: float, weight: float, tokens: int) -> None:
        self._seconds += seconds
        self._weighted_s += seconds * weight
        self._tokens += tokens
        if self._seconds >= _WINDOW_S:
            self.best.add_time(self._weighted_s / self._tokens)
            self._seconds = self._weighted_s = 0.0
            self._tokens = 0

    @property
    def first(self) -> float:
        """The estimate from whatever data there is; 0 before the first event."""
        return self.best.value or (self._weighted_s / self._tokens if self._tokens else 0.0)


class StepTimes(NamedTuple):
    """The times of steps of a model's fastest workers, in seconds."""

    prompt_step_s: float = 0.02
    """A step with prompts, however short they are. This and the others hold until any step has been observed."""
    prompt_token_s: float = 0.0001
    """Each prompt token in it."""
    decode_step_s: float = 0.02
    """A step without prompts: the time from one token of a stream to the next."""


class StepSample(NamedTuple):
    """A step as seen in a worker's events; without prompt tokens if it was one of streams alone."""

    seconds: float
    prompt_tokens: int = 0


class StepTimesFit:
    """Learns `StepTimes` by fitting a line to recent steps with prompts, whichever of the model's workers took them.

    A step with twice the tokens does not take twice as long, so a time per token alone says little about a prompt of
    another length. Old steps count less and less, and a step that took many times as long as expected counts as one
    that took a few times as long, because something else may have held it up."""

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0
        """Sums over the steps, with x for prompt tokens and y for seconds."""
        self._decode = _Mean()
        self.times = StepTimes()

    def __repr__(self) -> str:
        return f"<StepTimesFit {self.times}>"

    def observe(self, sample: StepSample, slowdown: float) -> None:
        """Learns from a step of a worker that takes `slowdown` times as long as the fastest."""
        seconds, tokens = sample.seconds / slowdown, sample.prompt_tokens
        if not tokens:
            if self._decode.count >= _MIN_SAMPLES:
                seconds = min(seconds, _MAX_STEP_RATIO * self._decode.value)
            self._decode.add(seconds, _STEP_WEIGHT)
            return
        if self._count >= _MIN_SAMPLES:
            seconds = min(seconds, _MAX_STEP_RATIO * (self.times.prompt_step_s + self.times.prompt_token_s * tokens))
        keep = 1.0 - _STEP_WEIGHT
        self._count = keep * self._count + 1.0
        self._x = keep * self._x + tokens
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + tokens * tokens
        self._xy = keep * self._xy + tokens * seconds

    def update(self) -> None:
        """Computes `times` from what was observed."""
        times = self.times
        if self._count:
            mean, spread = self._x / self._count, self._xx - self._x * self._x / self._count
            slope = (self._xy - self._x * self._y / self._count) / spread if spread > 0.0 else 0.0
            step_s = self._y / self._count - slope * mean
            if spread < _MIN_SPREAD * self._xx or slope <= 0.0 or step_s <= 0.0:  # all alike, or noise: no fixed part
                slope, step_s = self._y / self._x, 0.0
            times = times._replace(prompt_step_s=step_s, prompt_token_s=slope)
        if self._decode.count:
            times = times._replace(decode_step_s=self._decode.value)
        elif self._count:
            times = times._replace(decode_step_s=times.prompt_step_s)
        self.times = times


class Speed:
    """A worker's time per prompt token and its inter-token latency."""

    def __init__(self) -> None:
        self._prefill = _Window()
        self._itl = _Window()
        self._step_s = 0.0
        """Time since the last event that followed the end of a step, while the worker was busy."""

    def __repr__(self) -> str:
        return f"<Speed {self.prefill_s_per_token:.6f} s, {self.itl_s:.4f} s>"

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds per prompt token; 0 while unknown."""
        return self._prefill.best.known

    @property
    def first_prefill_s_per_token(self) -> float:
        """The same, available from the first prompt on, which suffices to compare computing with fetching."""
        return self._prefill.first

    @property
    def itl_s(self) -> float:
        """Seconds from one token of a stream to the next; 0 while unknown."""
        return self._itl.best.known

    def observe_loads(self, before: messages.Load, after: messages.Load, seconds: float) -> StepSample | None:
        """Learns from the loads of two consecutive events, `seconds` apart, and returns the step that lies between
        them, if there is just one.

        They are informative only if the worker was busy all the time in between: with prompts still queued at the first
        event, or with streams. Events in the middle of a step, such as heartbeats and accepts, show no tokens yet:
        their time counts towards those of the next one.

        A step of streams alone computes as many tokens as it samples, and one with prompts more. So steps of streams
        are recognized beside prompts that wait for memory or a place."""
        computed = after.computed_tokens - before.computed_tokens
        generated = after.generated_tokens - before.generated_tokens
        queued = before.queued_prefill_tokens or after.queued_prefill_tokens
        if (before.queued_prefill_tokens or before.running) and not computed and not generated:
            self._step_s += seconds
            return None
        seconds, self._step_s = seconds + self._step_s, 0.0
        if generated > 0 and before.running and (computed == generated or not queued):
            # each running stream got its share of the tokens: time per token, times streams
            self._itl.add(seconds, before.running, generated)
            return StepSample(seconds * before.running / generated)
        if before.queued_prefill_tokens > after.queued_prefill_tokens and computed > 0:
            self._prefill.add(seconds, 1.0, computed)
            return StepSample(seconds, computed)
        return None


class TransferRate:
    """The mean rate of the latest fetches of one model's workers."""

    def __init__(self) -> None:
        self._mean = _Mean(FIRST_MB_PER_S)

    def __repr__(self) -> str:
        return f"<TransferRate {self.mb_per_s:.1f} MB/s>"

    @property
    def mb_per_s(self) -> float:
        return self._mean.value

    def observe_fetch(self, fetched: internal.Fetched) -> None:
        """Learns from a finished fetch."""
        took_ms, brought = fetched.fetch_ms, max(0, fetched.fetched_bytes)
        if not 0.0 < took_ms < math.inf or (not brought and took_ms < _MIN_FAILURE_MS):
            return
        self._mean.add(brought / took_ms / 1e3, _FETCH_WEIGHT)
