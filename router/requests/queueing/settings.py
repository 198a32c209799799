"""Settings for the placement of requests, and for their wait."""

import random
from typing import NamedTuple

from tokenbus.router.placement.policies import Policy
from tokenbus.router.placement.remote_prefills import MIN_REMOTE_PREFILL_TOKENS


class PolicySettings(NamedTuple):
    """The policies that requests may name, and the one for requests that name none."""

    policies: dict[str, Policy]
    default_policy: str
    rng: random.Random
    temperature: float = 0.0
    min_remote_prefill_tokens: int = MIN_REMOTE_PREFILL_TOKENS
    """Fewest missing tokens for which another worker may compute a prompt; 0: none ever does."""


class QueueSettings(NamedTuple):
    """Limits of the queue of each model in one router."""

    max_requests: int = 1_024
    max_tokens: int = 1 << 22
    priority_s: float = 1.0
    """Seconds of waiting that one step of priority is worth."""
