"""Placement's requests and answers, and the explanation of a choice."""

import enum
import math
from collections.abc import Collection, Sequence, Set
from typing import NamedTuple

from tokenbus.protocol.wire import messages
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.router.placement.adapters import has_all
from tokenbus.router.placement.policies import View
from tokenbus.router.placement.remote_prefills import MIN_REMOTE_PREFILL_TOKENS
from tokenbus.router.placement.worker_table import Floats
from tokenbus.router.workers.worker import Worker


class PlacementRequest(NamedTuple):
    """The properties of a request that placement needs."""

    key: str
    num_tokens: int
    """Tokens of its prompt."""
    hashes: Sequence[int] = ()
    """The hashes of the prompt's full blocks; empty for a request that must not use the prefix cache."""
    session: str = ""
    """The session it belongs to, according to its client."""
    answer_tokens: int = 0
    """The expected tokens of its completion."""


class PlacementOptions(NamedTuple):
    """Which workers may be chosen, and how."""

    only: str | None = None
    """The only worker that may be chosen, by its id."""
    exclude: Collection[str] = ()
    """Workers that may not be chosen, by their ids."""
    temperature: float = 0.0
    """0 takes the lowest cost. Above 0, workers with higher costs may be drawn too."""
    explain: bool = False
    """Whether to report all candidates with their costs."""
    hash_scheme: str = ""
    """The only hash scheme that a chosen worker may have; any if empty."""

    adapters: tuple[Adapter, ...] = ()
    """Adapters that a chosen worker must have for `tenant`."""
    tenant: str = ""
    feature: str = ""
    """A feature that a chosen worker must have, and that not all of the model's workers may have; none if empty."""
    min_remote_prefill_tokens: int = MIN_REMOTE_PREFILL_TOKENS
    """The number of missing tokens from which another worker may compute a prompt; 0 means never."""

    @property
    def restricts(self) -> bool:
        """Whether these options may exclude workers."""
        return self.only is not None or bool(self.exclude or self.hash_scheme or self.adapters or self.feature)

    def allows(self, card: messages.Card) -> bool:
        return (
            card.worker_id not in self.exclude
            and self.only in (None, card.worker_id)
            and self.hash_scheme in ("", card.hash_scheme)
            and (not self.adapters or has_all(card, self.adapters, self.tenant))
            and (not self.feature or self.feature in card.features)
        )


class BlockSource(NamedTuple):
    """The worker from which another one should fetch blocks of a prompt instead of computing them; none by default."""

    worker: Worker | None = None
    blocks: int = 0
    """The number of blocks after the overlap expected from there."""
    remote_prefill_s: float = 0.0
    """If above 0, that worker computes the prompt in a remote prefill, which is expected to take this long."""

    @property
    def prefill_worker_id(self) -> str:
        """The worker that computes the prompt for another one; empty if there is none."""
        return self.worker.card.worker_id if self.worker is not None and self.remote_prefill_s > 0 else ""


NO_SOURCE = BlockSource()


class Placement(NamedTuple):
    """The chosen worker, at which the request has been booked."""

    worker: Worker
    policy: str
    overlap_blocks: int = 0
    """Leading blocks of the prompt that the worker holds or is predicted to hold."""
    report: messages.RoutingReport | None = None
    fetch_from: Worker | None = None
    """The worker from which the chosen one should fetch blocks instead of computing them."""
    fetch_blocks: int = 0
    """The number of blocks after the overlap expected from there."""
    remote_prefill_s: float = 0.0
    """If above 0, that worker computes the prompt in a remote prefill, which is expected to take this long."""
    num_candidates: int = 0
    """Workers that could have been chosen."""
    most_held_blocks: int = 0
    """The most leading blocks of the prompt that any of them holds or is predicted to hold."""
    wait_s: float = 0.0
    """The time after which the chosen one is expected to begin to compute the prompt, waits for a place and KV
    memory included."""

    @property
    def has_remote_prefill(self) -> bool:
        """Whether another worker computes the prompt."""
        return self.remote_prefill_s > 0

    @property
    def overlap_tokens(self) -> int:
        """Tokens that the chosen worker is expected to hold."""
        return self.overlap_blocks * (self.worker.card.kv_block_size or 0)

    @property
    def expected_cached_tokens(self) -> int:
        """Tokens of the prompt that the chosen worker is expected not to compute."""
        return (self.overlap_blocks + self.fetch_blocks) * (self.worker.card.kv_block_size or 0)

    @property
    def fetch_tokens(self) -> int:
        """Tokens that it is expected to fetch from another worker's blocks."""
        return 0 if self.has_remote_prefill else self.fetch_blocks * (self.worker.card.kv_block_size or 0)


class NoWorker(NamedTuple):
    """No worker can be chosen."""


class Capacity(enum.Enum):
    """Whether a model's workers can start another request."""

    AVAILABLE = enum.auto()
    BUSY = enum.auto()
    """Not now: all of them are full, or about to come back."""
    NO_WORKERS = enum.auto()
    """None can, now or later."""


def explain(
    chosen: Worker,
    policy: str,
    workers: Sequence[Worker],
    view: View,
    costs: Sequence[float],
    fetched_tokens: Floats,
    source: BlockSource,
    ejected: Set[str],
) -> messages.RoutingReport:
    """Reports what was known about each candidate. `workers`, the columns of `view`, `costs` and `fetched_tokens` are
    in the same order; `ejected` workers were passed over unless they are among them."""
    candidates = []
    for number, worker in enumerate(workers):
        block_size = max(1.0, float(view.block_size[number]))
        uncached_tokens = max(0.0, view.prompt_tokens - float(view.overlap_tokens[number]))
        candidate = messages.Candidate(
            worker_id=worker.card.worker_id,
            cost=round(costs[number], 6),
            overlap_blocks=int(view.overlap_tokens[number] / block_size),
            prefill_blocks=math.ceil((float(view.prefill_tokens[number]) + uncached_tokens) / block_size),
            decode_blocks=int(view.used_blocks[number]),
            fetch_blocks=int(fetched_tokens[number] / block_size),
            state=worker.state,
            site=worker.card.site,
        )
        candidates.append(candidate)
    return messages.RoutingReport(
        chosen=chosen.card.worker_id,
        policy=policy,
        candidates=candidates,
        fetch_from="" if source.worker is None else source.worker.card.worker_id,
        has_leg=source.remote_prefill_s > 0,
        ejected=sorted(ejected - {one.card.worker_id for one in workers}),
    )
