"""Policies: each gives every candidate worker a cost, and the lowest cost wins; pure."""

import random
from importlib import metadata
from typing import NamedTuple, Protocol

import numpy as np

from tokenbus.router.placement.worker_table import Floats


class Fetchable(NamedTuple):
    """Tokens behind each candidate's overlap that it could fetch from another worker instead of computing them."""

    tokens: Floats
    """0 where there are few, or where computing them takes hardly longer."""
    cost: Floats
    """The time to fetch a token compared with the time to compute one."""


class View(NamedTuple):
    """The candidates as a policy sees them: in each array one entry per candidate. A policy must not change them."""

    prompt_tokens: int
    overlap_tokens: Floats
    """Leading tokens of the prompt whose KV cache it holds, or is predicted to hold soon."""
    session: Floats | None
    """1 for the worker that got the session's last request, else 0; None if there is no such worker."""
    fetchable: Fetchable | None
    """The tokens that the candidates could fetch from other workers; None if there are none."""
    block_size: Floats
    """Tokens of a KV block; 0 if it has no blocks."""
    prefill_tokens: Floats
    """Prompt tokens that it has to compute before this prompt's."""
    used_blocks: Floats
    """KV blocks of its running sequences."""
    total_blocks: Floats
    requests: Floats
    """Requests that are running, waiting or just placed there."""
    max_num_seqs: Floats
    max_requests: Floats
    """With this many requests it gets no more: another one would only wait there."""
    waiting_requests: Floats
    """Requests that would wait there with this one, this one included."""
    free_tokens: Floats
    """Tokens that fit its KV cache beside those that its requests are expected to have in the end. Negative if these
    are too many; infinite if it has no blocks."""
    prefill_slowdown: Floats
    """Its time per prompt token compared with the fastest worker's: a power of 2."""
    decode_slowdown: Floats
    """The same for the tokens of streams."""
    utilization: Floats
    """Its recent work compared with the most it has ever done: 0 when idle, near 1 at its most."""
    last_chosen: Floats
    """Larger the later it was chosen last; 0 if never."""


class Policy(Protocol):
    """Orders candidates by cost. The lowest wins, and ties are drawn. A policy keeps nothing between two calls."""

    name: str

    def costs(self, view: View) -> Floats:
        """Returns one finite cost for each candidate, in a new array or a column of the view."""
        ...


_MAX_REQUEST_SHARE = 0.2
"""Another request counts for at most this share of the prompt; else short prompts would never return to their
prefix."""


class KvAware:
    """The cost is the work that a request causes at a worker, in prompt tokens to be computed:

    - its own uncached tokens, and a part of the prompt tokens queued before it: waiting a little is better than
      computing and keeping the same prefix twice;
    - uncached tokens that it can fetch count less, but most of what they would otherwise: they too are kept twice then,
      and push out something else;
    - for each request there a fixed number, since each slows every step;
    - a larger number for each request that would have to wait, and if the KV cache has no room;
    - the worker's utilization, which spreads requests that arrive one by one.

    Slower workers cost more, and the worker of the session's last request a little less. docs/decisions/0027 says where
    the default weights come from."""

    name = "kv"

    def __init__(
        self,
        queue_weight: float = 0.2,
        request_tokens: float = 200.0,
        waiting_tokens: float = 1_024.0,
        utilization_tokens: float = 2_048.0,
        session_tokens: float = 256.0,
        copy_weight: float = 0.6,
    ) -> None:
        self._queue_weight = queue_weight
        self._request_tokens = request_tokens
        self._waiting_tokens = waiting_tokens
        self._utilization_tokens = utilization_tokens
        self._session_tokens = session_tokens
        self._copy_weight = copy_weight

    def costs(self, view: View) -> Floats:
        to_compute = view.prompt_tokens - view.overlap_tokens
        if view.fetchable is not None:
            to_compute -= view.fetchable.tokens * (1.0 - np.maximum(view.fetchable.cost, self._copy_weight))
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
    """Prefers the worker with the fewest requests, as a share of what it can run at once."""

    name = "least_loaded"

    def costs(self, view: View) -> Floats:
        costs: Floats = view.requests / np.maximum(view.max_num_seqs, 1.0)
        return costs


class RoundRobin:
    """Prefers the worker that was chosen the longest time ago."""

    name = "round_robin"

    def costs(self, view: View) -> Floats:
        return view.last_chosen


class Random:
    """Prefers none: every choice is a tie."""

    name = "random"

    def costs(self, view: View) -> Floats:
        return np.zeros_like(view.last_chosen)


POLICIES = ("kv", "least_loaded", "round_robin", "random")

ENTRY_POINTS = "tokenbus.policies"
"""The entry point group in which installed packages name classes of their own policies."""


def make_policies() -> dict[str, Policy]:
    """Returns one instance of each policy by name: the built-in ones, and those of installed packages."""
    policies: list[Policy] = [KvAware(), LeastLoaded(), RoundRobin(), Random()]
    own = {policy.name: policy for policy in policies}
    foreign = {point.name: point.load()() for point in metadata.entry_points(group=ENTRY_POINTS)}
    return foreign | own


def draw(costs: Floats, rng: random.Random, temperature: float = 0.0) -> int:
    """Returns the index of the lowest cost. Ties are drawn, so that no candidate is favoured by its position.

    With a temperature above 0 every candidate may be drawn, with a probability proportional to exp(-cost /
    temperature), where costs are measured in units of the difference between the highest and the lowest."""
    first = costs.argmin()
    lowest = costs[first]
    if temperature > 0.0 and (spread := float(costs.max() - lowest)) > 0.0:
        weights = np.exp(-(costs - lowest) / (spread * temperature))
        return rng.choices(range(len(costs)), weights.tolist())[0]
    best = (costs == lowest).nonzero()[0]  # mostly one: costs are sums of many numbers
    return int(first if len(best) == 1 else best[rng.randrange(len(best))])
