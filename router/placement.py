"""Chooses a worker for a request: a pure function of what is known, with a policy for the costs."""

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from router.fleet import Worker


class Placement(NamedTuple):
    """The chosen worker, by the policy of that name."""

    worker: Worker
    policy: str


class NoWorker(NamedTuple):
    """There is nobody to choose."""


class Policy(Protocol):
    """Orders workers: the lowest cost wins, and a tie is drawn."""

    name: str

    def cost(self, worker: Worker) -> float: ...

    def placed(self, worker: Worker) -> None:
        """Told of each choice."""
        ...


class LeastLoaded:
    """The worker with the fewest requests, as a share of what it can run at once."""

    name = "least_loaded"

    def cost(self, worker: Worker) -> float:
        return worker.num_requests / worker.card.max_num_seqs

    def placed(self, worker: Worker) -> None:
        pass


class RoundRobin:
    """The worker whose last turn is longest ago."""

    name = "round_robin"
    _MOST = 8_192

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def cost(self, worker: Worker) -> float:
        return self._turns.get(worker.card.worker_id, 0)

    def placed(self, worker: Worker) -> None:
        self._turn += 1
        self._turns.pop(worker.card.worker_id, None)
        self._turns[worker.card.worker_id] = self._turn
        if len(self._turns) > self._MOST:
            del self._turns[next(iter(self._turns))]


POLICIES = ("least_loaded", "round_robin")


def make_policies() -> dict[str, Policy]:
    """One of each, by name."""
    policies: list[Policy] = [LeastLoaded(), RoundRobin()]
    return {policy.name: policy for policy in policies}


def place(candidates: Sequence[Worker], policy: Policy, rng: random.Random) -> Placement | NoWorker:
    """The candidate with the lowest cost; equal ones are drawn from, so that no order of a table favours anyone."""
    if not candidates:
        return NoWorker()
    costs = [policy.cost(worker) for worker in candidates]
    lowest = min(costs)
    worker = rng.choice([worker for worker, cost in zip(candidates, costs, strict=True) if cost == lowest])
    policy.placed(worker)
    return Placement(worker, policy.name)
