"""The kinds of faults, what each may cost a client, and the faults that a seed stands for."""

import random
from collections.abc import Iterator

import msgspec

from tests.chaos.reading import UNSEALED


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault, with what docs/guarantees.md allows it to cost clients that are not the library."""

    aim: int
    """The number of faults after which it counts as tried."""
    per_round: int
    num_tokens: int = 300
    """Tokens of each stream."""
    max_gap_ms: int | None = None
    """The aim for the median gap."""
    errors: frozenset[str] = frozenset()
    """Errors in which streams may end."""
    may_lose_messages: bool = False
    """Whether messages in transit may be lost, terminals included."""
    may_lose_requests: bool = False
    """Whether a request that no worker has accepted may remain without an answer."""


ENGINES = ("sim", "demo")
_LOSS = frozenset({UNSEALED})
_BROKER = frozenset({UNSEALED, "worker_lost", "no_responders"})
KINDS = {
    "kill_worker": Kind(aim=1_000, per_round=20, max_gap_ms=1_500, errors=_LOSS),
    "kill_while_loading": Kind(aim=60, per_round=6, max_gap_ms=1_500, errors=_LOSS),
    "pause_worker": Kind(aim=200, per_round=10, errors=_LOSS),
    "pause_router": Kind(aim=200, per_round=10),
    "kill_router_then_worker": Kind(aim=100, per_round=5, num_tokens=1_000, errors=_LOSS, may_lose_requests=True),
    "restart_broker": Kind(aim=20, per_round=2, errors=_BROKER, may_lose_messages=True, may_lose_requests=True),
    "drain_worker": Kind(aim=50, per_round=5, max_gap_ms=300),
    "roll": Kind(aim=50, per_round=5, num_tokens=1_600),
    "mixed": Kind(
        aim=100, per_round=10, num_tokens=1_000, errors=_BROKER, may_lose_messages=True, may_lose_requests=True
    ),
}


class Fault(msgspec.Struct, frozen=True):
    """One fault. Each kind uses only the fields that it needs."""

    kind: str
    number: int
    """The number of the fault within its round; workers are killed in turn by this number."""
    after_s: float
    """Time to wait after all streams have continued since the previous fault."""
    target: int
    """A random number for the choice of a process."""
    pause_s: float
    away_s: float
    """Time for which the broker is down."""
    part: str
    """The part of a worker that is frozen: `front`, `engine` or `both`."""
    is_beside: bool
    """Whether a process is stopped only once its successor, under a new name, is ready; otherwise the successor starts
    afterwards, under the same name."""
    between_s: float = 10.0
    """Time from the death of a router to the death of a worker with streams that it had placed."""


def faults(kind: str, seed: int, count: int | None = None) -> Iterator[Fault]:
    """Yields the faults of a round; those of a `mixed` round are of the other kinds."""
    rng = random.Random(f"{kind} {seed}")
    for number in range(KINDS[kind].per_round if count is None else count):
        yield Fault(
            kind=rng.choice(_MIXED) if kind == "mixed" else kind,
            number=number,
            after_s=rng.uniform(0.0, 1.0),
            target=rng.randrange(1 << 16),
            pause_s=rng.uniform(0.5, 5.0),
            away_s=rng.uniform(0.3, 4.0),
            part=rng.choice(("front", "engine", "both")),
            is_beside=rng.random() < 0.5,
        )


_MIXED = ("kill_engine", *(kind for kind in KINDS if kind not in ("mixed", "roll", "kill_while_loading")))


def engine_of(seed: int) -> str:
    """Returns the engine of a round: every tenth round uses the demo model."""
    return "demo" if seed % 10 == 4 else "sim"
