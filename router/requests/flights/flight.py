"""The state of a request in a router, from its receipt until it ends or a worker has sent its terminal.

    received --> unaccepted: this router owns the terminal --accept--> accepted: the worker owns it --> removed
                     ^------------------- reclaim: the worker is lost ------------|

A flight is unaccepted exactly while its `worker_id` is None. Pure."""

import dataclasses
from collections.abc import Hashable, Iterable, Iterator

from tokenbus.protocol.telemetry import long_waits, tracing
from tokenbus.protocol.wire import codec, internal, messages, subjects
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.protocol.wire.checks import validation
from tokenbus.router.access.limits import FREE, Ticket
from tokenbus.router.requests.flights.completion import PartialCompletion
from tokenbus.router.requests.flights.way import Way

_TRIM_TO = 0.9
"""`trim` frees memory down to this share of what is allowed, so that it need not run again at once."""


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Flight:
    """One request. `Flights` changes the fields by which it indexes requests; the task that carries out the request
    changes the rest."""

    request: messages.GenerateRequest
    """The request, without its prompt once `prompt_ids` are known."""
    address: subjects.ModelAddress
    reply: str
    """The client's inbox."""
    encoding: codec.Encoding
    received_at: float
    key: str = dataclasses.field(init=False)
    """Tenant and request id: two tenants may use the same id."""
    span: tracing.Span = tracing.NOOP_SPAN
    way: Way = dataclasses.field(default_factory=Way)
    """The workers that it was sent to, and where its time went, for those who ask."""
    waiting_since: float = dataclasses.field(init=False)
    """When it was received, or its last worker was lost."""
    slow_wait: long_waits.BackoffTimer = dataclasses.field(
        default_factory=lambda: long_waits.BackoffTimer(long_waits.FIRST_S)
    )
    """Decides when this request's wait is logged again."""
    held_bytes: int = 0
    """Memory that counts against the limit of `Flights`."""
    prompt_ids: bytes | None = None
    """The tokenized prompt, kept until the request ends or `trim` forgets it; then it can't be placed again."""
    num_prompt_tokens: int = 0
    params_bytes: int = 0
    """The size of tools and constraints; all other parameters are small."""
    is_chat: bool = False
    """Whether the prompt is a conversation."""
    completion: PartialCompletion = dataclasses.field(default_factory=PartialCompletion)
    adapters: tuple[Adapter, ...] = ()
    """The adapters that it is computed with, fixed once a worker has accepted it."""
    hash_scheme: str = ""
    """The hash scheme of the worker that accepted it first: only workers with the same one can continue it."""
    stream: tuple[str, int] | None = None
    """The incarnation of the worker that streams it, and the stream's number there."""
    attempt: int = 0
    """Number of the last attempt that was dispatched; 0 before the first."""
    attempt_worker_id: str = ""
    """The worker to which this attempt was sent."""
    attempt_offset: int = 0
    """The number of tokens that were sampled before this attempt."""
    worker_id: str | None = None
    """The worker that has accepted the request and owns its terminal."""
    awaiting_worker_id: str | None = None
    """The worker whose accept this router is waiting for."""
    in_doubt: bool = False
    """A worker may or may not hold the request: its reply to `run` or `drop` is outstanding. Meanwhile this router
    sends the client nothing, since that worker may be streaming to it, or may have sent its terminal."""
    lacks_tokens: bool = False
    """Whether its worker may have reported tokens of this attempt that this router has missed."""
    accepted_at: float = 0.0
    first_accepted_at: float | None = None
    """When the first of its workers accepted it."""
    keepalive_at: float | None = None
    """When this router last sent the client a keepalive in the present wait."""
    ended_by: str | None = None
    """The last worker to report that the request has ended there. This report may arrive before the worker's accept."""
    end: internal.StreamEnd | None = None
    """Its end there, if that worker says how it has ended."""
    cancelled: bool = False
    wants_answer: bool = False
    """Whether its worker is to send the answer at its end, to say how the next turn begins."""
    wants_reasoning: bool = False
    """Whether that answer is to have the reasoning."""
    last_words: messages.Chunk | None = None
    """The terminal of a worker that gave it up, in case no other continues it; None once another worker may have."""
    num_charged: int = 0
    """Tokens that an earlier guardian has charged it."""
    ticket: Ticket = FREE
    """Its charge against limits."""
    rate_limits: messages.RateLimits | None = None
    """The limits that its client is told of."""
    is_named: bool = True
    """Whether its worker's log names this router as the guardian, or is certain to do so; while it is False, another
    router may act on the request."""

    def __post_init__(self) -> None:
        self.is_chat = self.is_chat or self.request.messages is not None
        self.key = subjects.request_key(self.tenant, self.request_id)
        self.waiting_since = self.received_at

    def __repr__(self) -> str:
        return f"<Flight {self.key} of {self.model}: attempt {self.attempt} at {self.worker_id}>"

    @property
    def num_bytes(self) -> int:
        """The memory of what a worker needs for the request: prompt, completion, tools and constraints."""
        return len(self.prompt_ids or b"") + self.completion.num_bytes + self.params_bytes

    @property
    def model(self) -> str:
        return self.address.model

    @property
    def tenant(self) -> str:
        return self.address.tenant

    @property
    def feature(self) -> str:
        """The feature that its worker must have and that workers of earlier versions lack; empty if there is none."""
        return validation.needed_feature(self.request)

    @property
    def needs(self) -> Hashable:
        """The kind of worker that it needs, whatever the scales of its adapters; empty if any will do."""
        digests = tuple(one.digest for one in self.adapters)
        return (digests, self.feature) if digests or self.feature else ()

    @property
    def has_begun(self) -> bool:
        """Whether a worker has ever accepted it, or it continues an earlier stream."""
        return self.first_accepted_at is not None or len(self.completion) > 0

    @property
    def num_streamed_tokens(self) -> int:
        """Tokens of the completion, once a worker has accepted it; a refusal counts none."""
        return len(self.completion) if self.first_accepted_at is not None else 0

    @property
    def has_new_tokens(self) -> bool:
        """Whether the current attempt has sampled any token."""
        return len(self.completion) > self.attempt_offset

    @property
    def request_id(self) -> str:
        assert self.request.id is not None
        return self.request.id

    def keep_last_words(self, last_words: messages.Chunk | None) -> None:
        """Keeps the terminal that a worker has left for it, if that is one."""
        self.last_words = last_words if last_words is not None and last_words.finish_reason is not None else None

    def remaining_ms(self, now: float) -> float | None:
        """Time until the request's deadline; 0 or less once it has passed, None without a deadline."""
        if self.request.timeout_ms is None:
            return None
        return self.request.timeout_ms - (now - self.received_at) * 1e3

    def remaining_s(self, now: float) -> float | None:
        """`remaining_ms` in seconds."""
        remaining_ms = self.remaining_ms(now)
        return None if remaining_ms is None else remaining_ms / 1e3


_NO_STREAMS: dict[int, Flight] = {}


class Flights:
    """All flights of one router, by key, by accepting worker and by stream number.

    Their number is bounded, and so is the memory for prompts and completions. If the unaccepted ones take too
    much memory, new requests are refused; if the accepted ones do, the largest of them lose what they need to be placed
    again."""

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._held_bytes = 0
        self._unaccepted_bytes = 0
        self._flights: dict[str, Flight] = {}
        self._unaccepted: dict[str, Flight] = {}
        self._accepted: dict[subjects.WorkerAddress, dict[str, Flight]] = {}
        self._streams: dict[str, dict[int, Flight]] = {}
        """The flights that workers stream, by incarnation and stream number."""

    def __repr__(self) -> str:
        return f"<Flights {len(self._flights)} of {self._capacity}, {self._held_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._flights)

    def has_room(self, num_bytes: int) -> bool:
        """Whether one more flight of that size fits."""
        return len(self._flights) < self._capacity and self._unaccepted_bytes + num_bytes <= self._capacity_bytes

    def add(self, flight: Flight, num_bytes: int) -> None:
        assert flight.key not in self._flights, flight
        assert flight.worker_id is None, flight
        self._flights[flight.key] = self._unaccepted[flight.key] = flight
        self._set_held_bytes(flight, num_bytes)

    def find_flight(self, key: str) -> Flight | None:
        return self._flights.get(key)

    def find_all(self, keys: Iterable[str], model: str) -> Iterator[Flight]:
        """The flights among `keys`, except those of other models: a worker may report only on requests for its own."""
        for key in keys:
            flight = self._flights.get(key)
            if flight is not None and flight.model == model:
                yield flight

    def holds(self, flight: Flight) -> bool:
        """Whether this flight itself is still open; its key may belong to a later one."""
        return self._flights.get(flight.key) is flight

    def set_prompt_ids(self, flight: Flight, prompt_ids: bytes, seed: int | None = None) -> None:
        """Replaces the prompt's text by its token ids, at four bytes each, and moves the tokens of an earlier stream
        into the completion. `seed` is that of a request that names none."""
        flight.prompt_ids = prompt_ids
        flight.num_prompt_tokens = len(prompt_ids) // 4
        if (given := flight.request.resume_from) is not None:
            flight.completion.token_ids.extend(given.token_ids)
            flight.hash_scheme = given.hash_scheme or ""
        seed = seed if flight.request.seed is None else flight.request.seed
        flight.request = codec.replace(
            flight.request, messages=None, prompt=None, suffix=None, token_ids=None, resume_from=None, seed=seed
        )
        flight.params_bytes = validation.params_bytes(flight.request)
        self._set_held_bytes(flight, flight.num_bytes)

    def start_attempt(self, flight: Flight, worker_id: str) -> None:
        """Records that a worker is to run the request; reports of an earlier worker no longer count."""
        self.unbind_stream(flight)
        flight.attempt += 1
        flight.attempt_worker_id = worker_id
        flight.attempt_offset = len(flight.completion)
        flight.completion.start_attempt()
        flight.ended_by = flight.end = None
        flight.lacks_tokens = False

    def bind_stream(self, flight: Flight, incarnation: str, stream_no: int) -> None:
        """Records that a worker has started the request and now names it by a number."""
        self.unbind_stream(flight)
        if (other := self.streams_of(incarnation).get(stream_no)) is not None:
            self.unbind_stream(other)  # the worker contradicts itself: only its latest report counts
        flight.stream = incarnation, stream_no
        self._streams.setdefault(incarnation, {})[stream_no] = flight

    def streams_of(self, incarnation: str) -> dict[int, Flight]:
        """The flights that an incarnation of a worker streams, by stream number."""
        return self._streams.get(incarnation, _NO_STREAMS)

    def trim(self) -> int:
        """Frees memory if all flights together take too much; to be called about once a second, since completions grow.

        Accepted flights, the largest first, lose what they need to be placed again. Returns their number."""
        for there in self._streams.values():
            for flight in there.values():
                assert flight.prompt_ids is not None, flight
                self._set_held_bytes(flight, flight.num_bytes)
        if self._held_bytes <= self._capacity_bytes:
            return 0
        accepted = [flight for there in self._accepted.values() for flight in there.values()]
        num_trimmed = 0
        for flight in sorted(accepted, key=lambda flight: flight.held_bytes, reverse=True):
            if self._held_bytes <= _TRIM_TO * self._capacity_bytes or not flight.held_bytes:
                break
            self.unbind_stream(flight)
            flight.prompt_ids, flight.completion = None, PartialCompletion()
            self._set_held_bytes(flight, 0)
            num_trimmed += 1
        return num_trimmed

    def accept(self, flight: Flight, worker_id: str, now: float) -> None:
        """Hands a flight over to the worker that has accepted it."""
        assert self._unaccepted.get(flight.key) is flight, flight
        assert flight.worker_id is None, flight
        del self._unaccepted[flight.key]
        self._unaccepted_bytes -= flight.held_bytes
        flight.worker_id, flight.accepted_at = worker_id, now
        if flight.first_accepted_at is None:
            flight.first_accepted_at = now
        self._accepted.setdefault(subjects.WorkerAddress(flight.model, worker_id), {})[flight.key] = flight

    def reclaim(self, flight: Flight) -> None:
        """Takes a flight back from a worker that is lost, or seems to be."""
        self._remove_from_worker(flight)
        flight.worker_id = None
        self._unaccepted[flight.key] = flight
        self._unaccepted_bytes += flight.held_bytes

    def remove(self, flight: Flight) -> None:
        del self._flights[flight.key]
        self._set_held_bytes(flight, 0)
        self.unbind_stream(flight)
        if flight.worker_id is None:
            del self._unaccepted[flight.key]
        else:
            self._remove_from_worker(flight)

    def accepted_by(self, address: subjects.WorkerAddress) -> list[Flight]:
        return list(self._accepted.get(address, {}).values())

    def owners(self) -> set[subjects.WorkerAddress]:
        """Returns the workers that have accepted requests."""
        return {address for address, flights in self._accepted.items() if flights}

    def unaccepted(self) -> list[Flight]:
        return list(self._unaccepted.values())

    def all(self) -> list[Flight]:
        return list(self._flights.values())

    def check_integrity(self) -> None:
        assert len(self._flights) <= self._capacity
        assert self._held_bytes == sum(flight.held_bytes for flight in self._flights.values())
        assert self._unaccepted_bytes == sum(flight.held_bytes for flight in self._unaccepted.values())
        streams = {(name, no): flight for name, there in self._streams.items() for no, flight in there.items()}
        assert streams == {flight.stream: flight for flight in self._flights.values() if flight.stream is not None}
        assert all(self._streams.values())
        accepted = {key: flight for there in self._accepted.values() for key, flight in there.items()}
        assert accepted == {key: flight for key, flight in self._flights.items() if flight.worker_id is not None}
        assert accepted.keys() | self._unaccepted.keys() == self._flights.keys()
        assert not accepted.keys() & self._unaccepted.keys()
        assert all(self._accepted.values())

    def _set_held_bytes(self, flight: Flight, num_bytes: int) -> None:
        self._held_bytes += num_bytes - flight.held_bytes
        if flight.worker_id is None:
            self._unaccepted_bytes += num_bytes - flight.held_bytes
        flight.held_bytes = num_bytes

    def unbind_stream(self, flight: Flight) -> None:
        """Stops counting the tokens that its worker reports."""
        if flight.stream is None:
            return
        incarnation, stream_no = flight.stream
        flight.stream = None
        there = self._streams[incarnation]
        del there[stream_no]
        if not there:
            del self._streams[incarnation]

    def _remove_from_worker(self, flight: Flight) -> None:
        assert flight.worker_id is not None, flight
        address = subjects.WorkerAddress(flight.model, flight.worker_id)
        there = self._accepted[address]
        del there[flight.key]
        if not there:
            del self._accepted[address]
