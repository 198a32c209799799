"""One request on its way through a router, from its receipt to its end at a worker."""

from protocol import codec, messages, subjects


class Flight:
    """What a router knows of a request it has taken. Only its fields change; `dispatch` and `flights` change them."""

    __slots__ = (
        "attempt",
        "cancelled",
        "encoding",
        "ended_at",
        "key",
        "model",
        "received_at",
        "reply",
        "request",
        "spoken",
        "tenant",
        "traceparent",
        "worker_id",
    )

    def __init__(
        self,
        request: messages.GenerateRequest,
        address: subjects.ModelAddress,
        reply: str,
        encoding: codec.Encoding,
        received_at: float,
        traceparent: str | None = None,
    ) -> None:
        assert request.id is not None
        self.request = request
        self.model = address.model
        self.tenant = address.tenant
        self.key = subjects.request_key(address.tenant, request.id)
        self.reply = reply
        self.encoding = encoding
        self.received_at = received_at
        self.traceparent = traceparent
        self.attempt = 0
        """The highest attempt that was dispatched."""
        self.worker_id: str | None = None
        """Who has accepted it; until then this router owns its terminal."""
        self.ended_at: str | None = None
        """The last worker that said this request has ended there, which it may before its accept has been read."""
        self.cancelled = False
        self.spoken = False

    def __repr__(self) -> str:
        return f"<Flight {self.key} of {self.model}: attempt {self.attempt} at {self.worker_id}>"

    @property
    def request_id(self) -> str:
        assert self.request.id is not None
        return self.request.id

    def remaining_ms(self, now: float) -> float | None:
        """What is left of the request's time; at most 0 when it has passed."""
        if self.request.timeout_ms is None:
            return None
        return self.request.timeout_ms - (now - self.received_at) * 1e3


class Flights:
    """All flights of one router, by key, and by the worker that has accepted them. `capacity` bounds them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._flights: dict[str, Flight] = {}
        self._accepted: dict[str, dict[str, Flight]] = {}

    def __repr__(self) -> str:
        return f"<Flights {len(self._flights)} of {self._capacity}>"

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        return len(self._flights) >= self._capacity

    def add(self, flight: Flight) -> None:
        assert flight.key not in self._flights, flight
        self._flights[flight.key] = flight

    def find(self, key: str) -> Flight | None:
        return self._flights.get(key)

    def accept(self, flight: Flight, worker_id: str) -> None:
        """Notes who has taken a flight over."""
        assert self._flights.get(flight.key) is flight, flight
        assert flight.worker_id is None, flight
        flight.worker_id = worker_id
        self._accepted.setdefault(worker_id, {})[flight.key] = flight

    def remove(self, flight: Flight) -> None:
        del self._flights[flight.key]
        if flight.worker_id is not None:
            there = self._accepted[flight.worker_id]
            del there[flight.key]
            if not there:
                del self._accepted[flight.worker_id]

    def at(self, worker_id: str) -> list[Flight]:
        """The flights that a worker has accepted."""
        return list(self._accepted.get(worker_id, {}).values())

    def check_integrity(self) -> None:
        assert len(self._flights) <= self._capacity
        accepted = {key: flight for there in self._accepted.values() for key, flight in there.items()}
        assert accepted == {key: flight for key, flight in self._flights.items() if flight.worker_id is not None}
        assert all(self._accepted.values())
