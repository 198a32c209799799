"""One incarnation of a worker, as described by its card, its events and the requests placed there since."""

import math
from typing import Literal, NamedTuple

import xxhash

from tokenbus.protocol.wire import codec, limits, messages
from tokenbus.protocol.wire.subjects import WorkerAddress, epoch_sort_key
from tokenbus.router.workers.event_log import WorkerEventLog
from tokenbus.router.workers.speed import Speed

MAX_FAILURES = 5
"""After this many requests in a row that ended in a retryable error, a worker is ejected."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
_QUEUE_SHARE = 8
"""A worker is given an eighth more requests than it can run, so that it always has another one to start."""
_RECOVERABLE = (messages.WorkerState.STARTING, messages.WorkerState.READY, messages.WorkerState.RESTARTING)
_LOADED = (messages.WorkerState.READY, messages.WorkerState.RESTARTING)
_GIVING = (messages.WorkerState.READY, messages.WorkerState.DRAINING, messages.WorkerState.LEAVING)
MAX_STEP_AGE_MS = 2_000.0
"""A worker whose engine's step is older than this gets no new work."""
SETTLE_S = 2.0
"""After this time nothing that an incarnation sent before its end can still be in transit."""
_RESTART_SETTLE_S = 0.5
"""The same if the process has ended, and with it its connection to the broker."""
_MAX_UNREPORTED = 3
"""After this many prompts whose blocks were never reported as stored, the worker's events are no longer relied on."""


class Ejection:
    """Decides when a worker whose requests fail is given none for a while. Times are seconds of one monotonic clock.

    A worker that fails within milliseconds looks idle, so it would attract all requests. After several failures in a
    row it is *ejected*: it gets requests only if no other worker can take them. After a pause it is given some again on
    trial. The first failure then ejects it for twice as long, and the first success clears its record.

        admitted --5 failures in a row--> ejected --pause--> on trial --failure--> ejected, twice as long
            ^                                |                   |
            +-----------success--------------+-----success-------+"""

    __slots__ = ("_num_ejections", "_num_failures", "until")

    def __init__(self) -> None:
        self.until = 0.0
        """The end of the current or last pause; 0 if there has been none since the last success."""
        self._num_failures = 0
        """Failures in a row since the last success or ejection."""
        self._num_ejections = 0
        """Ejections since the last success."""

    def __repr__(self) -> str:
        return f"<Ejection until {self.until:.1f}, {self._num_failures} failures>"

    def is_ejected(self, now: float) -> bool:
        return now < self.until

    def succeeded(self) -> None:
        """Records that a request has ended in anything but a retryable error."""
        self.until, self._num_failures, self._num_ejections = 0.0, 0, 0

    def failed(self, now: float, *, may_eject: bool) -> bool:
        """Records that a request has ended in a retryable error; returns whether this ejects the worker."""
        self._num_failures += 1
        limit = 1 if self._num_ejections else MAX_FAILURES
        if not may_eject or self.is_ejected(now) or self._num_failures < limit:
            return False
        self.until = now + min(FIRST_PAUSE_S * 2**self._num_ejections, LONGEST_PAUSE_S)
        self._num_ejections += 1
        self._num_failures = 0
        return True


class Booking(NamedTuple):
    """The load of a placed request, counted until the worker's own events count it."""

    at: float
    prefill_tokens: int = 0
    """Prompt tokens that the worker must compute for it."""
    blocks: int = 0
    """KV blocks of its prompt."""
    expected_blocks: int = 0
    """KV blocks that it is expected to use in the end, minus those that the worker already holds."""
    will_cache_blocks: bool = False
    """Whether the worker should report blocks of its prompt as stored."""
    remote_prefill_worker_id: str = ""
    """The worker that is to compute its prompt, and also has a booking of it; empty if there is none."""


class WorkerRow(NamedTuple):
    """The numbers by which placement compares workers: first those that a worker determines, then derived ones."""

    is_open: bool
    """Whether it may be given work, unless it is silent or stuck."""
    silent_at: float
    """From this time on it counts as silent, unless it is heard of."""
    step_age_ms: float
    context_length: int
    is_prefill: bool
    """Whether it computes prompts for others, and gets requests only if no other worker can take them."""
    ejected_until: float
    """Until this time it gets requests only if no other worker can take them; 0 if it is not ejected."""
    expected_answer_tokens: int
    """The expected tokens of its next completion; 0 if not reported."""
    block_size: int
    """Tokens of a KV block; 0 if it has no blocks."""
    prefill_tokens: int
    """Prompt tokens that it has yet to compute, bookings included."""
    used_blocks: int
    """KV blocks of its running sequences, bookings included."""
    total_blocks: int
    requests: int
    """Requests running, waiting or booked."""
    max_num_seqs: int
    max_requests: int
    """With this many requests it gets no more: another would only wait there."""
    waiting_requests: int
    """Requests that would wait there if one more arrived, including that one."""
    free_tokens: float
    """Tokens that would still fit its KV cache once its requests, bookings included, have their expected final lengths.
    Negative if those are too many; infinite if it has no blocks."""
    prefill_slowdown: float = 1.0
    """Its time per prompt token relative to the fastest worker's: a power of 2."""
    decode_slowdown: float = 1.0
    """The same for the tokens of streams."""
    utilization: float = 0.0
    """Its recent work relative to the most it has ever done: 0 when idle, near 1 at its peak. While it has only its
    first requests, the median of the others'."""
    wait_s: float = 0.0
    """Seconds until it would begin to compute another prompt."""
    last_chosen: int = 0
    """Larger the more recently it was chosen; 0 if never."""


class Worker:
    """Plain state, modified by `Fleet`, `RequestOwners` and `ModelWorkers`."""

    def __init__(self, card: messages.Card, now: float) -> None:
        self.card = card
        self.incarnation = incarnation_key(card.address, card.epoch)
        self.state = card.state
        self.load = messages.Load()
        self.health: messages.WorkerHealth | None = None
        self.last_seen_at = now
        self.num_signs = 0
        self.suspect_after_s = limits.WORKER_SUSPECT_AFTER_S
        """Silence after which it gets no new requests."""
        self._lost_after_s = limits.WORKER_LOST_AFTER_S
        self.lease_expired = False
        """It was silent for too long: it gets no requests, and its own are being recovered."""
        self.has_no_responders = False
        """Its subject had no subscriber when it was last sent a request, and it has published no event since."""
        # only workers whose process sends beats begin with 1
        self.log = WorkerEventLog(limits.FIRST_EVENT_SEQ if card.process else 0)
        self.bookings: dict[str, Booking] = {}
        self.running: set[str] = set()
        """Keys of the requests that it reports having, whichever router placed them."""
        self.row = -1
        """Its row in its model's worker table and its bit in the prefix index."""
        self.processed_tokens: int | None = None
        """Tokens that it had computed and generated by its last applied event, if any."""
        self.applied_load = messages.Load()
        self.applied_at = 0.0
        """Load and time of its last applied event."""
        self.speed = Speed()
        self.ejection = Ejection()
        self.expected_to_cache: set[str] = set()
        """Keys of running requests whose blocks it should report as stored before they end."""
        self.num_unreported = 0
        """Keys of those that have ended since it last reported a stored block."""
        self.is_witnessed = False
        """Whether the broker has once told that its process is connected, and so can tell that it is not."""
        self.has_successor = False
        """Once lost: whether a process of its name is there, which has not announced itself yet."""
        self.settled_at = 0.0
        """Once superseded, the time after which nothing more can arrive; until then 0."""

    def __repr__(self) -> str:
        return f"<Worker {self.card.worker_id} {self.state} {self.num_requests} requests>"

    @property
    def reports_no_blocks(self) -> bool:
        """Whether it computes prompts without ever reporting their blocks, so its events can't be relied on."""
        return self.num_unreported >= _MAX_UNREPORTED

    @property
    def event_state(self) -> Literal["live", "behind", "silent"]:
        """Whether its cached blocks are known, in the form shown to clients."""
        if self.reports_no_blocks:
            return "silent"
        return "behind" if self.log.is_behind else "live"

    @property
    def may_recover(self) -> bool:
        """Whether it accepts requests now or may do so soon, for instance after its engine has restarted."""
        may_serve = self.state in _RECOVERABLE or self.card.loadable
        return may_serve and not self.lease_expired and self.card.max_num_seqs > 0

    @property
    def has_loaded(self) -> bool:
        """Whether its model is loaded, or was until its engine died."""
        return self.state in _LOADED and not self.card.loadable and not self.lease_expired

    @property
    def is_loadable(self) -> bool:
        """Whether it can be asked to load its model, or is already loading it."""
        may_load = self.card.loadable or self.state is messages.WorkerState.STARTING
        return may_load and not self.lease_expired

    @property
    def load_order(self) -> tuple[bool, int]:
        """A sort key for workers that can load a model: those already loading first, the others by hash."""
        name = f"{self.card.model} {self.card.worker_id}"
        return self.card.loadable, xxhash.xxh3_64_intdigest(name.encode())

    @property
    def can_give_blocks(self) -> bool:
        """Whether it can be asked for KV blocks, even while it is draining or leaving."""
        is_up = self.state in _GIVING and not self.lease_expired and not self.has_no_responders
        return is_up and self.load.step_age_ms <= MAX_STEP_AGE_MS

    @property
    def num_requests(self) -> int:
        """The requests that it reports, plus those placed there that its reports don't count yet."""
        return self.load.running + self.load.waiting + len(self.bookings)

    def shown_state(self, now: float) -> str:
        """Returns its state, or the reason why it gets no requests though that would allow it, as people see it."""
        if self.lease_expired:
            return "silent"
        if self.ejection.is_ejected(now):
            return "ejected"
        return "loadable" if self.card.loadable else str(self.state)

    def renew_lease(self, now: float, next_s: float = limits.HEARTBEAT_S) -> None:
        """Records a sign of life, and within which time there will be another."""
        self.last_seen_at, self.lease_expired = now, False
        self.num_signs += 1
        self.suspect_after_s = max(limits.WORKER_SUSPECT_AFTER_S, 2 * next_s)
        self._lost_after_s = max(limits.WORKER_LOST_AFTER_S, 4 * next_s)

    def is_silent(self, now: float) -> bool:
        """Whether it has been silent for so long that it counts as lost."""
        # one that was given a request no longer rests, whether it has said so or not
        lost_after_s = limits.WORKER_LOST_AFTER_S if self.bookings else self._lost_after_s
        return now - self.last_seen_at >= lost_after_s

    def supersede(self, successor: messages.Card, now: float) -> None:
        """Records that a later incarnation has announced itself."""
        # a successor never makes its predecessor's streams wait longer than the silence alone would have done
        self.settled_at = min(now + _RESTART_SETTLE_S, self.last_seen_at + limits.WORKER_LOST_AFTER_S)
        for ended in (successor.previous, *successor.earlier):  # the cards of intermediate epochs may have been lost
            if ended is not None and ended.epoch == self.card.epoch:
                self.log.end_seq, self.settled_at = ended.seq, now + SETTLE_S

    def is_replaced_by(self, epoch: str, now: float) -> bool:
        """Whether an incarnation with that epoch replaces this one: a later one does, an earlier one only if this one
        has been silent long enough to be lost."""
        return epoch_sort_key(epoch) > epoch_sort_key(self.card.epoch) or self.is_silent(now)

    def is_overdue(self, now: float) -> bool:
        """Whether it has been silent for too long but its lease has not been ended yet."""
        return not self.lease_expired and self.is_silent(now)

    def tracked_card(self, indexed_blocks: int, now: float) -> messages.Card:
        """Returns its card with its load and this router's view of it, as shown to clients."""
        watched = messages.WorkerTracking(
            events=self.event_state,
            indexed_blocks=indexed_blocks,
            lost_events=self.log.num_lost,
            booked=len(self.bookings),
            ejected=self.ejection.is_ejected(now),
        )
        return codec.replace(self.card, state=self.state, load=self.load, health=self.health, watched=watched)

    def row_values(self) -> WorkerRow:
        """Returns its row of the worker table, as far as determined by its own messages and its bookings."""
        card, load, bookings = self.card, self.load, self.bookings
        prefill_tokens, used_blocks = load.queued_prefill_tokens, load.used_blocks
        expected_blocks = max(load.expected_blocks, used_blocks)  # a worker need not say what it expects
        if bookings:
            prefill_tokens += sum([one.prefill_tokens for one in bookings.values()])
            used_blocks += sum([one.blocks for one in bookings.values()])
            expected_blocks += sum([one.expected_blocks for one in bookings.values()])
        block_size, total_blocks = card.kv_block_size or 0, card.total_kv_blocks or 0
        most = min(card.max_num_seqs, load.max_running or card.max_num_seqs)
        requests = load.running + load.waiting + len(bookings)
        return WorkerRow(
            self.state is messages.WorkerState.READY
            and not self.lease_expired
            and not self.has_no_responders
            and most > 0,
            self.last_seen_at + self.suspect_after_s,
            load.step_age_ms,
            card.context_length,
            card.role is messages.WorkerRole.PREFILL,
            self.ejection.until,
            load.expected_answer_tokens,
            block_size,
            prefill_tokens,
            used_blocks,
            total_blocks,
            requests,
            most,
            most + max(1, most // _QUEUE_SHARE),
            max(0, requests + 1 - most),  # including the request to be placed
            (total_blocks - expected_blocks) * block_size if block_size and total_blocks else math.inf,
        )


def incarnation_key(address: WorkerAddress, epoch: str) -> str:
    """Names one incarnation of one worker; the epoch alone does not, since another worker may use the same."""
    return f"{address.model} {address.worker_id} {epoch}"
