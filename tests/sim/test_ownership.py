"""Tests who ends a stream: how a frontend answers routers, and a router answers clients, message by message."""

from collections.abc import Iterator

import pytest

from tests.sim.clients import SimpleClient
from tests.sim.network import Broker
from tests.sim.stage import KEY, NAMES, Stage
from tests.sim.system import MODEL, FrontendProcess, RouterProcess, kill
from tests.sim.world import world
from tokenbus.protocol.wire import block_hash, errors, internal, limits, messages


@pytest.fixture
def stage() -> Iterator[Stage]:
    with world(seed=5) as made:
        yield Stage(made)


def test_a_run_for_another_incarnation_is_refused(stage: Stage) -> None:
    reply = stage.run(epoch="1-gone")
    assert not reply.accepted
    assert reply.error
    assert reply.error.retryable
    assert stage.peer.chunks == []


def test_an_attempt_without_tokens_is_dropped_silently(stage: Stage) -> None:
    assert stage.run().accepted
    assert stage.drop()
    stage.world.run(3.0)
    assert [chunk.finish_reason for chunk in stage.peer.chunks] == [None]
    assert stage.run(attempt=2).accepted


def test_an_attempt_that_gave_way_to_a_later_one_that_the_engine_refused_is_gone_for_routers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise errors.request_error(errors.Code.OVERLOADED)

    assert stage.run().accepted
    events = stage.overhear(NAMES.events(MODEL, "w0"), internal.Events)
    monkeypatch.setattr(stage.frontend.engine, "generate", refuse)
    assert not stage.run(attempt=2).accepted
    assert stage.snapshot().running == []
    assert [key for one in events for key in one.taken] == [KEY]


def test_an_attempt_that_has_sent_tokens_is_not_dropped(stage: Stage) -> None:
    stage.run()
    stage.world.run(0.5)
    assert not stage.drop()
    stage.world.run(3.0)
    assert stage.peer.chunks[-1].finish_reason == "length"


def test_an_ended_attempt_is_not_dropped_since_its_client_has_a_terminal(stage: Stage) -> None:
    stage.run()
    stage.world.run(3.0)
    assert not stage.drop()
    assert stage.drop(attempt=2)


def test_a_moved_attempt_ends_silently_even_if_it_has_sent_tokens(stage: Stage) -> None:
    stage.run()
    stage.world.run(0.5)
    events = stage.overhear(NAMES.events(MODEL, "w0"), internal.Events)
    assert stage.drop(moved=True)
    said = len(stage.peer.chunks)
    stage.world.run(3.0)
    assert len(stage.peer.chunks) == said
    assert [key for one in events for key in one.taken] == [KEY]
    assert not [key for one in events for key in one.finished], "it has not ended"
    assert stage.resync(0) is None
    assert stage.run(attempt=2).accepted


def test_a_drop_of_a_later_attempt_that_never_came_ends_an_earlier_one_whatever_that_has_sent(stage: Stage) -> None:
    """The router has placed the request here again, without knowing that it was here still."""
    stage.run()
    stage.world.run(0.5)
    assert stage.drop(attempt=2)
    said = len(stage.peer.chunks)
    stage.world.run(3.0)
    assert len(stage.peer.chunks) == said
    assert not stage.run(attempt=2).accepted
    assert stage.run(attempt=3).accepted


def test_a_moved_attempt_that_has_ended_is_not_replayed_any_more(stage: Stage) -> None:
    stage.run()
    stage.world.run(3.0)
    assert stage.resync(0)
    assert stage.drop(moved=True)
    assert stage.resync(0) is None


class Notices:
    """The broker's notices about a stream's chunks, which a test brings when it wants: resyncs come over another
    connection, and may be faster."""

    def __init__(self, stage: Stage) -> None:
        self.marks: list[str] = []
        """The reply subjects of all chunks."""
        self.held = stage.frontend.frontend.streams.held
        self._stage = stage
        note = stage.peer.bus.subscribe(stage.peer.inbox, lambda message: self.marks.append(message.reply))
        stage.peer.process.do(note)

    def bring(self, *marks: str) -> list[str]:
        """Brings notices; returns the keys of the streams that are held after them."""
        for mark in marks:
            self._stage.frontend.process.call(self.held.no_responders, *NAMES.parse_gone(mark))
        self._stage.world.run(0.01)
        return [stream.key for stream in self.held]


@pytest.mark.parametrize("later_s", [0.0, 0.55])
def test_a_notice_holds_nothing_if_the_chunk_was_published_again_meanwhile(stage: Stage, later_s: float) -> None:
    notices = Notices(stage)
    stage.run()
    stage.world.run(1.2)
    before = len(notices.marks)
    assert stage.resync(0)
    stage.world.run(later_s)
    assert notices.bring(*notices.marks[before - 8 : before]) == []
    assert notices.bring(notices.marks[before]) == [KEY], "the replay has found no subscriber"


def test_a_notice_about_a_chunk_that_is_not_published_again_holds_the_stream(stage: Stage) -> None:
    notices = Notices(stage)
    stage.run()
    stage.world.run(1.2)
    lost, begin = notices.marks[-3], stage.peer.chunks[-3].offset
    assert stage.resync(begin + 1)
    said = len(stage.peer.chunks)
    assert notices.bring(lost) == [KEY]
    stage.world.run(1.0)
    assert begin in [chunk.offset for chunk in stage.peer.chunks[said:] if chunk.tokens]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_guardian_that_asks_for_an_end_makes_no_chunk_forgotten(
    stage: Stage, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices = Notices(stage)
    monkeypatch.setattr(stage.frontend.frontend.streams.held._reach, "is_distant", lambda router: True)
    stage.run(max_tokens=6)
    stage.world.run(1.5)
    lost, begin, said = notices.marks[-3], stage.peer.chunks[-3].offset, len(stage.peer.chunks)
    if is_held:
        notices.bring(lost)
    stage.frontend.process.call(notices.held.repeat_end, KEY, limits.MAX_TOKENS)
    stage.world.run(0.01)
    if not is_held:
        notices.bring(lost)
    stage.world.run(3.0)
    assert begin in [chunk.offset for chunk in stage.peer.chunks[said:] if chunk.tokens]


def test_that_an_earlier_attempt_has_moved_does_not_end_a_later_one(stage: Stage) -> None:
    stage.run(attempt=2)
    stage.world.run(0.5)
    assert stage.drop(attempt=1, moved=True)
    stage.world.run(3.0)
    assert stage.peer.chunks[-1].finish_reason == "length"
    assert stage.drop(attempt=1, moved=True)
    assert stage.resync(0)


@pytest.mark.parametrize(("later_s", "attempt", "accepted"), [(0.1, 2, False), (0.1, 1, False), (0.1, 3, True)])
def test_a_drop_that_arrives_first_refuses_its_attempt_and_lower_ones(
    stage: Stage, later_s: float, attempt: int, accepted: bool
) -> None:
    assert stage.drop(attempt=2)
    stage.world.run(later_s)
    assert stage.run(attempt=attempt).accepted is accepted


def test_a_drop_is_forgotten_after_ten_seconds(stage: Stage) -> None:
    stage.drop(attempt=2)
    stage.world.run(9.5)
    assert not stage.run(attempt=2).accepted
    stage.world.run(0.6)
    assert stage.run(attempt=2).accepted


@pytest.mark.parametrize(("age_ms", "cancelled"), [(None, True), (5_000.0, True), (1_000.0, False), (1_200.0, False)])
def test_a_cancel_that_arrives_first_counts_only_if_it_was_clearly_sent_after_the_request(
    stage: Stage, age_ms: float | None, cancelled: bool
) -> None:
    stage.cancel()
    stage.world.run(1.0)
    reply = stage.run(age_ms=age_ms)
    assert (reply.accepted, reply.cancelled) == (not cancelled, cancelled)


def test_a_duplicate_id_is_refused_and_its_own_inbox_is_recognised(stage: Stage) -> None:
    stage.run()
    for router_id, attempt in (("peer", 1), ("other", 2)):
        reply = stage.run(router_id=router_id, attempt=attempt)
        assert (reply.accepted, reply.same_reply) == (False, True)
        assert reply.error
        assert reply.error.code == "duplicate_request"


def test_a_later_attempt_of_its_router_replaces_a_stream_without_ending_it(stage: Stage) -> None:
    stage.run(max_tokens=9)
    stage.world.run(0.3)
    assert stage.run(attempt=2, max_tokens=9).accepted
    stage.world.run(3.0)
    assert [(chunk.attempt, chunk.finish_reason) for chunk in stage.peer.chunks if chunk.finish_reason] == [
        (2, "length")
    ]


def test_a_live_stream_is_repeated_from_the_requested_token_at_most_every_200_ms(stage: Stage) -> None:
    stage.run()
    stage.world.run(1.0)
    said = [token for chunk in stage.peer.chunks for token in chunk.token_ids or []]
    stage.peer.chunks.clear()
    assert stage.resync(2) == stage.resync(2) == b'{"found":true}'
    again = [chunk for chunk in stage.peer.chunks if chunk.offset == 2]
    assert len(again) == 1
    assert again[0].token_ids[: len(said) - 2] == said[2:]  # type: ignore[index]
    stage.world.run(3.0)
    assert stage.peer.chunks[-1].finish_reason == "length"


def test_an_ended_stream_can_be_fetched_again_for_a_minute_with_its_terminal(stage: Stage) -> None:
    stage.run()
    stage.world.run(3.0)
    whole = "".join(chunk.text for chunk in stage.peer.chunks)
    stage.peer.chunks.clear()
    assert stage.resync(0)
    stage.world.run(0.1)
    assert "".join(chunk.text for chunk in stage.peer.chunks) == whole
    assert [chunk.finish_reason for chunk in stage.peer.chunks] == [None, "length"]
    stage.world.run(60.0)
    assert stage.resync(0) is None


def test_a_resync_of_an_unknown_id_is_not_answered(stage: Stage) -> None:
    assert stage.resync(0) is None
    assert stage.peer.ask(NAMES.cancel("r1", model=MODEL), b"") is None


def test_a_snapshot_lists_running_requests_and_which_of_them_have_sent_tokens(stage: Stage) -> None:
    stage.run()
    for has_tokens in (False, True):
        part = stage.snapshot()
        assert (part.worker_id, part.epoch, part.part, part.parts) == ("w0", stage.epoch, 0, 1)
        assert [(one.id, one.attempt, one.num_tokens > 0) for one in part.running] == [(KEY, 1, has_tokens)]
        stage.world.run(1.0)


def test_a_snapshot_has_the_tokens_that_its_reader_lacks(stage: Stage) -> None:
    stage.run()
    events = stage.overhear(NAMES.events(MODEL, "w0"), internal.Events)
    stage.world.run(0.55)
    for known in (0, 2):
        part = stage.snapshot(r1=known, other=3)
        said = [token for one in events if one.seq <= part.seq for token in block_hash.unpack_token_ids(one.token_ids)]
        (running,) = part.running
        assert block_hash.unpack_token_ids(running.token_ids).tolist() == said[known:]
        assert len(said) > 2


def test_no_snapshot_is_sent_while_tokens_wait_for_the_broker(stage: Stage) -> None:
    stage.run()
    parts = stage.overhear(inbox := stage.peer.bus.new_inbox(), internal.SnapshotPart)
    stage.world.run(0.5)
    stage.frontend.bus.is_busy = True
    stage.world.run(0.2)
    stage.peer.publish(NAMES.worker(MODEL, "w0", "snapshot"), b"", inbox)
    stage.world.run(0.1)
    stage.frontend.bus.is_busy = False
    stage.world.run(1.0)
    assert parts == []
    assert stage.snapshot(r1=0).running


def test_what_an_engine_puts_out_behind_a_terminal_that_waits_is_ignored(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stream: object, output: object) -> None:
        raise ZeroDivisionError

    events = stage.overhear(NAMES.events(MODEL, "w0"), internal.Events)
    stage.run()
    stage.world.run(0.5)
    stage.frontend.bus.is_busy = True
    with monkeypatch.context() as broken:
        broken.setattr("tokenbus.worker.streams.stream.WorkerStream.take", fail)
        stage.world.run(0.1)
    stage.world.run(0.3)
    stage.frontend.bus.is_busy = False
    stage.world.run(3.0)
    *chunks, terminal = stage.peer.chunks
    assert terminal.error
    assert terminal.error.code is errors.Code.INTERNAL
    assert terminal.offset == sum(chunk.tokens for chunk in chunks) > 1
    assert all(chunk.finish_reason is None for chunk in chunks)
    assert [key for entry in events for key in entry.finished] == [KEY]


def test_a_snapshot_has_what_a_run_has_sampled_of_requests_that_its_reader_could_not_name(stage: Stage) -> None:
    events = stage.overhear(NAMES.events(MODEL, "w0"), internal.Events)
    stage.run(resume_from=internal.RunResume(token_ids=block_hash.pack_token_ids([5, 1_005])))
    stage.world.run(0.55)
    part = stage.snapshot(wants_others=True, other=3)
    said = [token for one in events if one.seq <= part.seq for token in block_hash.unpack_token_ids(one.token_ids)]
    (running,) = part.running
    assert block_hash.unpack_token_ids(running.token_ids).tolist() == said
    assert running.num_tokens == 2 + len(said) > 4
    assert stage.snapshot(wants_others=True, r1=4).running[0].token_ids == block_hash.pack_token_ids(said[2:])


@pytest.mark.parametrize(
    "malformed", [b"{}", b"\xc1", b"\x81\xacknown_tokens\x81\xa1a\xa1b", b"\x81\xacknown_tokens\x05"]
)
def test_a_malformed_request_for_a_snapshot_is_ignored(stage: Stage, malformed: bytes) -> None:
    stage.run()
    assert stage.peer.ask(NAMES.worker(MODEL, "w0", "snapshot"), malformed) is None
    assert stage.snapshot(r1=0).running


def test_streams_of_one_epoch_have_numbers_of_their_own(stage: Stage) -> None:
    events = stage.overhear(NAMES.events(MODEL, "w0"), internal.Events)
    stage.run(attempt=3)
    stage.world.run(3.0)
    stage.run(attempt=5)
    stage.world.run(3.0)
    first, second = started = [one for entry in events for one in entry.started]
    assert [(one.id, one.attempt, one.prompt_tokens) for one in started] == [(KEY, 3, 3), (KEY, 5, 3)]
    assert first.stream_no != second.stream_no
    sampled = [number for entry in events for number in block_hash.unpack_token_ids(entry.stream_nos)]
    assert sampled == [first.stream_no] * 20 + [second.stream_no] * 20


def test_a_step_is_logged_before_its_chunk_and_sealed_behind_it(stage: Stage) -> None:
    order: list[tuple[str, int]] = []
    stage.peer.bus.tap = lambda message: order.append((message.subject, len(message.data)))
    stage.overhear(NAMES.events(MODEL, "w0"), internal.Events)
    seals = stage.overhear(NAMES.seal(MODEL, "w0"), internal.Seal)
    stage.run()
    stage.world.run(3.0)
    assert len(seals) == 19  # the last token's entry is sealed by one with the end instead
    log, chunks = NAMES.events(MODEL, "w0"), stage.peer.inbox
    for at, (subject, _) in enumerate(order):
        if subject == NAMES.seal(MODEL, "w0"):
            assert [one for one, _ in order[at - 2 : at]] == [log, chunks]


def test_a_card_names_the_epoch_that_a_frontend_has_ended_and_its_last_entry(stage: Stage) -> None:
    events = stage.overhear(NAMES.events(MODEL, "w0"), internal.Events)
    cards = stage.overhear(NAMES.card(MODEL, "w0"), messages.Card)
    stage.run()
    stage.world.run(0.5)
    ended = stage.epoch
    stage.frontend.process.is_paused = True
    stage.world.run(2.0)
    stage.frontend.process.is_paused = False
    stage.world.run(1.0)
    last = max(one.seq for one in events if one.epoch == ended)
    assert cards[-1].previous == messages.PreviousEpoch(epoch=ended, seq=last)


def test_a_frontend_that_was_paused_gives_up_its_streams_and_returns_with_a_new_epoch(stage: Stage) -> None:
    stage.run()
    stage.world.run(0.5)
    before, said = stage.epoch, len(stage.peer.chunks)
    stage.frontend.process.is_paused = True
    stage.world.run(2.0)
    stage.frontend.process.is_paused = False
    stage.world.run(3.0)
    assert stage.epoch != before
    assert len(stage.peer.chunks) == said
    assert stage.resync(0) is None
    assert not stage.run(attempt=2, epoch=before).accepted
    assert stage.run(attempt=2).accepted


def test_a_worker_that_fenced_itself_has_not_died_even_if_the_card_of_an_epoch_was_lost() -> None:
    with world(seed=5) as made:
        stage = Stage(made, token_s=0.5)
        RouterProcess(made, stage.broker, "r0")
        made.run(1.0)
        request = b'{"id": "r1", "token_ids": [1, 2, 3], "max_tokens": 24}'
        stage.peer.publish(NAMES.generate(MODEL), request, stage.peer.inbox)
        cards = stage.overhear(NAMES.card(MODEL, "w0"), messages.Card)
        for fences in (2, 4, 6):  # the same number of deaths would be too many
            made.run(0.7)
            stage.frontend.fence_twice()
            made.run(3.5)
            assert (len(cards), len(cards[-1].earlier)) == (fences // 2, fences - 1)
            assert stage.peer.chunks[-1].finish_reason is None
        made.run(10.0)
        assert end_of(stage) == "length"


def test_a_router_that_was_away_catches_up_even_if_it_can_not_name_all_its_requests() -> None:
    with world(seed=5) as made:
        broker = Broker(made)
        frontends = [FrontendProcess(made, broker, f"w{number}", max_num_seqs=8) for number in range(2)]
        router, client = RouterProcess(made, broker, "r0"), SimpleClient(made, broker, "s0")
        router.bus.max_payload = limits.MESSAGE_RESERVE_BYTES + 100
        made.run(1.0)
        for number in range(16):
            client.ask(60, seed=number)
        made.run(0.5)
        router.bus.cut(lingers=False)
        made.run(2.0)
        for frontend in frontends:
            kill(frontend.process, frontend.bus, frontend.incoming)
        FrontendProcess(made, broker, "w2", max_num_seqs=16)
        made.run_until(lambda: not client.open())
        for asked in client.asked:
            asked.check()
            assert asked.is_whole, asked


@pytest.mark.parametrize("next_limit", [20, 40])
def test_a_request_keeps_the_limit_of_its_first_worker(next_limit: int) -> None:
    with world(seed=5) as made:
        stage = Stage(made, max_new_tokens=30)
        RouterProcess(made, stage.broker, "r0")
        made.run(1.0)
        stage.peer.publish(NAMES.generate(MODEL), b'{"id": "r1", "token_ids": [1, 2, 3]}', stage.peer.inbox)
        made.run(2.5)
        kill(stage.frontend.process, stage.frontend.bus, stage.frontend.incoming)
        assert sum(chunk.tokens for chunk in stage.peer.chunks) > 20
        FrontendProcess(made, stage.broker, "w1", max_new_tokens=next_limit)
        made.run(10.0)
        assert end_of(stage) == "length"
        assert sum(chunk.tokens for chunk in stage.peer.chunks) == 30


def test_a_router_sends_a_keepalive_for_a_request_within_a_second(stage: Stage) -> None:
    RouterProcess(stage.world, stage.broker, "r0")
    stage.world.run(1.0)
    for number in range(5):
        request = b'{"id": "other%d", "token_ids": [1, 2, 3], "max_tokens": 900}' % number
        stage.peer.publish(NAMES.generate(MODEL), request, stage.peer.bus.new_inbox())
    stage.world.run(0.5)
    stage.peer.publish(NAMES.generate(MODEL), b'{"id": "r1", "token_ids": [1, 2, 3]}', stage.peer.inbox)
    stage.world.run(1.05)
    (empty,) = stage.peer.chunks
    assert (empty.text, empty.tokens, empty.worker_id, empty.finish_reason, empty.attempt) == ("", 0, None, None, 0)
    assert stage.client_resync() == b'{"found":true}'


def test_while_a_worker_may_have_a_request_its_router_answers_for_it_but_sends_no_keepalive(stage: Stage) -> None:
    router = RouterProcess(stage.world, stage.broker, "r0")
    stage.world.run(1.0)
    stage.frontend.process.is_paused = True
    stage.peer.publish(NAMES.generate(MODEL), b'{"id": "r1", "token_ids": [1, 2, 3]}', stage.peer.inbox)
    stage.world.run(1.4)
    assert stage.client_resync() == b'{"found":true}'
    assert stage.peer.chunks == []
    stage.peer.publish(NAMES.cancel("r1", model=MODEL), b"")
    stage.world.run(4.0)
    assert [chunk.finish_reason for chunk in stage.peer.chunks][-1] == "cancelled"
    assert sum(chunk.finish_reason is not None for chunk in stage.peer.chunks) == 1
    stage.peer.chunks.clear()
    assert stage.client_resync() == b'{"found":true}'
    stage.world.run(0.1)
    assert [chunk.finish_reason for chunk in stage.peer.chunks] == ["cancelled"]
    assert len(router.router.flights) == 0


def end_of(stage: Stage) -> str | None:
    """Returns how the stream ended, and asserts that it ended once, with its last chunk."""
    *before, last = [chunk.finish_reason for chunk in stage.peer.chunks]
    assert before == [None] * len(before)
    return last


def test_an_unread_accept_lets_no_keepalive_follow_the_terminal(stage: Stage) -> None:
    router = RouterProcess(stage.world, stage.broker, "r0")
    stage.world.run(1.0)
    request = b'{"id": "r1", "token_ids": [1, 2, 3], "max_tokens": 3}'
    stage.peer.publish(NAMES.generate(MODEL), request, stage.peer.inbox)
    stage.world.run(0.002)
    assert router.bus.link is not None
    router.bus.link.lag_s = 1.5
    stage.world.run(6.0)
    assert end_of(stage) == "length"


def test_nothing_of_a_worker_whose_outbound_traffic_is_blocked_arrives_after_another_attempt_has_begun(
    stage: Stage,
) -> None:
    RouterProcess(stage.world, stage.broker, "r0")
    stage.world.run(1.0)
    request = b'{"id": "r1", "token_ids": [1, 2, 3], "max_tokens": 200}'
    stage.peer.publish(NAMES.generate(MODEL), request, stage.peer.inbox)
    stage.world.run(1.0)
    assert stage.frontend.bus.link is not None
    stage.frontend.bus.link.stall(4.0)
    for number in range(40):
        cancelled_at = stage.world.now + number * 0.2
        stage.world.at(cancelled_at, lambda: stage.peer.publish(NAMES.cancel("somebody-elses", model=MODEL), b""))
    stage.world.run(40.0)
    assert end_of(stage) == "length"
    assert sum(chunk.tokens for chunk in stage.peer.chunks) == 200
    assert {chunk.attempt for chunk in stage.peer.chunks} == {1, 2}


def test_a_worker_whose_events_lie_unread_in_a_routers_connection_is_not_lost(stage: Stage) -> None:
    router = RouterProcess(stage.world, stage.broker, "r0")
    stage.world.run(3.0)
    request = b'{"id": "r1", "token_ids": [1, 2, 3], "max_tokens": 100}'
    stage.peer.publish(NAMES.generate(MODEL), request, stage.peer.inbox)
    stage.world.run(0.5)
    assert router.bus.link is not None
    router.bus.link.lag_s = 4.0
    stage.world.run(20.0)
    assert end_of(stage) == "length"
