"""Policies: each gives every candidate worker a cost, and the lowest cost wins."""

import dataclasses
import random
from importlib import metadata
from typing import NamedTuple, Protocol

import numpy as np

from tokenbus.router.placement.worker_table import Floats
from tokenbus.router.workers.speed import StepTimes


class Fetchable(NamedTuple):
    """Tokens after each candidate's overlap that it could fetch from another worker instead of computing them."""

    tokens: Floats
    """0 where there are few, or computing them would take hardly longer."""
    cost: Floats
    """The time to fetch a token relative to the time to compute one."""


class View(NamedTuple):
    """The candidates as a policy sees them: one entry per candidate in each array. A policy must not modify them."""

    prompt_tokens: int
    times: StepTimes
    """The times of steps of the model's fastest workers."""
    overlap_tokens: Floats
    """Leading tokens of the prompt that are in its KV cache, or are predicted to be soon."""
    waited_s: float
    """Seconds that earlier requests have waited because only busy workers held what this prompt begins with, less the
    time that further copies took."""
    session: Floats | None
    """1 for the worker that got the session's last request, else 0; None if there is no such worker."""
    fetchable: Fetchable | None
    """Tokens that the candidates could fetch from other workers; None if there are none."""
    distance_s: Floats | None
    """Seconds by which each counts as slower because it runs at another site; None if all run at the router's own."""
    block_size: Floats
    """Tokens of a KV block; 0 if it has no blocks."""
    prefill_tokens: Floats
    """Prompt tokens that it must compute before this prompt's."""
    used_blocks: Floats
    """KV blocks of its running sequences."""
    total_blocks: Floats
    requests: Floats
    """Requests running, waiting or just placed there."""
    max_num_seqs: Floats
    max_requests: Floats
    """With this many requests it gets no more: another would only wait there."""
    waiting_requests: Floats
    """Requests that would wait there, including this one."""
    free_tokens: Floats
    """Tokens that would still fit its KV cache once its requests have their expected final lengths. Negative if those
    are too many; infinite if it has no blocks."""
    prefill_slowdown: Floats
    """Its time per prompt token relative to the fastest worker's: a power of 2."""
    decode_slowdown: Floats
    """The same for the tokens of streams."""
    utilization: Floats
    """Its recent work relative to the most it has ever done: 0 when idle, near 1 at its peak."""
    wait_s: Floats
    """Seconds until it would begin to compute the prompt, with the wait for a place and for KV memory."""
    last_chosen: Floats
    """Larger the more recently it was chosen; 0 if never."""


class Policy(Protocol):
    """Orders candidates by cost. The lowest wins, with ties broken at random. A policy keeps no state between calls."""

    name: str

    def costs(self, view: View) -> Floats:
        """Returns one finite cost for each candidate, in a new array or a column of the view."""
        ...


_STREAM_WEIGHT = 0.15
"""A second that a stream waits for its next token counts as this much of a second without a first one: text usually
comes faster than it is read."""
_PAID_SHARE = 0.9
"""A copy of a prefix is nearly free once requests have waited for as long as it takes, but a smaller one is better."""
_UTILIZED_STEPS = 0.5
"""The next request to a worker that is always busy comes in the middle of a step."""
_MAX_UTILIZATION_SHARE = 0.25
"""That counts at most this share of the time to compute the prompt, or a short conversation would leave the worker that
has its beginning."""


@dataclasses.dataclass
class KvAware:
    """The cost is the seconds that people wait if a worker gets the request, as the steps seen so far suggest:

    - for its first token: until streams leave it a place and KV memory, prompts queued there, the rest of the step in
      progress, and the prompt itself;
    - for the next tokens of the streams there, which its prompt holds up;
    - for those who come next: half a step, by the worker's utilization. It spreads requests that arrive one by one;
    - on the way to another site.

    Tokens that can be fetched count for less than those computed, but still for most: they are then kept twice, and
    evict something else. Slower workers cost more, and the worker of the session's last request a little less.
    docs/decisions/0026 explains the constants."""

    name: str = "kv"
    session_tokens: float = 256.0
    copy_weight: float = 0.6

    def costs(self, view: View) -> Floats:
        times = view.times
        to_compute = view.prompt_tokens - view.overlap_tokens
        if view.fetchable is not None:
            to_compute -= view.fetchable.tokens * (1.0 - np.maximum(view.fetchable.cost, self.copy_weight))
        to_compute *= times.prompt_token_s
        to_compute += times.prompt_step_s
        costs: Floats = _STREAM_WEIGHT * view.requests
        costs += 1.0
        costs *= to_compute
        if view.waited_s > 0.0:
            to_copy = view.overlap_tokens.max() - view.overlap_tokens
            costs -= _PAID_SHARE * np.minimum(times.prompt_token_s * to_copy, view.waited_s)
        costs *= view.prefill_slowdown
        costs += view.wait_s
        half_step_s = _UTILIZED_STEPS * (times.prompt_step_s + times.decode_step_s)
        prompt_s = times.prompt_step_s + times.prompt_token_s * view.prompt_tokens
        costs += min(half_step_s, _MAX_UTILIZATION_SHARE * prompt_s) * view.utilization
        if view.session is not None:
            costs -= self.session_tokens * times.prompt_token_s * view.session
        if view.distance_s is not None:
            costs += view.distance_s
        return costs


def full_ones_last(costs: Floats, view: View) -> Floats:
    """Raises the costs of candidates at which the request would wait for a place or for KV memory above all others.
    `costs` are 0 or more."""
    is_full = view.prompt_tokens - view.overlap_tokens > view.free_tokens
    is_full |= view.waiting_requests > 0.0
    raised: Floats = costs + (1.0 + costs.max()) * is_full
    return raised


class LeastLoaded:
    """Prefers the worker with the fewest requests relative to what it can run at once."""

    name = "least_loaded"

    def costs(self, view: View) -> Floats:
        return full_ones_last(view.requests / np.maximum(view.max_num_seqs, 1.0), view)


class RoundRobin:
    """Prefers the least recently chosen worker of those that have room."""

    name = "round_robin"

    def costs(self, view: View) -> Floats:
        return full_ones_last(view.last_chosen, view)


class Random:
    """Has no preference among the workers that have room."""

    name = "random"

    def costs(self, view: View) -> Floats:
        return full_ones_last(np.zeros_like(view.last_chosen), view)


POLICIES = ("kv", "least_loaded", "round_robin", "random")

ENTRY_POINTS = "tokenbus.policies"
"""The entry point group in which installed packages register their own policy classes."""


def make_policies() -> dict[str, Policy]:
    """Returns one instance of each policy by name: built-in ones and those of installed packages."""
    policies: list[Policy] = [KvAware(), LeastLoaded(), RoundRobin(), Random()]
    own = {policy.name: policy for policy in policies}
    foreign = {point.name: point.load()() for point in metadata.entry_points(group=ENTRY_POINTS)}
    return foreign | own


def draw(costs: Floats, rng: random.Random, temperature: float = 0.0) -> int:
    """Returns the index of the lowest cost. Ties are broken at random, so that no candidate is favoured by its
    position.

    With a temperature above 0 every candidate may be drawn, with a probability proportional to exp(-cost /
    temperature), where costs are measured in units of the difference between the highest and the lowest."""
    first = costs.argmin()
    lowest = costs[first]
    if temperature > 0.0 and (spread := float(costs.max() - lowest)) > 0.0:
        weights = np.exp(-(costs - lowest) / (spread * temperature))
        return rng.choices(range(len(costs)), weights.tolist())[0]
    best = (costs == lowest).nonzero()[0]  # usually one: costs are sums of many numbers
    return int(first if len(best) == 1 else best[rng.randrange(len(best))])
