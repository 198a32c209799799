"""Cancels and resyncs reach the workers that have, or may have, their streams, once and in bounded size."""

import time
from collections.abc import Callable

import pytest
from nats.aio.msg import Msg

from tests.router.builders import card, events, fleet_of, flight, part
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.bus.bus import Outgoing
from tokenbus.protocol.wire import codec, internal, subjects
from tokenbus.router.requests.flights.flight import Flights
from tokenbus.router.requests.passing_on import VIA, PassingOn, is_passed_on
from tokenbus.router.telemetry.metrics import RouterMetrics

NAMES = subjects.Subjects()


class Passed:
    """Records what a router passes on whose fleet serves two models."""

    def __init__(self) -> None:
        self.bus = RecordingBus()
        self.flights = Flights(10, 1_000)
        fleet = fleet_of(card("w1"), card("w2"), card("w3", model="o.ther"))
        self._passing_on = PassingOn(self.bus, NAMES, fleet, self.flights, RouterMetrics(), "a")  # type: ignore[arg-type]

    def on(self, subject: str, data: bytes = b"", headers: dict[str, str] | None = None) -> list[Outgoing]:
        self._passing_on.to_workers(Msg(None, subject, "_INBOX.a", data, headers))  # type: ignore[arg-type]
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


class ToHolder:
    """Records what a router passes on to the holders of streams: two workers, each of its model."""

    def __init__(self) -> None:
        self.bus = RecordingBus()
        self.flights = Flights(10, 1_000)
        cards = (card("w1"), card("w3", model="o.ther"))
        self.fleet = fleet_of(*cards, now=time.monotonic())
        self.passing_on = PassingOn(self.bus, NAMES, self.fleet, self.flights, RouterMetrics(), "a")  # type: ignore[arg-type]

    def hear(self, message: internal.Events, model: str = "demo") -> None:
        self.fleet.apply_events(model, message, time.monotonic())

    def on(self, subject: str, data: bytes = b"", headers: dict[str, str] | None = None) -> list[Outgoing]:
        message = Msg(None, subject, "_INBOX.a", data, headers)  # type: ignore[arg-type]
        self.passing_on.to_holder("resync", message, NAMES.parse_request(subject))
        return self.bus.take()


def control_of(sent: list[Outgoing]) -> tuple[str, str, internal.Control]:
    (one,) = sent
    return one.subject, one.reply, codec.Decoder(internal.Control).decode(one.payload)


@pytest.mark.parametrize("model", [None, "demo"])
def test_the_worker_that_reports_a_stream_is_told_whoever_placed_it(model: str | None) -> None:
    to_holder = ToHolder()
    to_holder.hear(events("w1", started=("acme:r1",)))
    msgpack = {"Content-Type": "application/msgpack"}
    told = internal.Control(op="resync", request_id="acme:r1", body=b"{}", content_type="application/msgpack")
    assert control_of(to_holder.on(NAMES.resync("r1", "acme", model), b"{}", msgpack)) == (
        NAMES.worker("demo", "w1", "control"),
        "_INBOX.a",
        told,
    )


def test_a_stream_that_has_ended_is_known_for_a_minute() -> None:
    to_holder = ToHolder()
    to_holder.hear(events("w1", started=("default:r1",)))
    to_holder.hear(events("w1", 1, finished=("default:r1",)))
    assert control_of(to_holder.on(NAMES.resync("r1")))[0] == NAMES.worker("demo", "w1", "control")
    to_holder.fleet.sweep(time.monotonic() + 60.0)
    assert to_holder.on(NAMES.resync("r1")) == []
    assert to_holder.fleet.stats.passed_on == 1


def test_a_stream_that_ended_while_events_were_missed_is_known_too() -> None:
    to_holder = ToHolder()
    to_holder.hear(events("w1", started=("default:r1",)))
    to_holder.fleet.mark_all_behind()
    to_holder.fleet.snapshots_due(1e9, 0.0)
    to_holder.fleet.apply_snapshot_part("demo", part("w1", seq=7), time.monotonic())
    assert control_of(to_holder.on(NAMES.resync("r1")))[0] == NAMES.worker("demo", "w1", "control")


def test_what_nobody_has_goes_nowhere() -> None:
    to_holder = ToHolder()
    to_holder.hear(events("w1", started=("default:r1",)))
    for subject in (NAMES.cancel("r2"), NAMES.cancel("r1", "acme"), NAMES.cancel("r1", model="o.ther")):
        assert to_holder.on(subject) == []


def test_a_message_without_a_model_is_not_passed_on_twice() -> None:
    to_holder = ToHolder()
    to_holder.hear(events("w1", started=("default:r1",)))
    to_holder.passing_on.to_workers(Msg(None, NAMES.cancel("r1"), "", b"", None))  # type: ignore[arg-type]
    assert to_holder.bus.take() == []


def test_a_worker_that_has_fallen_silent_is_not_told() -> None:
    to_holder = ToHolder()
    to_holder.hear(events("w1", started=("default:r1",)))
    to_holder.fleet.workers_of("demo")[0].last_seen_at -= 2.0
    assert to_holder.on(NAMES.cancel("r1")) == []
