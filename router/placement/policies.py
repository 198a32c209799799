"""Chooses a worker for a request: a pure function of what is known, with a policy for the costs."""

import random
from importlib import metadata
from typing import NamedTuple, Protocol

import numpy as np

from tokenbus.router.placement.worker_table import Floats


class View(NamedTuple):
    """What a policy may look at, and not change: of each candidate one entry in every column."""

    prompt_tokens: int
    overlap_tokens: Floats
    """Leading tokens of the prompt that it holds, or will soon."""
    session: Floats | None
    """1 where the last request of the same session went, else 0; None where that is nowhere."""
    block_size: Floats
    """Tokens of a block; 0 where it has none."""
    prefill_tokens: Floats
    """Prompt tokens that it has to compute before this one's."""
    used_blocks: Floats
    """Blocks of its running sequences."""
    total_blocks: Floats
    requests: Floats
    """Running and waiting there."""
    max_num_seqs: Floats
    max_requests: Floats
    """With so many there another one would only wait."""
    waiting_requests: Floats
    """Requests that would wait for a place there, this one among them."""
    free_tokens: Floats
    """Tokens that its memory has room for."""
    prefill_slowdown: Floats
    """How many times longer than the fastest it takes for prompts: a power of 2."""
    decode_slowdown: Floats
    """Likewise for streams."""
    utilization: Floats
    """Near 1 where it has computed much of late, beside the most that it ever had; 0 where it has been idle."""
    last_chosen: Floats
    """A number that is larger the later it was chosen last; 0 for never."""


class Policy(Protocol):
    """Orders workers: the lowest cost wins, and a tie is drawn. Keeps nothing between two calls."""

    name: str

    def costs(self, view: View) -> Floats:
        """One for each candidate."""
        ...


_MAX_REQUEST_SHARE = 0.2
"""A neighbour counts for no more than this share of the prompt, or short prompts would never stay where they began."""


class KvAware:
    """What a request costs there, in prompt tokens to be computed.

    That is what is not held of its own prompt; a part of what is queued before it, since to wait a little is better
    than to compute and to keep a prefix twice; each request there, since it slows every step; each that would have to
    wait for a place or for memory; and a trace of recent work, which spreads requests that come one by one, whose load
    is gone before the next comes. All of it is more where a worker is slower than others, and a little less where the
    session's last request went. The defaults are those of docs/decisions/0027."""

    name = "kv"

    def __init__(
        self,
        queue_weight: float = 0.2,
        request_tokens: float = 200.0,
        waiting_tokens: float = 1_024.0,
        utilization_tokens: float = 2_048.0,
        session_tokens: float = 256.0,
    ) -> None:
        self._queue_weight = queue_weight
        self._request_tokens = request_tokens
        self._waiting_tokens = waiting_tokens
        self._utilization_tokens = utilization_tokens
        self._session_tokens = session_tokens

    def costs(self, view: View) -> Floats:
        to_compute = view.prompt_tokens - view.overlap_tokens
        costs: Floats = self._queue_weight * view.prefill_tokens
        costs += to_compute
        costs *= view.prefill_slowdown
        request_tokens = min(self._request_tokens, _MAX_REQUEST_SHARE * view.prompt_tokens)
        costs += request_tokens * view.requests * view.decode_slowdown
        costs += self._waiting_tokens * (view.waiting_requests + (to_compute > view.free_tokens))
        costs += self._utilization_tokens * view.utilization
        if view.session is not None:
            costs -= self._session_tokens * view.session
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
        return view.last_chosen


class Random:
    """Any."""

    name = "random"

    def costs(self, view: View) -> Floats:
        return np.zeros_like(view.last_chosen)


POLICIES = ("kv", "least_loaded", "round_robin", "random")


ENTRY_POINTS = "tokenbus.policies"
"""The group in which an installed package names classes of its own policies."""


def make_policies() -> dict[str, Policy]:
    """One of each, by name: those from here, and those that installed packages have."""
    policies: list[Policy] = [KvAware(), LeastLoaded(), RoundRobin(), Random()]
    own = {policy.name: policy for policy in policies}
    foreign = {point.name: point.load()() for point in metadata.entry_points(group=ENTRY_POINTS)}
    return foreign | own


def draw(costs: Floats, rng: random.Random, temperature: float = 0.0) -> int:
    """The place of the lowest cost; equal ones are drawn from, so that no order of a table favours anyone.

    With a temperature above 0 any is drawn, the likelier the lower its cost: by exp(-cost / temperature), costs
    measured against their own spread."""
    first = costs.argmin()
    lowest = costs[first]
    if temperature > 0.0 and (spread := float(costs.max() - lowest)) > 0.0:
        weights = np.exp(-(costs - lowest) / (spread * temperature))
        return rng.choices(range(len(costs)), weights.tolist())[0]
    best = (costs == lowest).nonzero()[0]
    return int(first if len(best) == 1 else best[rng.randrange(len(best))])
