"""Workloads made up by rule: shared system prompts, conversations, agents, paced sessions; Poisson or in bursts."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tokenbus.replay.traces import TracedRequest

BLOCK_TOKENS = 16
"""Prompts of these workloads begin alike in multiples of this."""


class WorkloadError(ValueError):
    """A workload that there is not, or a setting of one that is wrong; the message says what is allowed."""


class WorkloadSettings(NamedTuple):
    """How many requests, how fast, and how large. Lengths are means; those of prompts and answers vary widely."""

    requests: int = 2_000
    rate: float = 4.0
    """Requests that come in a second, on average."""
    burst: float = 1.0
    """Requests come in bursts of so many on average; 1: one by one, as chance has it."""
    shared_tokens: int = 2_048
    """What prompts of one group begin with."""
    groups: int = 16
    """Different beginnings; the first is the most frequent, the n-th as frequent as 1/n."""
    prompt_tokens: int = 256
    """New in each prompt."""
    output_tokens: int = 128
    turns: int = 8
    """Of a conversation or an agent, on average."""
    think_s: float = 15.0
    """From one turn's arrival to the next, on average."""
    fan_out: int = 4
    """Requests that an agent sends at the same time."""


DEFAULTS = {
    "shared": WorkloadSettings(),
    "conversations": WorkloadSettings(shared_tokens=512, groups=4, prompt_tokens=192, output_tokens=192),
    "agents": WorkloadSettings(shared_tokens=4_096, prompt_tokens=1_024, output_tokens=64, turns=6, think_s=4.0),
    "paced": WorkloadSettings(
        shared_tokens=1_024, groups=1, requests=600, rate=0.5, prompt_tokens=128, output_tokens=64
    ),
    "unrelated": WorkloadSettings(shared_tokens=0, prompt_tokens=1_024, output_tokens=256),
}
"""`shared`: system prompts. `conversations`: turns, each with all before it. `agents`: conversations whose turns are
several requests at once. `paced`: conversations whose turns come evenly, one by one. `unrelated`: nothing in common."""


def parse(text: str) -> tuple[str, WorkloadSettings]:
    """A workload as on the command line: its name, and then settings, as `agents:rate=2,fan_out=8`.

    Raises WorkloadError."""
    name, _, settings = text.partition(":")
    if name not in DEFAULTS:
        raise WorkloadError(f"{text!r} is neither a file nor one of the workloads {', '.join(DEFAULTS)}")
    changes: dict[str, Any] = {}
    for setting in settings.split(",") if settings else ():
        key, _, value = setting.partition("=")
        if key not in WorkloadSettings._fields:
            raise WorkloadError(f"{name} has no setting {key!r}; there are {', '.join(WorkloadSettings._fields)}")
        changes[key] = _number(key, value)
    return name, DEFAULTS[name]._replace(**changes)


def generate(name: str, workload: WorkloadSettings, seed: int) -> list[TracedRequest]:
    """The requests of a workload, by time; the same for the same seed."""
    rng = random.Random(f"{name} {seed}")
    made = _MAKERS[name](workload, rng)
    return sorted(itertools.islice(made, workload.requests), key=lambda request: request.at_s)


def _number(key: str, value: str) -> float:
    is_float = key in ("rate", "burst", "think_s")
    try:
        number = float(value) if is_float else int(value)
    except ValueError:
        number = math.nan
    low = {"shared_tokens": 0, "think_s": 0, "rate": 1e-6}.get(key, 1)
    if not low <= number <= 1_000_000:
        raise WorkloadError(f"{key} must be {low} to 1,000,000, got {value!r}")
    return number


class _Ids:
    """New block ids, and beginnings that are shared."""

    def __init__(self, workload: WorkloadSettings, rng: random.Random) -> None:
        self._count = itertools.count()
        self._rng = rng
        blocks = _blocks(workload.shared_tokens)
        self._shared = [self.new(blocks * BLOCK_TOKENS) for _ in range(workload.groups)]
        self._weights = [1 / (1 + place) for place in range(workload.groups)]

    def new(self, tokens: int) -> tuple[int, ...]:
        return tuple(next(self._count) for _ in range(_blocks(tokens)))

    def shared(self) -> tuple[int, ...]:
        return self._rng.choices(self._shared, self._weights)[0]


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _arrivals(rate: float, burst: float, rng: random.Random) -> Iterator[float]:
    """Times of independent arrivals, or of bursts of them whose sizes are drawn too."""
    now = 0.0
    while True:
        now += rng.expovariate(rate / burst)
        size = 1 if burst <= 1 else 1 + int(rng.expovariate(1 / (burst - 0.5)))
        yield from itertools.repeat(now, size)


def _length(mean: int, rng: random.Random) -> int:
    """A length of that mean: most are shorter, a few much longer."""
    return max(1, min(32 * mean, round(mean * rng.lognormvariate(-0.32, 0.8))))


def _request(
    at_s: float, ids: tuple[int, ...], prompt_tokens: int, workload: WorkloadSettings, rng: random.Random
) -> TracedRequest:
    return TracedRequest(at_s, prompt_tokens, _length(workload.output_tokens, rng), ids, BLOCK_TOKENS)


def _shared(workload: WorkloadSettings, rng: random.Random) -> Iterator[TracedRequest]:
    ids = _Ids(workload, rng)
    for at_s in _arrivals(workload.rate, workload.burst, rng):
        beginning, own = ids.shared(), _length(workload.prompt_tokens, rng)
        whole = beginning + ids.new(own)
        yield _request(at_s, whole, len(beginning) * BLOCK_TOKENS + own, workload, rng)


def _turns(workload: WorkloadSettings, rng: random.Random, *, at_once: int = 1) -> Iterator[TracedRequest]:
    """Conversations that overlap in time; each turn's prompt goes on where that of the turn before ended."""
    ids = _Ids(workload, rng)
    sessions = workload.rate / (workload.turns * at_once)
    made: list[TracedRequest] = []
    for began_at in _arrivals(sessions, workload.burst, rng):
        made.extend(_session(began_at, ids, workload, rng, at_once))
        if len(made) >= workload.requests:
            break
    yield from sorted(made, key=lambda request: request.at_s)


def _session(
    began_at: float, ids: _Ids, workload: WorkloadSettings, rng: random.Random, at_once: int
) -> Iterator[TracedRequest]:
    history, now = ids.shared(), began_at
    for _ in range(max(1, round(rng.expovariate(1 / workload.turns)))):
        history += ids.new(_length(workload.prompt_tokens, rng))
        for _ in range(at_once):
            own = _length(workload.prompt_tokens // 4 + 1, rng) if at_once > 1 else 0
            yield _request(now, history + ids.new(own), len(history) * BLOCK_TOKENS + own, workload, rng)
        history += ids.new(workload.output_tokens * at_once)
        now += rng.expovariate(1 / workload.think_s) if workload.think_s else 0.0


def _agents(workload: WorkloadSettings, rng: random.Random) -> Iterator[TracedRequest]:
    return _turns(workload, rng, at_once=workload.fan_out)


def _paced(workload: WorkloadSettings, rng: random.Random) -> Iterator[TracedRequest]:
    ids = _Ids(workload, rng)
    histories = [ids.shared() for _ in range(2 * workload.turns)]
    for number in range(workload.requests):
        place = number % len(histories)
        if number // len(histories) % workload.turns == workload.turns - 1:
            histories[place] = ids.shared()
        histories[place] += ids.new(workload.prompt_tokens)
        yield _request(number / workload.rate, histories[place], len(histories[place]) * BLOCK_TOKENS, workload, rng)


_MAKERS: dict[str, Callable[[WorkloadSettings, random.Random], Iterator[TracedRequest]]] = {
    "shared": _shared,
    "conversations": _turns,
    "agents": _agents,
    "paced": _paced,
    "unrelated": _shared,
}
