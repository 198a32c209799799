"""Events are applied in order and without gaps. A snapshot and the events after it close a gap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.builders import events, part
from tokenbus.protocol.wire import codec, internal, messages
from tokenbus.router.workers.event_log import (
    MAX_BUFFERED,
    MAX_BUFFERED_BYTES,
    MAX_PARTS,
    MAX_SNAPSHOT_BYTES,
    WorkerEventLog,
)


def seqs(ready: tuple[internal.Events, ...]) -> list[int]:
    return [one.seq for one in ready]


def live_at(seq: int) -> WorkerEventLog:
    log = WorkerEventLog()
    for number in range(seq + 1):
        log.receive(events(seq=number))
    return log


def test_a_log_that_is_followed_from_its_first_event_needs_no_snapshot() -> None:
    log = WorkerEventLog()
    assert log.is_behind
    assert [seqs(log.receive(events(seq=number))) for number in range(3)] == [[0], [1], [2]]
    assert not log.is_behind
    assert not log.request_snapshot(0.0, 1.0)


def test_an_entry_is_sealed_by_its_seal_or_by_the_next_entry_and_never_unsealed() -> None:
    log = live_at(2)
    assert log.sealed_seq == 1
    log.seal(2)
    assert log.sealed_seq == 2
    log.seal(1)
    assert log.sealed_seq == 2
    log.seal(9)  # nothing is known of that entry
    assert log.sealed_seq == 2
    log.receive(events(seq=3))
    assert log.sealed_seq == 2


def test_an_entry_with_tokens_seals_no_other() -> None:
    """The tokens of one step may take two entries, and the chunks of both follow the second."""
    log = live_at(2)
    log.receive(events(seq=3, tokens=[(1, 5)]))
    log.receive(events(seq=4, tokens=[(2, 5)]))
    assert log.sealed_seq == 1
    log.receive(events(seq=5))
    assert log.sealed_seq == 4


def test_an_entry_with_tokens_behind_a_snapshot_seals_no_other() -> None:
    log = WorkerEventLog()
    log.request_snapshot(0.0, 1.0)
    for seq in (6, 7):
        log.receive(events(seq=seq, tokens=[(1, 5)]))
    log.seal(6)
    assert log.receive_part(part(seq=5)) is not None
    assert log.sealed_seq == 6
    log.mark_behind()
    log.request_snapshot(0.0, 1.0)
    for seq in (8, 9):
        log.receive(events(seq=seq, tokens=[(1, 5)]))
    assert log.receive_part(part(seq=7)) is not None
    assert log.sealed_seq == 7


@pytest.mark.parametrize(("later", "sealed_seq"), [((), 5), ((6,), 5), ((6, 7), 6)])
def test_a_snapshot_seals_the_entry_before_it(later: tuple[int, ...], sealed_seq: int) -> None:
    log = WorkerEventLog()
    log.request_snapshot(0.0, 1.0)
    for seq in later:
        log.receive(events(seq=seq))
    assert log.receive_part(part(seq=5)) is not None
    assert log.sealed_seq == sealed_seq


def test_the_tokens_of_a_request_may_come_in_several_parts() -> None:
    log = WorkerEventLog()
    log.request_snapshot(0.0, 1.0)
    pieces = [
        internal.RunningRequest(id="a", attempt=1, stream_no=7, num_tokens=4, token_ids=data, logprobs=data[:1])
        for data in (b"aaaabbbb", b"ccccdddd")
    ]
    parts = [codec.replace(part(seq=5, number=at, parts=2), running=[piece]) for at, piece in enumerate(pieces)]
    assert log.receive_part(parts[1]) is None
    whole = log.receive_part(parts[0])
    assert whole is not None
    assert (whole.running["a"].token_ids, whole.running["a"].logprobs) == (b"aaaabbbbccccdddd", b"ac")
    assert whole.seq == 5


def test_a_router_that_joins_late_waits_for_a_snapshot() -> None:
    log = WorkerEventLog()
    assert seqs(log.receive(events(seq=5))) == []
    assert log.request_snapshot(0.0, 1.0)
    assert seqs(log.receive(events(seq=6))) == []
    caught = log.receive_part(part(seq=5, running=("a",)))
    assert caught is not None
    assert (set(caught.running), seqs(caught.events)) == ({"a"}, [6])
    assert seqs(log.receive(events(seq=7))) == [7]


@pytest.mark.parametrize("missing", [1, 5])
def test_after_a_gap_no_event_is_applied_until_a_snapshot_closes_it(missing: int) -> None:
    log = live_at(2)
    assert seqs(log.receive(events(seq=3 + missing))) == []
    assert (log.is_behind, log.num_lost) == (True, missing)
    assert seqs(log.receive(events(seq=4 + missing))) == []
    assert log.request_snapshot(0.0, 1.0)
    caught = log.receive_part(part(seq=3 + missing))
    assert caught is not None
    assert seqs(caught.events) == [4 + missing]


def test_the_count_of_lost_events_can_be_sent_however_often_a_worker_jumps() -> None:
    log = live_at(0)
    for at in (0.0, 5.0):
        log.receive(events(seq=2**64 - 1))
        for more in (0.0, 2.0):  # the first is refused, because an event that was kept does not follow it
            log.request_snapshot(at + more, 1.0)
            log.receive_part(part(seq=-1))
        assert not log.is_behind
    codec.encode(messages.WorkerTracking(events="live", indexed_blocks=0, lost_events=log.num_lost, booked=0))


def test_repeated_events_and_events_out_of_order_are_not_applied() -> None:
    log = live_at(3)
    assert [seqs(log.receive(events(seq=number))) for number in (3, 0, 1)] == [[], [], []]
    assert not log.is_behind


def test_a_snapshot_is_requested_again_only_after_a_while_and_counts_from_the_first_request() -> None:
    log = WorkerEventLog()
    log.receive(events(seq=5))
    assert [log.request_snapshot(at, 1.0) for at in (10.0, 10.9, 11.0, 11.5)] == [True, False, True, False]
    caught = log.receive_part(part(seq=5))
    assert caught is not None
    assert caught.requested_at == 10.0


def test_parts_may_arrive_in_any_order_and_count_only_when_complete() -> None:
    log = WorkerEventLog()
    log.request_snapshot(0.0, 1.0)
    assert log.receive_part(part(seq=4, number=2, parts=3, running=("c",))) is None
    assert log.receive_part(part(seq=4, number=0, parts=3, running=("a",))) is None
    assert log.receive_part(part(seq=4, number=0, parts=3, running=("a",))) is None
    caught = log.receive_part(part(seq=4, number=1, parts=3, running=("b",)))
    assert caught is not None
    assert set(caught.running) == {"a", "b", "c"}


def test_parts_of_two_snapshots_are_never_mixed() -> None:
    log = WorkerEventLog()
    log.request_snapshot(0.0, 1.0)
    assert log.receive_part(part(seq=4, number=0, parts=2, running=("old",))) is None
    assert log.receive_part(part(seq=6, number=1, parts=2, running=("new",))) is None
    caught = log.receive_part(part(seq=6, number=0, parts=2))
    assert caught is not None
    assert set(caught.running) == {"new"}


@pytest.mark.parametrize(("number", "parts"), [(1, 1), (-1, 1), (0, 0), (5, 3), (0, MAX_PARTS + 1)])
def test_an_impossible_part_is_ignored(number: int, parts: int) -> None:
    log = WorkerEventLog()
    log.request_snapshot(0.0, 1.0)
    assert log.receive_part(part(seq=4, number=number, parts=parts)) is None
    assert log.is_behind


def test_a_snapshot_that_was_not_requested_is_ignored() -> None:
    assert WorkerEventLog().receive_part(part(seq=4)) is None
    assert live_at(3).receive_part(part(seq=4)) is None


def test_a_snapshot_followed_by_a_gap_is_requested_again_at_once() -> None:
    log = WorkerEventLog()
    log.receive(events(seq=5))
    log.request_snapshot(0.0, 1.0)
    log.receive(events(seq=7))
    assert log.receive_part(part(seq=5)) is None
    assert log.request_snapshot(0.1, 1.0)
    caught = log.receive_part(part(seq=7))
    assert caught is not None
    assert seqs(log.receive(events(seq=8))) == [8]


def test_when_the_buffer_overflows_a_new_snapshot_is_requested() -> None:
    log = WorkerEventLog()
    log.receive(events(seq=1))
    log.request_snapshot(0.0, 1.0)
    for seq in range(2, MAX_BUFFERED + 1):
        log.receive(events(seq=seq))
    assert not log.request_snapshot(0.1, 1.0)
    log.receive(events(seq=MAX_BUFFERED + 1))
    assert log.request_snapshot(0.1, 1.0)
    caught = log.receive_part(part(seq=MAX_BUFFERED))
    assert caught is not None
    assert seqs(caught.events) == [MAX_BUFFERED + 1]


def sized_events(seq: int, size: int) -> internal.Events:
    """Returns an event of that many bytes."""
    largest = codec.replace(events(seq=seq), logprobs={1: bytes(size)})
    return codec.replace(largest, logprobs={1: bytes(2 * size - len(codec.encode(largest)))})


def sized_part(number: int, size: int) -> internal.SnapshotPart:
    """Returns one of three parts, which has that many bytes."""
    largest = _part_with(number, bytes(size))
    return _part_with(number, bytes(2 * size - len(codec.encode(largest))))


def _part_with(number: int, token_ids: bytes) -> internal.SnapshotPart:
    running = internal.RunningRequest(id="a", attempt=1, stream_no=1, token_ids=token_ids)
    return codec.replace(part(seq=4, number=number, parts=3), running=[running])


@pytest.mark.parametrize("excess", [0, 1])
def test_events_that_take_too_much_memory_are_not_kept_until_a_snapshot_comes(excess: int) -> None:
    log = WorkerEventLog()
    for first in (1, 5):
        log.mark_behind()
        log.request_snapshot(0.0, 1.0)
        for seq in range(first, first + 3):
            log.receive(sized_events(seq, MAX_BUFFERED_BYTES // 4))
        assert log.receive(sized_events(first + 3, MAX_BUFFERED_BYTES // 4 + excess)) == ()
        assert log.request_snapshot(0.1, 1.0) is bool(excess)
        caught = log.receive_part(part(seq=first + 2))
        assert caught is not None
        assert seqs(caught.events) == [first + 3]


@pytest.mark.parametrize("excess", [0, 1])
def test_a_snapshot_that_takes_too_much_memory_closes_no_gap(excess: int) -> None:
    log = WorkerEventLog()
    log.request_snapshot(0.0, 1.0)
    quarter = MAX_SNAPSHOT_BYTES // 4
    assert log.receive_part(codec.replace(sized_part(0, quarter), seq=3)) is None  # of an older snapshot
    for number, size in [(0, quarter), (0, quarter), (1, quarter)]:
        assert log.receive_part(sized_part(number, size)) is None
    caught = log.receive_part(sized_part(2, 2 * quarter + excess))
    assert (caught is None) is log.is_behind is bool(excess)
    assert not log.request_snapshot(0.9, 1.0)
    assert log.request_snapshot(1.0, 1.0) is bool(excess)


@given(data=st.data())
def test_whatever_is_lost_a_log_that_is_not_behind_knows_the_true_state(data: st.DataObject) -> None:
    """The state is a worker's set of running requests, seen through a network that loses events and parts."""
    log, truth, belief = WorkerEventLog(), set[str](), set[str]()
    for seq in range(data.draw(st.integers(1, 30))):
        started = data.draw(st.sets(st.sampled_from("abcdef"), max_size=2)) - truth
        finished = data.draw(st.sets(st.sampled_from(sorted(truth)), max_size=2)) if truth else set()
        truth = (truth | started) - finished
        if data.draw(st.integers(0, 4)):
            for one in log.receive(events(seq=seq, started=tuple(started), finished=tuple(finished))):
                belief = (belief | {begun.id for begun in one.started}) - set(one.finished)
        if data.draw(st.booleans()) and log.request_snapshot(float(seq), 1.0):
            halves = sorted(truth)[::2], sorted(truth)[1::2]
            for number, half in enumerate(halves):
                if data.draw(st.integers(0, 3)):
                    caught = log.receive_part(part(seq=seq, number=number, parts=2, running=tuple(half)))
                    if caught is not None:
                        belief = set(caught.running)
                        assert caught.events == ()
        if not log.is_behind and log.seq == seq:
            assert belief == truth
