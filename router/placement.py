"""Chooses a worker for a request: a pure function of what is known, with a policy for the costs."""

import random
from importlib import metadata
from typing import NamedTuple, Protocol

import numpy as np

from router.columns import Floats


class View(NamedTuple):
    """What a policy may look at: of each candidate one entry in every column."""

    prompt_tokens: int
    block_size: Floats
    """Tokens of a block; 0 where it has none."""
    overlap_tokens: Floats
    """Leading tokens of the prompt that it holds, or will soon."""
    prefill_tokens: Floats
    """Prompt tokens that it has to compute before this one's."""
    held_blocks: Floats
    """Blocks of its running sequences."""
    total_blocks: Floats
    requests: Floats
    """Running and waiting there."""
    max_num_seqs: Floats
    recent_tokens: Floats
    """Tokens that it has computed lately, the older the less."""
    turn: Floats
    """A number that is larger the later it was chosen last; 0 for never."""


class Policy(Protocol):
    """Orders workers: the lowest cost wins, and a tie is drawn. Keeps nothing between two calls."""

    name: str

    def costs(self, view: View) -> Floats:
        """One for each candidate."""
        ...


class Kv:
    """How much a request would have to wait for, and cost its neighbours, in prompt tokens to be computed.

    That is its own prompt and those queued before it, less what is held already; what running sequences hold and how
    many they are, since each slows every step; those that wait for a place; and a trace of recent work, which spreads
    requests that come one by one, whose load is gone before the next comes."""

    name = "kv"

    def __init__(
        self,
        held_weight: float = 0.25,
        request_tokens: float = 64.0,
        wait_tokens: float = 1_024.0,
        recent_weight: float = 0.005,
    ) -> None:
        self._held_weight = held_weight
        self._request_tokens = request_tokens
        self._wait_tokens = wait_tokens
        self._recent_weight = recent_weight

    def costs(self, view: View) -> Floats:
        costs: Floats = np.maximum(view.prefill_tokens + view.prompt_tokens - view.overlap_tokens, 0.0)
        costs += self._held_weight * view.held_blocks * np.maximum(view.block_size, 1.0)
        costs += self._request_tokens * view.requests
        costs += self._wait_tokens * np.maximum(view.requests + 1.0 - view.max_num_seqs, 0.0)
        costs += self._recent_weight * view.recent_tokens
        return costs


class LeastLoaded:
    """The worker with the fewest requests, as a share of what it can run at once."""

    name = "least_loaded"

    def costs(self, view: View) -> Floats:
        costs: Floats = view.requests / np.maximum(view.max_num_seqs, 1.0)
        return costs


class RoundRobin:
    """The worker whose last turn is longest ago."""

    name = "round_robin"

    def costs(self, view: View) -> Floats:
        return view.turn


class Random:
    """Any."""

    name = "random"

    def costs(self, view: View) -> Floats:
        return np.zeros_like(view.turn)


POLICIES = ("kv", "least_loaded", "round_robin", "random")


ENTRY_POINTS = "tokenbus.policies"
"""The group in which an installed package names classes of its own policies."""


def make_policies() -> dict[str, Policy]:
    """One of each, by name: those from here, and those that installed packages have."""
    policies: list[Policy] = [Kv(), LeastLoaded(), RoundRobin(), Random()]
    own = {policy.name: policy for policy in policies}
    foreign = {point.name: point.load()() for point in metadata.entry_points(group=ENTRY_POINTS)}
    return foreign | own


def draw(costs: Floats, rng: random.Random, temperature: float = 0.0) -> int:
    """The place of the lowest cost; equal ones are drawn from, so that no order of a table favours anyone.

    With a temperature above 0 any is drawn, the likelier the lower its cost: by exp(-cost / temperature), costs
    measured against their own spread."""
    lowest = costs.min()
    if temperature > 0.0 and (spread := float(costs.max() - lowest)) > 0.0:
        weights = np.exp(-(costs - lowest) / (spread * temperature))
        return rng.choices(range(len(costs)), weights.tolist())[0]
    best = np.flatnonzero(costs == lowest)
    return int(best[0] if len(best) == 1 else best[rng.randrange(len(best))])
