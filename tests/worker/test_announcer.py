"""The announcer tells routers which blocks came and went: each once, parents first, in events of a bounded size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.engines import thread_engine
from tokenbus.protocol.bus.bus import OutboundBufferLimitError
from tokenbus.protocol.wire import codec, internal, limits, messages, subjects
from tokenbus.worker.broker.announcer import Announcer

ROOT = 1
MOST = 4_096
"""Hashes of an event."""
_events = codec.Decoder(internal.Events)


class Wire:
    """Keeps the events that are published instead of sending them."""

    def __init__(self) -> None:
        self.is_busy = False
        self.payloads: list[bytes] = []

    def publish(self, subject: str, payload: bytes) -> None:
        if self.is_busy:
            raise OutboundBufferLimitError("too much is waiting")
        if ".events." in subject:
            self.payloads.append(payload)


class Voice:
    """An announcer whose engine serves, and what it says."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.announcer = Announcer(self.wire, subjects.Subjects(), "demo", "w1")  # type: ignore[arg-type]
        self.serve()
        self.said()

    def serve(self) -> None:
        engine = thread_engine(lambda _: ArithmeticRunner())
        self.announcer.engine_started(engine, make_config(), None)

    def said(self) -> list[internal.Events]:
        """The events since the last time."""
        said = [_events.decode(payload) for payload in self.wire.payloads]
        self.wire.payloads.clear()
        return said

    def publish(self) -> list[internal.Events]:
        self.announcer.publish_events()
        return self.said()


def chain(first: int, last: int) -> list[tuple[int, int]]:
    """Blocks behind one another, the first behind the root."""
    return [(number - 1 if number > first else ROOT, number) for number in range(first, last + 1)]


def stored_in(events: internal.Events) -> list[tuple[int, int]]:
    return [pair for one in events.stored for pair in zip([one.parent, *one.hashes], one.hashes, strict=False)]


def test_blocks_are_said_once_and_with_the_next_event() -> None:
    voice = Voice()
    voice.announcer.blocks_changed([], chain(10, 12))
    assert voice.announcer.has_events_before_chunks
    (events,) = voice.publish()
    assert (events.removed, events.stored) == ([], [internal.BlockRun(parent=ROOT, hashes=[10, 11, 12])])
    assert not voice.announcer.has_events_before_chunks
    (events,) = voice.publish()
    assert (events.removed, events.stored) == ([], [])


def test_a_block_that_came_and_went_before_an_event_is_in_none() -> None:
    voice = Voice()
    voice.announcer.blocks_changed([], chain(10, 12))
    voice.announcer.blocks_changed([12, 11], [])
    (events,) = voice.publish()
    assert (events.removed, stored_in(events)) == ([], [(ROOT, 10)])


def test_a_block_that_went_and_came_back_before_an_event_is_removed_and_stored_in_it() -> None:
    voice = Voice()
    voice.announcer.blocks_changed([], chain(10, 10))
    voice.publish()
    voice.announcer.blocks_changed([10], [])
    voice.announcer.blocks_changed([], chain(10, 10))
    (events,) = voice.publish()
    assert (events.removed, stored_in(events)) == ([10], [(ROOT, 10)])


def test_what_goes_comes_back_and_goes_again_before_an_event_is_only_removed() -> None:
    voice = Voice()
    voice.announcer.blocks_changed([], chain(10, 10))
    voice.publish()
    voice.announcer.blocks_changed([10], chain(10, 10))
    voice.announcer.blocks_changed([10], [])
    (events,) = voice.publish()
    assert (events.removed, events.stored) == ([10], [])


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(MOST, [MOST]), (MOST + 1, [MOST, 1]), (2 * MOST, [MOST, MOST]), (2 * MOST + 1, [MOST, MOST, 1])],
)
def test_blocks_are_split_over_events_at_the_limit_and_the_numbers_have_no_gaps(count: int, sizes: list[int]) -> None:
    voice = Voice()
    (before,) = voice.publish()
    new = chain(10, 9 + count)
    voice.announcer.blocks_changed([], new)
    said = voice.publish()
    assert [len(stored_in(events)) for events in said] == sizes
    assert [pair for events in said for pair in stored_in(events)] == new
    assert [events.seq for events in said] == list(range(before.seq + 1, before.seq + 1 + len(sizes)))
    voice.announcer.blocks_changed([number for _, number in reversed(new)], [])
    said = voice.publish()
    assert [len(events.removed) for events in said] == sizes


def test_what_is_removed_goes_first_and_shares_an_event_with_what_is_new() -> None:
    voice = Voice()
    voice.announcer.blocks_changed([], chain(10, 9 + MOST))
    voice.publish()
    gone = list(range(9 + MOST, 12, -1))
    voice.announcer.blocks_changed(gone, chain(20_000, 20_009))
    first, second = voice.publish()
    assert (first.removed, stored_in(first)) == (gone, chain(20_000, 20_002))
    assert (second.removed, [new for _, new in stored_in(second)]) == ([], list(range(20_003, 20_010)))


def test_what_happened_to_requests_is_in_the_first_of_several_events_and_only_there() -> None:
    voice = Voice()
    voice.announcer.blocks_changed([], chain(10, 10 + MOST))
    voice.announcer.request_started("acme:r", 5)
    voice.announcer.first_token_sent("acme:r")
    first, second = voice.publish()
    assert ([one.id for one in first.started], first.first_token_sent) == (["acme:r"], ["acme:r"])
    assert (second.started, second.first_token_sent) == ([], [])


def test_the_largest_event_stays_far_below_what_a_broker_takes() -> None:
    voice = Voice()
    top = 2**64 - 1
    voice.announcer.blocks_changed([], [(top - 2 * number, top - 2 * number - 1) for number in range(MOST)])
    voice.announcer.publish_events()
    (payload,) = voice.wire.payloads
    assert len(payload) <= limits.PART_BYTES


def test_while_the_broker_is_away_nothing_is_lost_and_no_number_is_used() -> None:
    voice = Voice()
    (before,) = voice.publish()
    voice.wire.is_busy = True
    voice.announcer.blocks_changed([], chain(10, 11))
    assert voice.publish() == []
    voice.announcer.blocks_changed([11], [])
    voice.wire.is_busy = False
    (events,) = voice.publish()
    assert (events.seq, events.removed, stored_in(events)) == (before.seq + 1, [], [(ROOT, 10)])


def test_a_new_life_says_all_that_is_held_from_number_zero_on() -> None:
    voice = Voice()
    voice.announcer.blocks_changed([], chain(10, 12))
    voice.publish()
    voice.announcer.start_epoch()
    voice.announcer.blocks_changed([12], chain(20, 20))
    assert voice.publish() == []
    voice.announcer.announce_epoch()
    (events,) = voice.said()
    assert (events.seq, events.removed, stored_in(events)) == (0, [], [(ROOT, 10), (10, 11), (ROOT, 20)])


def test_with_its_engine_everything_is_gone_and_a_new_one_begins_with_nothing() -> None:
    voice = Voice()
    voice.announcer.blocks_changed([], chain(10, 12))
    voice.publish()
    voice.announcer.blocks_changed([], [(12, 13)])
    voice.announcer.engine_died()
    (events,) = voice.said()
    assert (events.cleared, events.removed, events.stored) == (True, [], [])
    assert events.state is messages.WorkerState.RESTARTING
    voice.serve()
    voice.announcer.blocks_changed([], chain(10, 10))
    (started, events) = voice.said() + voice.publish()
    assert (started.cleared, events.cleared, stored_in(events)) == (False, False, [(ROOT, 10)])


def test_a_snapshot_says_all_blocks_after_the_event_that_told_the_last_of_them() -> None:
    voice = Voice()
    voice.announcer.blocks_changed([], chain(10, 12))
    (part,) = voice.announcer.snapshot([])
    (events,) = voice.said()
    assert (part.seq, part.runs) == (events.seq, [internal.BlockRun(parent=ROOT, hashes=[10, 11, 12])])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40))
@settings(max_examples=60)
def test_whoever_hears_all_events_holds_what_the_engine_holds(steps: list[tuple[bool, int]]) -> None:
    """Ten blocks that come and go, with an event now and then."""
    voice, heard, held = Voice(), dict[int, int](), dict[int, int]()
    for is_event, number in [*steps, (True, 0)]:
        if not is_event:
            gone, new = ([number], []) if number in held else ([], [(ROOT, number)])
            voice.announcer.blocks_changed(gone, new)
            held = {name: parent for name, parent in held.items() if name not in gone} | {n: p for p, n in new}
            continue
        for events in voice.publish():
            for name in events.removed:
                del heard[name]
            for parent, name in stored_in(events):
                assert name not in heard
                heard[name] = parent
        assert heard == held
