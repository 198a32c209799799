"""Generated workloads: shared system prompts, conversations, documents, agents, tools; Poisson arrivals or bursts.

A workload is a trace drawn at random from a few settings, so that policies are not fitted to one recorded trace."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenbus.replay import traces
from tokenbus.replay.traces import TracedRequest

BLOCK_TOKENS = 16
"""The lengths of common prefixes in generated prompts are multiples of this."""


class WorkloadError(ValueError):
    """Raised for an unknown workload or an invalid setting. The message says what is allowed."""


class WorkloadSettings(NamedTuple):
    """The number, rate and size of requests. Lengths are means; those of prompts and answers vary widely."""

    requests: int = 2_000
    rate: float = 4.0
    """Mean requests per second."""
    burst: float = 1.0
    """Mean requests of a burst; 1 for independent arrivals."""
    shared_tokens: int = 2_048
    """Tokens that all prompts of a group begin with."""
    groups: int = 16
    """The number of distinct beginnings. The n-th is drawn with a weight of 1/n."""
    prompt_tokens: int = 256
    """Tokens that are new in each prompt."""
    output_tokens: int = 128
    turns: int = 8
    """Mean turns of a conversation or an agent."""
    think_s: float = 15.0
    """Mean time from one turn's arrival to the next."""
    fan_out: int = 4
    """Requests that an agent sends at the same time, or subagents that it starts; mean requests of a turn with
    tools."""


DEFAULTS = {
    "shared": WorkloadSettings(),
    "conversations": WorkloadSettings(shared_tokens=512, groups=4, prompt_tokens=192, output_tokens=192),
    "agents": WorkloadSettings(shared_tokens=4_096, prompt_tokens=1_024, output_tokens=64, turns=6, think_s=4.0),
    "paced": WorkloadSettings(
        shared_tokens=1_024, groups=1, requests=600, rate=0.5, prompt_tokens=128, output_tokens=64
    ),
    "unrelated": WorkloadSettings(shared_tokens=0, prompt_tokens=1_024, output_tokens=256),
    "subagents": WorkloadSettings(
        shared_tokens=6_144, groups=8, rate=6.0, prompt_tokens=768, output_tokens=96, turns=4, think_s=8.0, fan_out=5
    ),
    "documents": WorkloadSettings(
        shared_tokens=16_384, groups=256, rate=3.0, prompt_tokens=64, output_tokens=192, turns=4, think_s=20.0
    ),
    "tools": WorkloadSettings(
        shared_tokens=3_072, groups=8, rate=6.0, prompt_tokens=384, output_tokens=96, turns=5, think_s=20.0, fan_out=3
    ),
}
"""`shared`: one-off requests with common system prompts. `conversations`: each turn's prompt contains all turns before
it. `agents`: conversations whose turns are several requests at once. `paced`: conversations whose turns arrive at even
intervals. `unrelated`: prompts that have nothing in common. `subagents`: agents that start several others in each turn,
which have a beginning and a task of their own and take steps one by one. `documents`: questions about documents of very
different lengths, of which a few are popular; each question contains the reader's earlier ones. `tools`: conversations
whose turns are several requests, each with the result of a tool that the one before called."""

_TOOL_S = 2.0
"""Mean time from a request that calls a tool to the next, which has the result."""
_SUBAGENT_STEPS = 3
"""Mean requests of a subagent."""


def load(text: str, seed: int) -> list[TracedRequest]:
    """Returns the requests of a trace file if `text` is the path of one, else of a workload, ordered by time.

    Raises TraceError, WorkloadError and OSError."""
    path = Path(text)
    is_file = path.exists() and not path.is_dir()  # a folder may have the name of a workload
    return traces.read(path) if is_file else generate(*parse(text), seed)


def parse(text: str) -> tuple[str, WorkloadSettings]:
    """Parses a workload as given on the command line: `agents`, or with settings `agents:rate=2,fan_out=8`.

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
    """Returns the requests of a workload, ordered by time; deterministic for a seed."""
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
    """Hands out new block ids, and draws from the beginnings that groups of prompts share."""

    def __init__(self, workload: WorkloadSettings, rng: random.Random, *, of_one_length: bool = True) -> None:
        self._count = itertools.count()
        self._rng = rng
        tokens = workload.shared_tokens
        self._shared = [self.new(tokens if of_one_length else _length(tokens, rng)) for _ in range(workload.groups)]
        self._weights = [1 / (1 + place) for place in range(workload.groups)]

    def new(self, tokens: int) -> tuple[int, ...]:
        return tuple(next(self._count) for _ in range(_blocks(tokens)))

    def shared(self) -> tuple[int, ...]:
        return self._rng.choices(self._shared, self._weights)[0]


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _arrivals(rate: float, burst: float, rng: random.Random) -> Iterator[float]:
    """Yields the times of independent arrivals, or of bursts of random sizes."""
    now = 0.0
    while True:
        now += rng.expovariate(rate / burst)
        # int() takes half off on average, so the exponential part is larger by half
        size = 1 if burst <= 1 else 1 + int(rng.expovariate(1 / (burst - 0.5)))
        yield from itertools.repeat(now, size)


def _length(mean: int, rng: random.Random) -> int:
    """Draws a length with this mean: most are shorter, a few much longer."""
    # the mean of a log-normal distribution is exp(mu + sigma^2 / 2), which is 1 here
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


_Session = Callable[[float, _Ids, WorkloadSettings, random.Random], Iterator[TracedRequest]]
"""Yields the requests of one session, given when it begins."""


def _sessions(
    workload: WorkloadSettings, rng: random.Random, ids: _Ids, session: _Session, mean_requests: int
) -> Iterator[TracedRequest]:
    """Yields the requests of sessions that overlap in time, each of which has `mean_requests` on average."""
    made: list[TracedRequest] = []
    for began_at in _arrivals(workload.rate / mean_requests, workload.burst, rng):
        made.extend(session(began_at, ids, workload, rng))
        if len(made) >= workload.requests:
            break
    yield from sorted(made, key=lambda request: request.at_s)


def _turns(workload: WorkloadSettings, rng: random.Random, *, at_once: int = 1) -> Iterator[TracedRequest]:
    """Yields the turns of conversations. Each turn's prompt continues that of the previous turn."""
    session = partial(_session, at_once=at_once)
    yield from _sessions(workload, rng, _Ids(workload, rng), session, workload.turns * at_once)


def _documents(workload: WorkloadSettings, rng: random.Random) -> Iterator[TracedRequest]:
    yield from _sessions(workload, rng, _Ids(workload, rng, of_one_length=False), _session, workload.turns)


def _tools(workload: WorkloadSettings, rng: random.Random) -> Iterator[TracedRequest]:
    yield from _sessions(workload, rng, _Ids(workload, rng), _tool_session, workload.turns * workload.fan_out)


def _subagents(workload: WorkloadSettings, rng: random.Random) -> Iterator[TracedRequest]:
    mean_requests = workload.turns * (1 + workload.fan_out * _SUBAGENT_STEPS)
    yield from _sessions(workload, rng, _Ids(workload, rng), _delegating_session, mean_requests)


def _session(
    began_at: float, ids: _Ids, workload: WorkloadSettings, rng: random.Random, at_once: int = 1
) -> Iterator[TracedRequest]:
    history, now = ids.shared(), began_at
    for _ in range(_count(workload.turns, rng)):
        history += ids.new(_length(workload.prompt_tokens, rng))
        for _ in range(at_once):
            own = _length(workload.prompt_tokens // 4 + 1, rng) if at_once > 1 else 0
            yield _request(now, history + ids.new(own), len(history) * BLOCK_TOKENS + own, workload, rng)
        history += ids.new(workload.output_tokens * at_once)
        now += rng.expovariate(1 / workload.think_s) if workload.think_s else 0.0


def _tool_session(
    began_at: float, ids: _Ids, workload: WorkloadSettings, rng: random.Random
) -> Iterator[TracedRequest]:
    history, now = ids.shared(), began_at
    for _ in range(_count(workload.turns, rng)):
        for at, prompt in _steps(now, history, _count(workload.fan_out, rng), ids, workload, rng):
            history, now = prompt, at
            yield _request(now, history, len(history) * BLOCK_TOKENS, workload, rng)
        history += ids.new(workload.output_tokens)
        now += rng.expovariate(1 / workload.think_s) if workload.think_s else 0.0


def _delegating_session(
    began_at: float, ids: _Ids, workload: WorkloadSettings, rng: random.Random
) -> Iterator[TracedRequest]:
    history, beginning, now = ids.shared(), ids.shared(), began_at
    for _ in range(_count(workload.turns, rng)):
        history += ids.new(_length(workload.prompt_tokens, rng))
        yield _request(now, history, len(history) * BLOCK_TOKENS, workload, rng)
        history += ids.new(workload.output_tokens)
        task, started_at = beginning + ids.new(workload.prompt_tokens), now + rng.expovariate(1 / _TOOL_S)
        for _ in range(workload.fan_out):
            for at, prompt in _steps(started_at, task, _count(_SUBAGENT_STEPS, rng), ids, workload, rng):
                now = max(now, at)
                yield _request(at, prompt, len(prompt) * BLOCK_TOKENS, workload, rng)
            history += ids.new(workload.output_tokens)
        now += rng.expovariate(1 / workload.think_s) if workload.think_s else 0.0


def _steps(
    now: float, history: tuple[int, ...], count: int, ids: _Ids, workload: WorkloadSettings, rng: random.Random
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yields the times and prompts of requests that follow each other, each with what the last one's tool returned."""
    for number in range(count):
        if number:
            history += ids.new(workload.output_tokens)
            now += rng.expovariate(1 / _TOOL_S)
        history += ids.new(_length(workload.prompt_tokens, rng))
        yield now, history


def _count(mean: int, rng: random.Random) -> int:
    """Draws a number of turns or steps: often 1, rarely many."""
    return max(1, round(rng.expovariate(1 / mean)))


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
    "agents": lambda workload, rng: _turns(workload, rng, at_once=workload.fan_out),
    "paced": _paced,
    "unrelated": _shared,
    "subagents": _subagents,
    "documents": _documents,
    "tools": _tools,
}
