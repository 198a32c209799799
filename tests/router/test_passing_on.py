"""Cancels and resyncs that name no model reach the workers that may hold their requests, once and in bounded size."""

from collections.abc import Callable

import pytest
from nats.aio.msg import Msg

from tests.router.builders import card, fleet_of, flight
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.bus.bus import Outgoing
from tokenbus.protocol.wire import subjects
from tokenbus.router.requests.flights.flight import Flights
from tokenbus.router.requests.intake import VIA, PassingOn, is_passed_on

NAMES = subjects.Subjects()


class Passed:
    """What a router passes on whose fleet serves two models."""

    def __init__(self) -> None:
        self.bus = RecordingBus()
        self.flights = Flights(10, 1_000)
        fleet = fleet_of(card("w1"), card("w2"), card("w3", model="o.ther"))
        self._passing_on = PassingOn(self.bus, NAMES, fleet, self.flights, "a")  # type: ignore[arg-type]

    def on(self, subject: str, data: bytes = b"", headers: dict[str, str] | None = None) -> list[Outgoing]:
        self._passing_on.take(Msg(None, subject, "_INBOX.a", data, headers))  # type: ignore[arg-type]
        return self.bus.take()


@pytest.mark.parametrize("subject_of", [NAMES.cancel, NAMES.resync])
@pytest.mark.parametrize("tenant", ["default", "acme inc"])
def test_what_it_does_not_know_goes_to_each_model(subject_of: Callable[..., str], tenant: str) -> None:
    sent = Passed().on(subject_of("r1", tenant), b"{}")
    assert sent == [
        Outgoing(subject_of("r1", tenant, model), b"{}", "_INBOX.a", {VIA: "a"}) for model in ("demo", "o.ther")
    ]


def test_what_it_guards_goes_to_its_model_alone() -> None:
    passed = Passed()
    passed.flights.add(flight("r1"), 10)
    assert [message.subject for message in passed.on(NAMES.cancel("r1"))] == [NAMES.cancel("r1", model="demo")]


def test_the_encoding_follows_and_nothing_else_of_the_headers() -> None:
    told = {"Content-Type": "application/msgpack", "X": "y", VIA: "forged"}
    assert Passed().on(NAMES.cancel("r1"), headers=told)[0].headers == {VIA: "a", "Content-Type": "application/msgpack"}


def test_a_large_one_is_cut() -> None:
    (size,) = {len(message.payload) for message in Passed().on(NAMES.resync("r1"), b" " * 1_000_000)}
    assert size == 1_024


@pytest.mark.parametrize("tail", ["cancel.=2e.r1", "resync.r 1", "cancel.acme.r.1.x", "cancel." + "r" * 129])
def test_what_is_malformed_ends_there(tail: str) -> None:
    assert Passed().on(f"{NAMES.prefix}.{tail}") == []


def test_a_full_buffer_or_a_closed_connection_ends_it_in_silence() -> None:
    passed = Passed()
    passed.bus.is_busy = True
    assert passed.on(NAMES.cancel("r1")) == []
    passed.bus.is_closed = True
    assert passed.on(NAMES.cancel("r1")) == []


@pytest.mark.parametrize(("headers", "expected"), [(None, False), ({}, False), ({"X": "y"}, False), ({VIA: "b"}, True)])
def test_others_know_it_by_its_header(headers: dict[str, str] | None, expected: bool) -> None:
    assert is_passed_on(Msg(None, "s", "", b"", headers)) == expected  # type: ignore[arg-type]
