"""The kinds of faults, what each may cost a client, and which faults a seed stands for; pure."""

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
    """Whether messages under way may be lost, terminals too."""
    may_lose_requests: bool = False
    """Whether a request that no worker has accepted may stay without an answer."""


_LOSS = frozenset({UNSEALED})
_BROKER = frozenset({UNSEALED, "worker_lost", "no_responders"})
KINDS = {
    "kill_worker": Kind(aim=1_000, per_round=20, max_gap_ms=2_300, errors=_LOSS),
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
    """One fault. A kind of fault looks only at what it needs."""

    kind: str
    number: int
    """Counts the faults of the round, by which workers are killed in turn."""
    after_s: float
    """Time to wait once all streams have gone on after the fault before."""
    target: int
    """A random number for the choice of a process."""
    pause_s: float
    away_s: float
    """Time for which the broker is away."""
    part: str
    """The part of a worker that is stopped or killed: `front`, `engine` or `both`."""
    is_beside: bool
    """Whether a process is replaced only when its successor is ready, and not under the same name when it is gone."""
    between_s: float = 10.0
    """Time from the death of a router to that of a worker with its streams."""


def faults(kind: str, seed: int, count: int | None = None) -> Iterator[Fault]:
    """Yields the faults of a round; those of a `mixed` one are of the other kinds."""
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


_MIXED = ("kill_engine", *(kind for kind in KINDS if kind not in ("mixed", "roll")))


def engine_of(seed: int) -> str:
    """Returns the engine of a round: every tenth is of the demo model."""
    return "demo" if seed % 10 == 4 else "sim"
