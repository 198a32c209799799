"""A worker that leaves gives up a stream to its guardian, with all its tokens, and only once."""

from collections.abc import Iterator

import pytest
from nats.aio.msg import Msg

from tests.sim.engine import Token, first_token
from tests.sim.stage import KEY, NAMES, Stage
from tests.sim.system import MODEL
from tests.sim.world import world
from tokenbus.protocol.wire import block_hash, codec, internal, limits, messages

LEAVING = messages.WorkerState.LEAVING


class Leaving(Stage):
    """A frontend, and its event log."""

    @property
    def entries(self) -> list[internal.Events]:
        return self._entries

    def listen(self) -> None:
        self._entries = self.overhear(NAMES.events(MODEL, "w0"), internal.Events)
        self.overhear(NAMES.router("peer"), internal.GuardCheck)

    @property
    def said(self) -> list[int]:
        """The tokens in the log."""
        return [token for entry in self.entries for token in block_hash.unpack_token_ids(entry.token_ids)]

    @property
    def heard(self) -> list[int]:
        """The tokens that the client has."""
        return [token for chunk in self.peer.chunks for token in chunk.token_ids or []]

    @property
    def taken(self) -> list[str]:
        return [key for entry in self.entries for key in entry.taken]


@pytest.fixture
def stage() -> Iterator[Leaving]:
    with world(seed=5) as made:
        stage = Leaving(made)
        stage.listen()
        yield stage
        for process in made.processes:
            assert process.faults == [], process


def granted(reply: internal.TakeReply | None) -> list[int]:
    """Returns the tokens of a reply that gives up the stream."""
    assert reply is not None
    assert reply.ok
    return block_hash.unpack_token_ids(reply.token_ids).tolist()


def test_a_stream_that_is_taken_ends_without_a_word_behind_all_its_tokens(stage: Leaving) -> None:
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    stage.start_leaving()
    reply = stage.take()
    tokens = granted(reply)
    assert reply is not None
    assert (reply.epoch, reply.num_tokens) == (stage.epoch, len(tokens))
    first = first_token(Token.of(tokens[0]))
    assert reply.first_token is not None
    assert (reply.first_token.cached_tokens, reply.first_token.queue_ms) == (first.cached_tokens, first.queue_ms)
    stage.world.run(3.0)
    assert len(tokens) > 3
    assert tokens == stage.said == stage.heard
    assert [chunk.finish_reason for chunk in stage.peer.chunks if chunk.finish_reason] == []
    assert stage.taken == [KEY]
    assert [key for entry in stage.entries for key in entry.finished] == []
    assert stage.snapshot().running == []
    assert stage.frontend.engine is not None
    assert stage.frontend.engine.load().running == 0
    assert stage.resync(0) is None


def test_the_reply_comes_behind_the_stream_s_last_entry_and_the_one_that_says_taken(stage: Leaving) -> None:
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    stage.start_leaving()
    order: list[str] = []
    stage.peer.bus.tap = lambda message: order.append(message.subject)
    before = len(stage.entries)
    assert granted(stage.take())
    assert order[-1].startswith("_INBOX")
    assert order[-2] == NAMES.events(MODEL, "w0")
    assert [entry.taken for entry in stage.entries[before:]][-1] == [KEY]


@pytest.mark.parametrize(("known", "missing"), [(0, slice(None)), (2, slice(2, None)), (500, slice(0, 0))])
def test_a_take_is_answered_with_the_tokens_that_the_router_does_not_know(
    stage: Leaving, known: int, missing: slice
) -> None:
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    stage.start_leaving()
    reply = stage.take(known)
    assert granted(reply) == stage.said[missing]
    assert reply is not None
    assert reply.num_tokens == len(stage.said)


def test_the_same_router_that_asks_again_gets_the_same_answer_for_a_minute(stage: Leaving) -> None:
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    stage.start_leaving()
    first = stage.take()
    stage.world.run(58.0)
    assert stage.take() == stage.take(known_tokens=3) == first
    stage.world.run(2.0)
    again = stage.take()
    assert again is not None
    assert not again.ok
    assert stage.taken == [KEY]


def test_a_new_epoch_gives_up_nothing_of_the_one_before(stage: Leaving) -> None:
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    stage.start_leaving()
    assert granted(stage.take())
    before = stage.epoch
    stage.frontend.process.is_paused = True
    stage.world.run(2.0)
    stage.frontend.process.is_paused = False
    stage.world.run(1.0)
    assert stage.epoch != before
    reply = stage.take()
    assert reply == internal.TakeReply(ok=False, epoch=stage.epoch)
    assert stage.entries[-1].state is LEAVING


@pytest.mark.parametrize(
    "claim", [{"attempt": 2}, {"attempt": 0}, {"name": "r2"}, {"router_id": "other"}, {"router_id": ""}], ids=str
)
def test_a_stream_is_given_up_only_to_its_guardian_and_for_its_own_attempt(
    stage: Leaving, claim: dict[str, object]
) -> None:
    stage.run(max_tokens=12)
    stage.start_leaving()
    assert stage.take(**claim) == internal.TakeReply(ok=False, epoch=stage.epoch)  # type: ignore[arg-type]
    stage.world.run(3.0)
    assert (stage.taken, stage.peer.chunks[-1].finish_reason) == ([], "length")


def test_a_worker_that_does_not_leave_gives_up_nothing(stage: Leaving) -> None:
    stage.run(max_tokens=12)
    for drains in (False, True):
        if drains:
            stage.start_draining()
        assert stage.take() == internal.TakeReply(ok=False, epoch=stage.epoch)
    stage.world.run(3.0)
    assert (stage.taken, stage.peer.chunks[-1].finish_reason) == ([], "length")


def test_a_stream_that_has_ended_is_not_given_up(stage: Leaving) -> None:
    stage.run(max_tokens=3)
    stage.start_leaving()
    stage.world.run(1.0)
    assert stage.take() == internal.TakeReply(ok=False, epoch=stage.epoch)
    assert stage.resync(0)


def test_a_stream_without_a_guardian_is_given_up_to_whoever_asks_first(stage: Leaving) -> None:
    """Nobody else acts on it: whoever may have accepted it is named no more."""
    stage.run(max_tokens=90, router_id="gone")
    offers = stage.overhear(NAMES.guard(MODEL, "w0"), internal.Guard)
    stage.world.run_until(lambda: len(offers) == 1)
    stage.start_leaving()
    assert granted(stage.take(router_id="peer"))
    accepted = internal.GuardReply(request_id=KEY, attempt=1, accepted=True, router_id="late")
    stage.peer.publish(NAMES.worker(MODEL, "w0", "guarded"), codec.encode(accepted))
    stage.world.run(1.0)
    assert [entry.guardians for entry in stage.entries if entry.guardians] == []
    other = stage.take(router_id="late")
    assert other is not None
    assert not other.ok


def test_while_chunks_wait_for_the_broker_a_take_has_no_answer_and_changes_nothing(stage: Leaving) -> None:
    """A stream's chunks must have left before it is given up."""
    stage.run(max_tokens=40)
    stage.world.run(0.55)
    stage.start_leaving()
    stage.frontend.bus.is_busy = True
    stage.world.run(0.2)
    assert stage.take() is None
    stage.frontend.bus.is_busy = False
    stage.world.run(0.5)
    tokens = granted(stage.take())
    assert tokens == stage.said == stage.heard


def test_a_stream_whose_unknown_tokens_fit_no_message_is_given_up_in_parts_behind_its_last_chunk(
    stage: Leaving,
) -> None:
    stage.run(max_tokens=30)
    stage.world.run(1.5)
    stage.start_leaving()
    parts: list[Msg] = []
    stage.peer.process.do(stage.peer.bus.subscribe(NAMES.router_upload("peer", "*"), parts.append))
    stage.frontend.incoming.max_payload = limits.MESSAGE_RESERVE_BYTES + 40
    tokens = granted(stage.take())
    assert len(tokens) > 10
    assert tokens == stage.said == stage.heard
    assert len(parts) > 1
    assert max(len(part.data) for part in parts) <= 40
    assert granted(stage.take()) == tokens


@pytest.mark.parametrize("malformed", [b"", b"\xc1", b"{}", b"\x80"])
def test_a_malformed_take_has_no_answer(stage: Leaving, malformed: bytes) -> None:
    stage.run(max_tokens=90)
    stage.start_leaving()
    subject = NAMES.worker(MODEL, "w0", "take")
    assert stage.peer.ask(subject, malformed) is None
    for key in ("r1", "default:r 1", "a.b:r1"):
        assert stage.peer.ask(subject, internal.Take(request_id=key, attempt=1, router_id="peer")) is None
    assert stage.peer.ask(subject, internal.Take(request_id=KEY, attempt=-1, router_id="peer")) is None
    assert granted(stage.take()) is not None


@pytest.mark.parametrize("leaves", [False, True])
def test_a_worker_that_drains_or_leaves_accepts_nothing(stage: Leaving, leaves: bool) -> None:
    stage.start_draining()
    if leaves:
        stage.start_leaving()
    reply = stage.run()
    assert not reply.accepted
    assert reply.error
    assert reply.error.code == "shutting_down"


def test_an_engine_that_dies_while_its_worker_leaves_does_not_make_it_ready(stage: Leaving) -> None:
    stage.run(max_tokens=90)
    stage.start_leaving()
    stage.frontend.engine_dies()
    stage.world.run(1.0)
    assert stage.entries[-1].state is LEAVING
    assert not stage.run(attempt=2).accepted


def test_a_frontend_waits_until_its_last_stream_has_ended_or_was_taken(stage: Leaving) -> None:
    for name, max_tokens in (("r1", 12), ("r2", 90)):
        stage.run(name=name, max_tokens=max_tokens)
    stage.start_leaving()
    waiting = stage.frontend.process.spawn(stage.frontend.frontend.wait_left())
    stage.world.run(0.5)
    assert granted(stage.take(name="r2"))
    stage.world.run(0.1)
    assert not waiting.done()
    stage.world.run(2.0)
    assert waiting.done()
    assert not stage.frontend.frontend.streams
