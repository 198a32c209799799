"""One request on its way through a router, from its receipt to its end at a worker."""

from collections import Counter
from collections.abc import Iterable, Iterator

from tokenbus.protocol.telemetry import backoff, tracing
from tokenbus.protocol.wire import codec, messages, subjects


class Flight:
    """What a router knows of a request it has taken. Only its fields change; `journey` and `flights` change them.

    taken --> (worker_id None: this router owns its terminal) --accept--> at worker_id --> ended
                             ^------------------ the worker is lost ------------|
    """

    __slots__ = (
        "accepted_at",
        "alive_at",
        "attempt",
        "awaiting",
        "cancelled",
        "encoding",
        "ended_at",
        "held_bytes",
        "in_doubt",
        "key",
        "model",
        "num_prompt_tokens",
        "prompt_ids",
        "received_at",
        "reply",
        "request",
        "slow",
        "span",
        "spoken",
        "tenant",
        "waits_since",
        "worker_id",
    )

    def __init__(
        self,
        request: messages.GenerateRequest,
        address: subjects.ModelAddress,
        reply: str,
        encoding: codec.Encoding,
        received_at: float,
    ) -> None:
        assert request.id is not None
        self.request = request
        self.model = address.model
        self.tenant = address.tenant
        self.key = subjects.request_key(address.tenant, request.id)
        self.reply = reply
        self.encoding = encoding
        self.received_at = received_at
        self.span = tracing.NOOP_SPAN
        """Of its way to a worker, or to this router's own terminal."""
        self.waits_since = received_at
        self.slow = backoff.BackoffTimer(backoff.FIRST_S)
        """When its journal says again that it waits."""
        self.held_bytes = 0
        """What it counts for among the bytes that a router may hold."""
        self.prompt_ids: bytes | None = None
        """Kept from tokenizing until it has spoken: that long it can be placed again."""
        self.num_prompt_tokens = 0
        """Once it is tokenized."""
        self.attempt = 0
        """The highest attempt that was dispatched."""
        self.worker_id: str | None = None
        """Who has accepted it; without one this router owns its terminal."""
        self.awaiting: str | None = None
        """Whose accept is being waited for."""
        self.in_doubt = False
        """A worker may have it: its answer to a run or a drop is awaited. Meanwhile this router says nothing to the
        client, who may have that worker's terminal."""
        self.accepted_at = 0.0
        self.alive_at: float | None = None
        """When this router last told the client that the request is alive."""
        self.ended_at: str | None = None
        """The last worker that said this request has ended there, which it may before its accept has been read."""
        self.cancelled = False
        self.spoken = False
        """Its client may have text of it."""

    def __repr__(self) -> str:
        return f"<Flight {self.key} of {self.model}: attempt {self.attempt} at {self.worker_id}>"

    @property
    def request_id(self) -> str:
        assert self.request.id is not None
        return self.request.id

    @property
    def is_streamed(self) -> bool:
        return self.request.is_streamed

    def remaining_ms(self, now: float) -> float | None:
        """What is left of the request's time; at most 0 when it has passed."""
        if self.request.timeout_ms is None:
            return None
        return self.request.timeout_ms - (now - self.received_at) * 1e3


class Flights:
    """All flights of one router, by key, and by the worker that has accepted them; bounded in number and bytes."""

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._held_bytes = 0
        self._flights: dict[str, Flight] = {}
        self._unaccepted: dict[str, Flight] = {}
        self._accepted: dict[subjects.WorkerAddress, dict[str, Flight]] = {}
        self._of_tenant: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Flights {len(self._flights)} of {self._capacity}, {self._held_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._flights)

    def has_room(self, num_bytes: int) -> bool:
        """Whether one more, of that size, can be taken."""
        return len(self._flights) < self._capacity and self._held_bytes + num_bytes <= self._capacity_bytes

    def add(self, flight: Flight, num_bytes: int) -> None:
        assert flight.key not in self._flights, flight
        assert flight.worker_id is None, flight
        self._flights[flight.key] = flight
        self._of_tenant[flight.tenant] += 1
        self._unaccepted[flight.key] = flight
        self._hold(flight, num_bytes)

    def open_of(self, tenant: str) -> int:
        """How many a tenant has in the air."""
        return self._of_tenant[tenant]

    def find(self, key: str) -> Flight | None:
        return self._flights.get(key)

    def told_of(self, keys: Iterable[str], model: str) -> Iterator[Flight]:
        """Those of the requests that a worker of that model speaks of: it has no say about others."""
        for key in keys:
            flight = self._flights.get(key)
            if flight is not None and flight.model == model:
                yield flight

    def holds(self, flight: Flight) -> bool:
        """Whether that very flight is still in the air."""
        return self._flights.get(flight.key) is flight

    def keep_prompt(self, flight: Flight, prompt_ids: bytes) -> None:
        """From now on the prompt is held as token ids, and its text no more."""
        flight.prompt_ids = prompt_ids
        flight.num_prompt_tokens = len(prompt_ids) // 4
        flight.request = codec.replace(flight.request, messages=None, prompt=None, token_ids=None)
        self._hold(flight, len(prompt_ids))

    def spoke(self, flight: Flight) -> None:
        """Its client may have text: it can't be placed again, and its prompt is not needed any more."""
        flight.spoken = True
        flight.prompt_ids = None
        self._hold(flight, 0)

    def accept(self, flight: Flight, worker_id: str, now: float) -> None:
        """Notes who has taken a flight over."""
        assert self._unaccepted.get(flight.key) is flight, flight
        assert flight.worker_id is None, flight
        del self._unaccepted[flight.key]
        flight.worker_id, flight.accepted_at = worker_id, now
        self._accepted.setdefault(subjects.WorkerAddress(flight.model, worker_id), {})[flight.key] = flight

    def take_back(self, flight: Flight) -> None:
        """Its worker seems to be lost: this router owns it again."""
        self._leave_worker(flight)
        flight.worker_id = None
        self._unaccepted[flight.key] = flight

    def remove(self, flight: Flight) -> None:
        del self._flights[flight.key]
        self._of_tenant[flight.tenant] -= 1
        if not self._of_tenant[flight.tenant]:
            del self._of_tenant[flight.tenant]
        self._hold(flight, 0)
        if flight.worker_id is None:
            del self._unaccepted[flight.key]
        else:
            self._leave_worker(flight)

    def at(self, address: subjects.WorkerAddress) -> list[Flight]:
        """The flights that a worker has accepted."""
        return list(self._accepted.get(address, {}).values())

    def unaccepted(self) -> list[Flight]:
        """The flights that this router owns."""
        return list(self._unaccepted.values())

    def everything(self) -> list[Flight]:
        return list(self._flights.values())

    def check_integrity(self) -> None:
        assert len(self._flights) <= self._capacity
        assert self._held_bytes == sum(flight.held_bytes for flight in self._flights.values())
        accepted = {key: flight for there in self._accepted.values() for key, flight in there.items()}
        assert accepted == {key: flight for key, flight in self._flights.items() if flight.worker_id is not None}
        assert accepted.keys() | self._unaccepted.keys() == self._flights.keys()
        assert not accepted.keys() & self._unaccepted.keys()
        assert all(self._accepted.values())
        assert self._of_tenant == Counter(flight.tenant for flight in self._flights.values())

    def _hold(self, flight: Flight, num_bytes: int) -> None:
        self._held_bytes += num_bytes - flight.held_bytes
        flight.held_bytes = num_bytes

    def _leave_worker(self, flight: Flight) -> None:
        assert flight.worker_id is not None, flight
        address = subjects.WorkerAddress(flight.model, flight.worker_id)
        there = self._accepted[address]
        del there[flight.key]
        if not there:
            del self._accepted[address]
