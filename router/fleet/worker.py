"""One worker as its card, its events, and what was placed there since describe it."""

import math
from typing import Literal, NamedTuple

from tokenbus.protocol.wire import messages
from tokenbus.router.fleet.event_log import EventLog
from tokenbus.router.fleet.speed import Speed
from tokenbus.router.placement.worker_table import WorkerRow

_QUEUE_SHARE = 8
"""A worker has an eighth more requests than it can run, so that a place that becomes free is taken at once."""
_SERVING = (messages.WorkerState.STARTING, messages.WorkerState.READY, messages.WorkerState.RESTARTING)
_MAX_UNREPORTED = 3
"""So many prompts that should have left blocks, and left none, are no chance."""


class Booking(NamedTuple):
    """A request that was placed, until the worker's own events count it."""

    at: float
    prefill_tokens: int = 0
    """Prompt tokens that it adds to what the worker has to compute."""
    blocks: int = 0
    """Blocks of its prompt."""
    will_cache_blocks: bool = False
    """Whether it will be said to be held there."""


class Worker:
    """One life of a worker. Only its fields change; `fleet` and `served` change them."""

    def __init__(self, card: messages.Card, now: float) -> None:
        self.card = card
        self.state = card.state
        self.load = messages.Load()
        self.last_seen_at = now
        self.lease_expired = False
        """Its lease has lapsed; what was placed there is being cleared up."""
        self.has_no_responders = False
        """Nobody listened when it was last given a request, and it has published no event since."""
        self.log = EventLog()
        self.bookings: dict[str, Booking] = {}
        self.running: set[str] = set()
        """Requests that it holds, by its own word, whoever has placed them."""
        self.row = -1
        """Its place in its model's index and columns."""
        self.processed_tokens = 0
        """Tokens that it has computed and generated, by its last event."""
        self.applied_load = messages.Load()
        self.applied_at = 0.0
        """What its last event that was applied said, and when that was."""
        self.speed = Speed()
        self.expected_to_cache: set[str] = set()
        """Requests of which blocks will be held when they have ended."""
        self.num_unreported = 0
        """How many of those have ended since it last said that it holds anything."""

    def __repr__(self) -> str:
        return f"<Worker {self.card.worker_id} {self.state} {self.num_requests} requests>"

    @property
    def reports_no_blocks(self) -> bool:
        """It computes prompts and never says that it holds their blocks: its events can't be relied on."""
        return self.num_unreported >= _MAX_UNREPORTED

    @property
    def event_state(self) -> Literal["live", "behind", "silent"]:
        """Whether the blocks that it holds are known."""
        if self.reports_no_blocks:
            return "silent"
        return "behind" if self.log.is_behind else "live"

    @property
    def may_recover(self) -> bool:
        """Whether it is to be expected that it takes requests, now or soon: its engine may be starting again."""
        return self.state in _SERVING and not self.lease_expired and self.card.max_num_seqs > 0

    @property
    def num_requests(self) -> int:
        """Requests there: those it reports, and those placed that its reports can't know of yet."""
        return self.load.running + self.load.waiting + len(self.bookings)

    def row_values(self) -> WorkerRow:
        """Its row of the columns, as far as its own word and the bookings set it."""
        card, load, bookings = self.card, self.load, self.bookings
        prefill_tokens, used_blocks = load.queued_prefill_tokens, load.used_blocks
        if bookings:
            prefill_tokens += sum([one.prefill_tokens for one in bookings.values()])
            used_blocks += sum([one.blocks for one in bookings.values()])
        block_size, total_blocks, most = card.kv_block_size or 0, card.total_kv_blocks or 0, card.max_num_seqs
        requests = load.running + load.waiting + len(bookings)
        return WorkerRow(
            self.state is messages.WorkerState.READY
            and not self.lease_expired
            and not self.has_no_responders
            and most > 0,
            self.last_seen_at,
            load.step_age_ms,
            card.context_length,
            block_size,
            prefill_tokens,
            used_blocks,
            total_blocks,
            requests,
            most,
            most + max(1, most // _QUEUE_SHARE),
            max(0, requests + 1 - most),
            (total_blocks - used_blocks) * block_size if block_size else math.inf,
        )
