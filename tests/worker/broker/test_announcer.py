"""The announcer publishes stored and removed blocks: each once, parents first, in events of bounded size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.engines import thread_engine
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.bus.bus import Outgoing
from tokenbus.protocol.wire import codec, internal, limits, messages, subjects
from tokenbus.worker.broker.announcer import Announcer, new_epoch
from tokenbus.worker.broker.event_log import NO_ENDS
from tokenbus.worker.broker.replica_state import ReplicaEvent, Serving
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.chat_format import Calls, ChatFormat, Kind

ROOT = 1
MOST = 512
"""Hashes of an event."""
_events = codec.Decoder(internal.Events)
_cards = codec.Decoder(messages.Card)


class Harness:
    """An announcer whose engine serves, and what it says."""

    def __init__(self) -> None:
        self.bus = RecordingBus()
        self.announcer = Announcer(self.bus, subjects.Subjects(), "demo", "w1")  # type: ignore[arg-type]
        self.serve()
        self.published()

    def serve(self, **changes: object) -> None:
        engine = thread_engine(lambda _: ArithmeticRunner())
        self.announcer.engine_started(Serving(engine, make_config(**changes)))

    def published(self) -> list[internal.Events]:
        """The events since the last time."""
        return [_events.decode(one.payload) for one in self.bus.take() if ".events." in one.subject]

    def card(self) -> messages.Card:
        """The last card since the last time."""
        return [_cards.decode(one.payload) for one in self.bus.take() if ".card." in one.subject][-1]

    def fence(self) -> messages.PreviousEpoch:
        """Ends the epoch, and returns what the next one says of it."""
        self.announcer.start_epoch(new_epoch())
        self.announcer.announce_epoch()
        previous = self.card().previous
        assert previous is not None
        return previous

    def publish(self) -> list[internal.Events]:
        self.announcer.publish_events()
        return self.published()


def chain(first: int, last: int) -> list[tuple[int, int]]:
    """Blocks behind one another, the first behind the root."""
    return [(number - 1 if number > first else ROOT, number) for number in range(first, last + 1)]


def stored_in(events: internal.Events) -> list[tuple[int, int]]:
    return [pair for one in events.stored for pair in zip([one.parent, *one.hashes], one.hashes, strict=False)]


@pytest.mark.parametrize(("features", "resumes"), [(("generate", "seed"), True), (("embed",), False)])
def test_every_worker_that_generates_can_continue_a_stream(features: tuple[str, ...], resumes: bool) -> None:
    harness = Harness()
    harness.serve(features=features)
    card = harness.card()
    assert card.features == [*features, "explain", *["resume"] * resumes]
    assert card.hash_scheme == "xxh3-64:" + "0" * 16


def test_nothing_is_said_to_be_possible_with_a_model_that_was_never_loaded() -> None:
    harness = Harness()
    harness.serve(features=())
    assert harness.card().features == []


def test_blocks_are_published_once_with_the_next_event() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 12))
    (events,) = harness.publish()
    assert (events.removed, events.stored) == ([], [internal.BlockRun(parent=ROOT, hashes=[10, 11, 12])])
    (events,) = harness.publish()
    assert (events.removed, events.stored) == ([], [])


def test_a_block_that_was_stored_and_removed_before_an_event_is_in_none() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 12))
    harness.announcer.blocks_changed([12, 11], [])
    (events,) = harness.publish()
    assert (events.removed, stored_in(events)) == ([], [(ROOT, 10)])


def test_a_block_that_was_removed_and_stored_again_before_an_event_is_in_both_lists() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 10))
    harness.publish()
    harness.announcer.blocks_changed([10], [])
    harness.announcer.blocks_changed([], chain(10, 10))
    (events,) = harness.publish()
    assert (events.removed, stored_in(events)) == ([10], [(ROOT, 10)])


def test_a_block_that_was_removed_stored_and_removed_again_is_only_removed() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 10))
    harness.publish()
    harness.announcer.blocks_changed([10], chain(10, 10))
    harness.announcer.blocks_changed([10], [])
    (events,) = harness.publish()
    assert (events.removed, events.stored) == ([10], [])


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(MOST, [MOST]), (MOST + 1, [MOST, 1]), (2 * MOST, [MOST, MOST]), (2 * MOST + 1, [MOST, MOST, 1])],
)
def test_blocks_are_split_over_events_at_the_limit_and_the_numbers_have_no_gaps(count: int, sizes: list[int]) -> None:
    harness = Harness()
    (before,) = harness.publish()
    new = chain(10, 9 + count)
    harness.announcer.blocks_changed([], new)
    events = harness.publish()
    assert [len(stored_in(one)) for one in events] == sizes
    assert [pair for one in events for pair in stored_in(one)] == new
    assert [one.seq for one in events] == list(range(before.seq + 1, before.seq + 1 + len(sizes)))
    harness.announcer.blocks_changed([number for _, number in reversed(new)], [])
    events = harness.publish()
    assert [len(one.removed) for one in events] == sizes


def test_removed_blocks_go_first_and_share_an_event_with_stored_ones() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 9 + MOST))
    harness.publish()
    gone = list(range(9 + MOST, 12, -1))
    harness.announcer.blocks_changed(gone, chain(20_000, 20_009))
    first, second = harness.publish()
    assert (first.removed, stored_in(first)) == (gone, chain(20_000, 20_002))
    assert (second.removed, [new for _, new in stored_in(second)]) == ([], list(range(20_003, 20_010)))


def test_requests_are_in_the_first_of_several_events_only() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 10 + MOST))
    started = internal.Started(id="acme:r", stream_no=3, attempt=2, prompt_tokens=5)
    harness.announcer.log.started.append(started)
    harness.announcer.log.finished.append("acme:other")
    first, second = harness.publish()
    assert (first.started, first.finished) == ([started], ["acme:other"])
    assert (second.started, second.finished) == ([], [])


def test_what_happened_while_the_broker_was_away_is_split_over_events_that_fit_and_starts_come_first() -> None:
    harness = Harness()
    log, key = harness.announcer.log, "k" * (3 * limits.MAX_NAME_BYTES + limits.MAX_ID_BYTES)
    starts = [
        internal.Started(id=key, stream_no=number, attempt=2, prompt_tokens=5, router_id="r" * limits.MAX_NAME_BYTES)
        for number in range(300)
    ]
    keys = [f"{key}{number}" for number in range(300)]
    fetched = [internal.Fetched(stream_no=number, worker_id="a") for number in range(30)]
    log.started += starts
    log.finished += keys
    log.taken += keys
    log.stranded = list(keys)
    log.remote_prefills += keys
    log.fetches += fetched
    log.guardians |= dict.fromkeys(range(30), "r" * limits.MAX_NAME_BYTES)
    harness.announcer.blocks_changed([], [(ROOT, number) for number in range(10, 10 + 2 * MOST)])
    harness.announcer.publish_events()
    payloads = [one.payload for one in harness.bus.take()]
    assert max(map(len, payloads)) < limits.PART_BYTES // 2 + 4_096
    events = [_events.decode(one) for one in payloads]
    assert [one.seq for one in events] == list(range(events[0].seq, events[0].seq + len(events)))
    assert [started for one in events for started in one.started] == starts
    assert [end for one in events for end in one.finished] == keys
    assert [taken for one in events for taken in one.taken] == keys
    assert [stranded for one in events for stranded in one.stranded] == keys
    assert [leg for one in events for leg in one.legs] == keys
    assert [fetch for one in events for fetch in one.fetches] == fetched
    assert sorted(number for one in events for number in one.guardians) == list(range(30))
    assert sum(len(stored_in(one)) for one in events) == 2 * MOST
    assert not any(one.finished for one in events[: [bool(one.started) for one in events].index(False) - 1])
    assert harness.announcer.log.is_empty


def test_only_a_worker_that_exchanges_blocks_names_their_identity() -> None:
    harness = Harness()
    harness.serve()
    card = harness.card()
    assert (card.kv_identity, card.kv_token_bytes) == ("", 0)
    block_format = contract.KvBlockFormat(num_bytes=130)
    harness.serve(kv_identity="me", kv_format=block_format, kv_block_size=16)
    card = harness.card()
    assert (card.kv_identity, card.kv_token_bytes) == ("me", 9)


def test_the_end_of_a_fetch_is_in_the_next_event_and_in_no_other() -> None:
    harness = Harness()
    fetched = internal.Fetched(stream_no=3, worker_id="a", fetched_tokens=64, fetched_bytes=786_432, fetch_ms=2.5)
    harness.announcer.log.fetches.append(fetched)
    assert [one.fetches for one in harness.publish() + harness.publish()] == [[fetched], []]


def test_a_taken_request_and_a_new_guardian_are_in_the_next_event_and_in_no_other() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 10 + MOST))
    harness.announcer.log.taken.append("acme:r")
    harness.announcer.log.guardians[3] = "r1"
    harness.announcer.log.guardians[4] = "r1"
    harness.announcer.log.guardians[3] = "r2"
    said = [(one.taken, one.guardians) for one in harness.publish() + harness.publish()]
    assert said == [(["acme:r"], {3: "r2", 4: "r1"}), ([], {}), ([], {})]


def test_a_taken_request_and_a_new_guardian_wait_for_the_broker() -> None:
    harness = Harness()
    harness.bus.is_busy = True
    harness.announcer.log.taken.append("acme:r")
    harness.announcer.log.guardians[3] = "r1"
    assert harness.publish() == []
    harness.bus.is_busy = False
    assert [(one.taken, one.guardians) for one in harness.publish()] == [(["acme:r"], {3: "r1"})]


def test_a_new_epoch_knows_nothing_of_what_was_taken_before() -> None:
    harness = Harness()
    harness.bus.is_busy = True
    harness.announcer.log.taken.append("acme:r")
    harness.announcer.log.guardians[3] = "r1"
    harness.publish()
    harness.bus.is_busy = False
    harness.announcer.start_epoch(new_epoch())
    harness.announcer.announce_epoch()
    (events,) = harness.published()
    assert (events.taken, events.guardians) == ([], {})


def test_the_largest_event_leaves_half_a_part_for_a_step_of_tokens() -> None:
    harness = Harness()
    top = 2**64 - 1
    harness.announcer.blocks_changed([], [(top - 2 * number, top - 2 * number - 1) for number in range(MOST)])
    harness.announcer.publish_events()
    (event,) = harness.bus.take()
    assert len(event.payload) <= limits.PART_BYTES * 5 // 8


def test_while_the_broker_is_away_nothing_is_lost_and_no_number_is_used() -> None:
    harness = Harness()
    (before,) = harness.publish()
    harness.bus.is_busy = True
    harness.announcer.blocks_changed([], chain(10, 11))
    assert harness.publish() == []
    harness.announcer.blocks_changed([11], [])
    harness.bus.is_busy = False
    (events,) = harness.publish()
    assert (events.seq, events.removed, stored_in(events)) == (before.seq + 1, [], [(ROOT, 10)])


def test_a_new_epoch_starts_at_its_first_number_and_stores_every_cached_block() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 12))
    harness.publish()
    harness.announcer.start_epoch(new_epoch())
    harness.announcer.blocks_changed([12], chain(20, 20))
    assert harness.publish() == []
    harness.announcer.announce_epoch()
    (events,) = harness.published()
    assert (events.seq, events.removed, stored_in(events)) == (
        limits.FIRST_EVENT_SEQ,
        [],
        [(ROOT, 10), (10, 11), (ROOT, 20)],
    )


def test_between_two_epochs_no_step_is_published() -> None:
    harness = Harness()
    harness.announcer.start_epoch(new_epoch())
    assert not harness.announcer.publish_step([], [Outgoing("_INBOX.a", b"chunk")], NO_ENDS)
    assert harness.bus.take() == []


def test_a_step_waits_until_its_blocks_fit_one_entry() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 10 + MOST))
    harness.bus.is_busy = True
    assert not harness.announcer.publish_step([], [Outgoing("_INBOX.a", b"chunk")], NO_ENDS)
    harness.bus.is_busy = False
    assert harness.announcer.publish_step([], [Outgoing("_INBOX.a", b"chunk")], NO_ENDS)
    assert [one.subject for one in harness.bus.take()][-1] == "_INBOX.a"


def test_the_first_epoch_of_a_process_has_none_before_it() -> None:
    harness = Harness()
    harness.announcer.publish_card()
    assert harness.card().previous is None


def test_a_card_names_the_epoch_before_and_the_last_entry_of_it_that_was_written() -> None:
    harness = Harness()
    ended = harness.announcer.epoch
    harness.publish()
    harness.bus.num_writes += 1
    (last,) = harness.publish()
    harness.bus.num_writes += 1
    assert harness.fence() == messages.PreviousEpoch(epoch=ended, seq=last.seq)
    harness.bus.num_writes += 1
    ended = harness.announcer.epoch
    assert harness.fence() == messages.PreviousEpoch(epoch=ended, seq=limits.FIRST_EVENT_SEQ)


def test_a_card_names_the_last_sixteen_epochs_that_its_process_has_ended() -> None:
    harness = Harness()
    ended: list[str] = []
    for _ in range(18):
        ended.insert(0, harness.announcer.epoch)
        harness.announcer.start_epoch(new_epoch())
        harness.announcer.announce_epoch()
        card = harness.card()
        assert card.previous is not None
        assert [one.epoch for one in (card.previous, *card.earlier)] == ended[:16]


def test_entries_that_wait_when_an_epoch_ends_were_not_written() -> None:
    harness = Harness()
    (last,) = harness.publish()
    harness.bus.num_writes += 1
    harness.publish()
    harness.publish()
    assert harness.fence().seq == last.seq


def test_an_epoch_without_a_written_entry_ends_at_minus_one() -> None:
    harness = Harness()
    harness.publish()
    assert harness.fence().seq == -1
    assert harness.fence().seq == -1


@given(st.lists(st.booleans(), max_size=20))
def test_the_last_written_entry_is_the_newest_one_that_a_write_followed(steps: list[bool]) -> None:
    harness = Harness()
    newest = harness.publish()[0].seq
    written = -1
    for is_write in steps:
        if is_write:
            harness.bus.num_writes += 1
            written = newest
        else:
            newest = harness.publish()[0].seq
    assert harness.fence().seq == written


def test_an_engine_that_dies_clears_every_block_and_the_next_starts_with_none() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 12))
    harness.publish()
    harness.announcer.blocks_changed([], [(12, 13)])
    harness.announcer.engine_died()
    (events,) = harness.published()
    assert (events.cleared, events.removed, events.stored) == (True, [], [])
    assert events.state is messages.WorkerState.RESTARTING
    harness.serve()
    harness.announcer.blocks_changed([], chain(10, 10))
    (started, events) = harness.published() + harness.publish()
    assert (started.cleared, events.cleared, stored_in(events)) == (False, False, [(ROOT, 10)])


def test_an_engine_that_dies_while_its_worker_drains_is_replaced_and_the_worker_still_drains() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 12))
    harness.announcer.change(ReplicaEvent.DRAIN)
    harness.published()
    harness.announcer.engine_died()
    harness.serve()
    harness.announcer.blocks_changed([], chain(10, 12))
    events = harness.published() + harness.publish()
    assert [one.cleared for one in events] == [True, False, False]
    assert stored_in(events[-1]) == chain(10, 12), "the copies that the next engine has found"
    assert {one.state for one in events} == {messages.WorkerState.DRAINING}


def test_a_snapshot_follows_the_event_that_published_its_last_block() -> None:
    harness = Harness()
    harness.announcer.blocks_changed([], chain(10, 12))
    (part,) = harness.announcer.snapshot([])
    (events,) = harness.published()
    assert (part.seq, part.runs) == (events.seq, [internal.BlockRun(parent=ROOT, hashes=[10, 11, 12])])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40))
@settings(max_examples=60)
def test_whoever_reads_every_event_knows_every_block(steps: list[tuple[bool, int]]) -> None:
    """Ten blocks that come and go, with an event now and then."""
    harness, heard, held = Harness(), dict[int, int](), dict[int, int]()
    for is_event, number in [*steps, (True, 0)]:
        if not is_event:
            gone, new = ([number], []) if number in held else ([], [(ROOT, number)])
            harness.announcer.blocks_changed(gone, new)
            held = {name: parent for name, parent in held.items() if name not in gone} | {n: p for p, n in new}
            continue
        for events in harness.publish():
            for name in events.removed:
                del heard[name]
            for parent, name in stored_in(events):
                assert name not in heard
                heard[name] = parent
        assert heard == held


def test_the_card_has_the_digest_of_the_chat_format() -> None:
    def digest(chat_format: ChatFormat | None) -> str | None:
        harness = Harness()
        harness.serve(chat_format=chat_format)
        return harness.card().chat_format_digest

    calls = Calls(kind=Kind.JSON, call_open="<call>")
    assert digest(None) is None
    assert digest(ChatFormat(calls=calls)) == digest(ChatFormat(calls=calls))
    assert digest(ChatFormat(calls=calls)) != digest(ChatFormat(calls=calls, turn_open="x"))


def health(uptime_s: float) -> messages.WorkerHealth:
    return messages.WorkerHealth(devices=[], front_bytes=1, engine_bytes=2, uptime_s=uptime_s, engine_uptime_s=0.0)


def test_health_is_in_one_event_and_waits_for_one_that_leaves() -> None:
    harness = Harness()
    harness.announcer.log.health = health(1.0)
    assert [one.health for one in (*harness.publish(), *harness.publish())] == [health(1.0), None]
    harness.bus.is_busy = True
    harness.announcer.log.health = health(2.0)
    assert harness.publish() == []
    harness.announcer.log.health = health(3.0)
    harness.bus.is_busy = False
    assert [one.health for one in (*harness.publish(), *harness.publish())] == [health(3.0), None]
