"""The end of a stream is told by the guardian that its worker names, once, however routers hear of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.builders import at, card, events, fleet_of, flight, known, part
from tokenbus.protocol.access.usage import Counts
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects
from tokenbus.router.requests.flights.ends import BY_WORKER, RequestEnd, RequestEnds
from tokenbus.router.requests.flights.flight import Flight, Flights
from tokenbus.router.requests.recovery import Recovery
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.usage.recorder import counts_of

KEY = "default:r1"
OURS = internal.StreamEnd(
    id=KEY,
    router_id="router-1",
    finish_reason=messages.FinishReason.STOP,
    prompt_tokens=100,
    cached_tokens=64,
    completion_tokens=7,
)


class Lifecycle:
    """Forgets requests as a router does."""

    def __init__(self, flights: Flights, ends: RequestEnds) -> None:
        self._flights = flights
        self._ends = ends

    def finish(self, flight: Flight) -> None:
        self._flights.remove(flight)
        self._ends.tell_ended_by_worker(flight)

    def forget(self, flight: Flight, reason: str) -> None:
        self._flights.remove(flight)


class Testbed:
    """A router that guards one request at worker w1."""

    __test__ = False

    def __init__(self) -> None:
        self.fleet = fleet_of(card("w1"))
        self.flights = Flights(8, 1_000)
        ends = RequestEnds("router-1")
        self.told: list[RequestEnd] = []
        ends.add(self.told.append)
        lifecycle = Lifecycle(self.flights, ends)
        attempts: Any = SimpleNamespace(repeat_end=lambda flight, address: None)
        self.recovery = Recovery(self.fleet, self.flights, attempts, lifecycle, RouterMetrics(), "router-1")  # type: ignore[arg-type]
        self.flight = flight("r1")
        self.flights.add(self.flight, 10)
        self.flights.set_prompt_ids(self.flight, bytes(12))
        self.flights.start_attempt(self.flight, "w1")
        self.flights.accept(self.flight, "w1", 0.0)

    def hear(self, *ends: internal.StreamEnd, seq: int = 0) -> None:
        entry = codec.replace(events("w1", seq, finished=(KEY,)), ends=list(ends))
        update = self.fleet.apply_events("demo", entry, 0.0)
        assert update is not None
        self.recovery.apply(update, at("w1"))

    def miss_events(self, *ends: internal.StreamEnd) -> None:
        """Closes a gap in the worker's log with a snapshot in which the request no longer runs."""
        self.fleet.mark_behind(known(self.fleet).card)
        assert known(self.fleet).log.request_snapshot(1.0, 1.0)
        update = self.fleet.apply_snapshot_part("demo", codec.replace(part("w1", 5), ends=list(ends)), 1.0)
        assert update.snapshot is not None
        self.recovery.apply(update, at("w1"))


def test_the_guardian_tells_what_the_terminal_says() -> None:
    testbed = Testbed()
    testbed.hear(OURS)
    assert testbed.told == [
        RequestEnd("generate", subjects.ModelAddress("demo", "default"), "r1", "stop", None, 100, 64, 7)
    ]
    testbed.hear(OURS, seq=1)
    assert len(testbed.told) == 1


@pytest.mark.parametrize("router_id", ["router-2", ""])
def test_a_router_that_is_not_or_no_longer_the_guardian_tells_nothing(router_id: str) -> None:
    for hear in (Testbed.hear, Testbed.miss_events):
        testbed = Testbed()
        hear(testbed, codec.replace(OURS, router_id=router_id))
        assert testbed.told == []
        assert not len(testbed.flights)


def test_an_end_that_was_missed_is_told_if_the_snapshot_has_it_and_by_nobody_if_not() -> None:
    testbed = Testbed()
    testbed.miss_events(OURS)
    assert [one.completion_tokens for one in testbed.told] == [7]
    testbed = Testbed()
    testbed.miss_events()
    assert testbed.told == []
    assert not len(testbed.flights)


def test_a_worker_of_an_earlier_version_is_believed_to_end_what_this_router_guards() -> None:
    testbed = Testbed()
    testbed.hear()
    assert [(one.reason, one.prompt_tokens) for one in testbed.told] == [(BY_WORKER, 3)]
    testbed = Testbed()
    testbed.flight.is_named = False
    testbed.hear()
    assert testbed.told == []


def test_the_code_of_a_later_version_counts_as_internal_and_a_cancel_has_its_code() -> None:
    reasons = messages.FinishReason
    for changes, code in (
        ({"finish_reason": reasons.ERROR, "code": "of_a_later_version"}, errors.Code.INTERNAL),
        ({"finish_reason": reasons.ERROR, "code": "deadline_exceeded"}, errors.Code.DEADLINE_EXCEEDED),
        ({"finish_reason": reasons.CANCELLED}, errors.Code.CANCELLED),
    ):
        testbed = Testbed()
        testbed.hear(codec.replace(OURS, **changes))
        assert [one.code for one in testbed.told] == [code]


@pytest.mark.parametrize(
    ("code", "has_tokens"),
    [
        (None, True),
        (errors.Code.CANCELLED, True),
        (errors.Code.DEADLINE_EXCEEDED, True),
        (errors.Code.WORKER_LOST, False),
        (errors.Code.INTERNAL, False),
        (errors.Code.OVERLOADED, False),
    ],
)
def test_tokens_count_unless_the_system_has_failed(code: errors.Code | None, has_tokens: bool) -> None:
    address = subjects.ModelAddress("demo", "default")
    counts = counts_of(RequestEnd("generate", address, "r1", "x", code, 100, 64, 7))
    tokens = {"prompt_tokens": 100, "cached_tokens": 64, "completion_tokens": 7} if has_tokens else {}
    assert counts == Counts(requests=1, errors={} if code is None else {str(code): 1}, **tokens)
