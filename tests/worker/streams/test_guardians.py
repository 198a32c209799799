"""A worker asks once a second who guards its streams, and offers those that nobody guards to the routers."""

from collections.abc import Iterator

import pytest
import structlog
from nats.aio.msg import Msg

from tests.sim.engine import Token, first_token
from tests.sim.stage import KEY, NAMES, Stage
from tests.sim.system import MODEL
from tests.sim.world import World, world
from tokenbus.protocol.bus.bus import is_no_responders
from tokenbus.protocol.parts import assembly
from tokenbus.protocol.wire import block_hash, codec, internal, limits, messages

OFFERS = NAMES.guard(MODEL, "w0")
GUARDED = NAMES.worker(MODEL, "w0", "guarded")
_guards = codec.Decoder(internal.Guard)


class Guarded(Stage):
    """A frontend, and everything that it says about guardians; the router `peer` does not listen at first."""

    def __init__(self, world: World, token_s: float = 0.1) -> None:
        super().__init__(world, token_s)
        self.offers: list[tuple[float, internal.Guard]] = []
        """When each offer came, and what it says."""
        self.large_offers: list[tuple[float, internal.Guard]] = []
        """The same for offers that came in parts."""
        self._takes_parts = True
        self._accepts_as = ""
        self.entries = self.overhear(NAMES.events(MODEL, "w0"), internal.Events)
        self.peer.process.do(self.peer.bus.subscribe(OFFERS, self._take_offer))

    def _take_offer(self, message: Msg) -> None:
        if assembly.is_announcement(message.headers):
            if self._takes_parts:
                self.peer.parts.receiver.announced(message, "w0", self._take_large)
            else:  # a router of an earlier version says nothing
                if self._accepts_as:
                    reply = internal.GuardReply(request_id=KEY, attempt=1, accepted=True, router_id=self._accepts_as)
                    self.peer.bus.publish(GUARDED, codec.encode(reply))
                self.peer.bus.publish(message.reply, codec.encode(internal.RunReply(accepted=False)))
            return
        assert message.reply == GUARDED
        guard = _guards.decode(message.data)
        given = guard.run.resume_from
        tokens = [] if given is None else block_hash.unpack_token_ids(given.token_ids).tolist()
        said = [token for name, token in self._said() if name == guard.stream_no]
        assert tokens[len(tokens) - len(said) :] == said, "an offer has the tokens of all entries before it"
        self.offers.append((self.world.now, guard))

    def _take_large(self, message: Msg) -> None:
        assert message.reply == GUARDED
        self.large_offers.append((self.world.now, _guards.decode(message.data)))

    def refuse_parts(self) -> None:
        """Takes no offers in parts from now on."""
        self._takes_parts = False

    def accept_parts_as(self, router_id: str) -> None:
        """Does the same, but accepts an earlier offer at that moment, as this router."""
        self._takes_parts, self._accepts_as = False, router_id

    def _said(self) -> Iterator[tuple[int, int]]:
        """Yields the streams and the tokens in the log."""
        for entry in self.entries:
            names, tokens = map(block_hash.unpack_token_ids, (entry.stream_nos, entry.token_ids))
            yield from zip(names, tokens, strict=True)

    def reconfigure(self, **changes: object) -> None:
        """Changes the engine's configuration."""
        engine = self.frontend.engine
        assert engine is not None
        engine.config = codec.replace(engine.config, **changes)
        self.frontend.process.call(self.frontend.frontend.engine_started, engine, engine.config)
        self.world.run(0.1)

    def listen(self, router_id: str = "peer") -> list[internal.GuardCheck]:
        """Listens as a router, and returns the list of what it is asked."""
        return self.overhear(NAMES.router(router_id), internal.GuardCheck)

    def answer(self, router_id: str = "r9", key: str = KEY, attempt: int = 1, *, accepted: bool = True) -> None:
        """Answers an offer."""
        reply = internal.GuardReply(request_id=key, attempt=attempt, accepted=accepted, router_id=router_id)
        self.peer.publish(GUARDED, codec.encode(reply))
        self.world.run(0.02)

    @property
    def guardian(self) -> str:
        """The guardian of the only stream, as a snapshot names it."""
        (running,) = self.snapshot().running
        return running.router_id

    @property
    def named(self) -> list[dict[int, str]]:
        """The guardians in the log, entry by entry."""
        return [entry.guardians for entry in self.entries if entry.guardians]

    @property
    def said(self) -> list[int]:
        """The tokens of the only stream in the log."""
        return [token for _, token in self._said()]

    def know(self, router_id: str = "peer") -> None:
        """Says in the name of a router that it guards all streams that it was asked about."""
        self.peer.publish(
            NAMES.unguarded(MODEL, "w0", router_id),
            codec.encode(internal.Unguarded(router_id=router_id, request_ids=[])),
        )
        self.world.run(0.02)

    def unguard(self, key: str = KEY, router_id: str = "peer") -> None:
        """Says in the name of a router that it does not guard a stream."""
        unknown = internal.Unguarded(router_id="peer", request_ids=[key, "default:r3"])
        self.peer.publish(NAMES.unguarded(MODEL, "w0", router_id), codec.encode(unknown))
        self.world.run(0.02)


def make(token_s: float) -> Iterator[Guarded]:
    with world(seed=5) as made:
        yield Guarded(made, token_s)
        for process in made.processes:
            assert process.faults == [], process


@pytest.fixture
def stage() -> Iterator[Guarded]:
    yield from make(0.1)


@pytest.fixture
def slow_stage() -> Iterator[Guarded]:
    """A frontend whose engine takes a minute for a step."""
    yield from make(60.0)


def test_each_guardian_is_asked_once_a_second_about_its_own_streams_and_nothing_is_offered(stage: Guarded) -> None:
    asked, other = stage.listen(), stage.listen("other")
    for name, router_id in (("r1", "peer"), ("r2", "other"), ("r3", "peer")):
        assert stage.run(name=name, router_id=router_id, max_tokens=90).accepted
    for _ in range(5):
        stage.world.run(0.98)
        stage.know()
        stage.know("other")
    assert [sorted(check.request_ids) for check in asked] == [["default:r1", "default:r3"]] * 5
    assert [check.request_ids for check in other] == [["default:r2"]] * 5
    assert (stage.offers, stage.named) == ([], [])


def test_the_log_and_a_snapshot_name_the_router_that_has_placed_a_stream(stage: Guarded) -> None:
    stage.run(max_tokens=90)
    assert [one.router_id for entry in stage.entries for one in entry.started] == ["peer"]
    assert stage.guardian == "peer"


def test_a_stream_on_whose_guardian_nobody_listens_twice_is_offered_to_the_routers(stage: Guarded) -> None:
    stage.run(max_tokens=90)
    began_at = stage.world.now
    stage.world.run(1.3)
    ((offered_at, _),) = stage.offers
    assert 0.05 <= offered_at - began_at < 1.3
    assert stage.guardian == ""


def test_a_guardian_that_listens_again_within_50_ms_keeps_its_streams(stage: Guarded) -> None:
    stage.run(max_tokens=90)
    notices: list[float] = []
    stage.frontend.bus.tap = lambda message: (
        notices.append(stage.world.now) if ".unguarded." in message.subject and is_no_responders(message) else None
    )
    stage.world.run_until(lambda: len(notices) == 1)
    asked = stage.listen()
    for _ in range(2):
        stage.world.run(1.48)
        stage.know()
    assert (len(notices), stage.offers, stage.guardian) == (1, [], "peer")
    assert len(asked) == 4  # again after 50 ms, and then once a second


def test_a_guardian_that_is_back_under_its_name_after_50_ms_is_asked_about_all_its_streams(stage: Guarded) -> None:
    """It knows none of them, and may not say so only about one."""
    for name in ("r1", "r2", "r3"):
        stage.run(name=name, max_tokens=90)
    notices: list[float] = []
    stage.frontend.bus.tap = lambda message: (
        notices.append(stage.world.now) if ".unguarded." in message.subject else None
    )
    stage.world.run_until(lambda: len(notices) == 1)
    asked = stage.listen()
    stage.world.run(0.1)
    assert [sorted(check.request_ids) for check in asked] == [["default:r1", "default:r2", "default:r3"]]


def test_of_a_guardian_s_streams_those_that_it_does_not_know_are_offered(stage: Guarded) -> None:
    stage.listen()
    for name in ("r1", "r2"):
        stage.run(name=name, max_tokens=90)
    stage.unguard("default:r2")
    assert [guard.run.request_id for _, guard in stage.offers] == ["default:r2"]


@pytest.mark.parametrize("has_answered", [True, False])
def test_a_guardian_that_does_not_answer_loses_its_streams_after_three_questions(
    stage: Guarded, has_answered: bool
) -> None:
    asked = stage.listen()
    stage.run(max_tokens=90)
    if has_answered:
        stage.know()
    stage.world.run_until(lambda: bool(stage.offers))
    assert len(asked) == 3
    assert stage.guardian == ""
    stage.answer("r9")
    assert stage.guardian == "r9"


def test_a_guardian_that_answers_late_keeps_its_streams(stage: Guarded) -> None:
    stage.listen()
    stage.run(max_tokens=90)
    for _ in range(3):
        stage.know()
        stage.world.run(2.5)
    assert (stage.offers, stage.guardian) == ([], "peer")


def test_what_could_not_be_asked_does_not_count_as_unanswered(stage: Guarded) -> None:
    stage.listen()
    stage.run(max_tokens=90)
    stage.know()
    stage.world.run(1.2)
    for _ in range(3):
        stage.frontend.bus.is_busy = True
        stage.world.run(1.0)
        stage.frontend.bus.is_busy = False
        stage.world.run(0.1)
    assert (stage.offers, stage.guardian) == ([], "peer")


def test_a_router_can_not_speak_for_another_one_s_streams(stage: Guarded) -> None:
    stage.listen()
    stage.run(max_tokens=90)
    stage.unguard(router_id="other")
    stage.world.run(2.0)
    assert (stage.offers, stage.guardian) == ([], "peer")


def test_an_offer_has_everything_that_another_worker_would_need(stage: Guarded) -> None:
    wishes = messages.RoutingOptions(policy="random")
    stage.run(attempt=3, max_tokens=90, remaining_ms=60_000.0, age_ms=500.0, routing_options=wishes)
    accepted_at = stage.world.now
    stage.world.run_until(lambda: len(stage.offers) == 1)
    offered_at, guard = stage.offers[0]
    (started,) = [one for entry in stage.entries for one in entry.started]
    assert (guard.stream_no, guard.hash_scheme) == (started.stream_no, "xxh3-64:0")
    run = guard.run
    assert (run.request_id, run.attempt, run.epoch, run.router_id) == (KEY, 3, stage.epoch, "peer")
    assert (run.reply, run.encoding) == (stage.peer.inbox, codec.Encoding.JSON)
    assert block_hash.unpack_token_ids(run.token_ids).tolist() == [1, 2, 3]
    assert (run.params.max_tokens, run.params.seed, run.routing_options) == (90, 1, wishes)
    elapsed_ms = (offered_at - accepted_at) * 1e3
    assert run.remaining_ms == pytest.approx(60_000.0 - elapsed_ms, abs=10.0)
    assert run.age_ms == pytest.approx(500.0 + elapsed_ms, abs=10.0)
    given = run.resume_from
    assert given is not None
    tokens = block_hash.unpack_token_ids(given.token_ids).tolist()
    assert len(tokens) > 2
    assert tokens == stage.said[: len(tokens)]
    first = first_token(Token.of(tokens[0]))
    assert (given.cached_tokens, given.queue_ms, given.prefill_ms) == (
        first.cached_tokens,
        first.queue_ms,
        first.prefill_ms,
    )
    assert given.elapsed_ms == pytest.approx(elapsed_ms, abs=10.0)


def test_an_offer_of_a_stream_without_tokens_continues_nothing(slow_stage: Guarded) -> None:
    slow_stage.run()
    slow_stage.world.run_until(lambda: len(slow_stage.offers) == 1)
    assert slow_stage.offers[0][1].run.resume_from is None


def test_what_a_stream_had_when_it_came_and_what_it_has_sampled_since_is_offered(stage: Guarded) -> None:
    given = [Token(place, 7).token_id for place in range(3)]
    resume_from = internal.RunResume(
        token_ids=block_hash.pack_token_ids(given), cached_tokens=2, queue_ms=4.0, prefill_ms=5.0, elapsed_ms=9_000.0
    )
    stage.run(attempt=2, max_tokens=90, resume_from=resume_from)
    stage.world.run_until(lambda: len(stage.offers) == 1)
    offered = stage.offers[0][1].run.resume_from
    assert offered is not None
    tokens = block_hash.unpack_token_ids(offered.token_ids).tolist()
    assert tokens[:3] == given
    assert len(tokens) > 5
    assert tokens[3:] == stage.said[: len(tokens) - 3]
    assert (offered.cached_tokens, offered.queue_ms, offered.prefill_ms) == (2, 4.0, 5.0)
    assert 9_000.0 < offered.elapsed_ms < 11_000.0


def test_the_log_names_at_once_whoever_accepts_an_offer_first_and_the_offers_end(slow_stage: Guarded) -> None:
    stage = slow_stage
    stage.run(max_tokens=90)
    stage.world.run_until(lambda: len(stage.offers) == 1)
    asked = stage.listen("r9")
    stage.answer("r9")
    assert stage.named == [{stage.offers[0][1].stream_no: "r9"}]
    assert stage.guardian == "r9"
    stage.answer("r8")
    stage.world.run(2.1)
    assert (len(stage.named), stage.guardian, len(stage.offers)) == (1, "r9", 1)
    assert [check.request_ids for check in asked] == [[KEY]] * 2


@pytest.mark.parametrize(
    "claim",
    [
        {"attempt": 2},
        {"key": "default:r2"},
        {"router_id": ""},
        {"router_id": "r" * 129},
        {"router_id": "é" * 65},
    ],
    ids=str,
)
def test_a_reply_that_accepts_nothing_leaves_a_stream_without_a_guardian(
    stage: Guarded, claim: dict[str, object]
) -> None:
    stage.run(max_tokens=90)
    stage.world.run_until(lambda: len(stage.offers) == 1)
    stage.answer(**claim)  # type: ignore[arg-type]
    assert (stage.named, stage.guardian) == ([], "")
    stage.world.run(1.1)
    assert len(stage.offers) == 2


def test_a_refused_offer_is_soon_made_again_and_ever_later_while_it_is_refused(stage: Guarded) -> None:
    """The next one may reach another router, or the same one when it knows the worker better."""
    stage.run(max_tokens=90)
    stage.world.run_until(lambda: len(stage.offers) == 1)
    while len(stage.offers) < 9:
        count = len(stage.offers)
        stage.answer(accepted=False)
        stage.world.run_until(lambda count=count: len(stage.offers) > count)
    times = [at for at, _ in stage.offers]
    assert times[3] - times[0] < 0.9
    assert times[8] - times[7] == pytest.approx(1.0, abs=0.2)
    stage.answer("r9")
    assert (stage.guardian, len(stage.offers)) == ("r9", 9)


def test_an_offer_without_an_answer_is_repeated_every_second_with_the_tokens_until_then(stage: Guarded) -> None:
    stage.run(max_tokens=90)
    stage.world.run_until(lambda: len(stage.offers) == 4)
    times = [at for at, _ in stage.offers]
    assert all(
        later - sooner == pytest.approx(1.0, abs=0.3) for sooner, later in zip(times[1:], times[2:], strict=False)
    )
    lengths = [len(guard.run.resume_from.token_ids) // 4 for _, guard in stage.offers if guard.run.resume_from]
    assert lengths == sorted(set(lengths))
    assert len(lengths) == 4


def test_a_stream_that_has_ended_is_not_offered(stage: Guarded) -> None:
    stage.run(max_tokens=12)
    stage.world.run_until(lambda: len(stage.offers) == 1)
    stage.world.run(3.0)
    assert len(stage.offers) == 1
    stage.answer()
    assert stage.named == []


def test_the_end_of_a_stream_without_a_guardian_names_the_last_one_which_may_be_stopping(stage: Guarded) -> None:
    stage.run(max_tokens=20)
    stage.world.run_until(lambda: len(stage.offers) == 1)
    stage.run(name="r2", router_id="other", max_tokens=20)
    stage.world.run_until(lambda: stage.offers[-1][1].run.request_id == "default:r2")
    stage.answer("r9", key="default:r2")
    stage.world.run(3.0)
    ends = {one.id: one.router_id for entry in stage.entries for one in entry.ends}
    assert ends == {KEY: "peer", "default:r2": "r9"}


def test_while_the_broker_takes_nothing_nobody_is_asked_and_nothing_is_offered(stage: Guarded) -> None:
    for name, router_id in (("r1", "gone"), ("r2", "peer")):
        stage.run(name=name, router_id=router_id, max_tokens=90)
    asked = stage.listen()
    stage.world.run_until(lambda: len(stage.offers) == 1)
    asked.clear()
    stage.frontend.bus.is_busy = True
    stage.world.run(1.2)
    assert (len(stage.offers), len(asked)) == (1, 0)
    stage.frontend.bus.is_busy = False
    stage.world.run(0.9)
    assert (len(stage.offers), len(asked)) == (2, 1)


@pytest.mark.parametrize("max_tokens", [7, 90])
def test_what_waits_for_the_broker_leaves_before_the_offer_of_its_stream(stage: Guarded, max_tokens: int) -> None:
    """If that ends the stream, there is nothing to offer."""
    stage.listen()
    stage.run(max_tokens=max_tokens)
    stage.world.run_until(lambda: len(stage.said) == 5)
    stage.frontend.bus.is_busy = True
    stage.world.run(0.22)
    stage.frontend.bus.is_busy = False
    stage.unguard()
    assert len(stage.said) == 7
    assert len(stage.offers) == (max_tokens > 7)


@pytest.mark.parametrize("subject", [GUARDED, NAMES.unguarded(MODEL, "w0", "peer")])
def test_a_malformed_answer_is_ignored(stage: Guarded, subject: str) -> None:
    stage.listen()
    stage.run(max_tokens=90)
    for payload in (b"", b"\xc1", b"\x80", codec.encode(internal.Take(request_id=KEY, attempt=1))):
        stage.peer.publish(subject, payload)
    stage.world.run(1.5)
    assert (stage.offers, stage.guardian) == ([], "peer")


def test_a_stream_too_large_for_a_message_that_nobody_takes_in_parts_goes_on_without_a_guardian(
    stage: Guarded,
) -> None:
    stage.reconfigure(context_length=1_000_000)
    stage.run(max_tokens=90, prompt=[7] * 100_000)
    stage.run(name="r2", max_tokens=90)
    stage.frontend.incoming.max_payload = 400_000
    stage.refuse_parts()
    with structlog.testing.capture_logs() as logs:
        stage.world.run(3.5)
    assert [line["request_id"] for line in logs if line["event"] == "stream_not_offered"] == [KEY]
    assert [guard.run.request_id for _, guard in stage.offers] == ["default:r2"] * 3
    stage.world.run(8.0)
    assert [chunk.finish_reason for chunk in stage.peer.chunks if chunk.finish_reason] == ["length", "length"]


def test_a_router_that_accepts_while_a_larger_offer_fails_is_the_guardian(stage: Guarded) -> None:
    """It has answered an earlier offer, made when the stream was smaller."""
    stage.reconfigure(context_length=1_000_000)
    stage.run(max_tokens=90, prompt=[7] * 100_000)
    stage.frontend.incoming.max_payload = 400_000
    stage.listen("r9")
    stage.accept_parts_as("r9")
    with structlog.testing.capture_logs() as logs:
        stage.world.run(2.5)
    assert [line["event"] for line in logs if line["event"] == "stream_not_offered"] == []
    assert (stage.guardian, stage.named) == ("r9", [{0: "r9"}])


def test_a_stream_too_large_for_a_message_is_offered_in_parts(stage: Guarded) -> None:
    stage.reconfigure(context_length=1_000_000)
    stage.run(max_tokens=90, prompt=[7] * 100_000)
    stage.frontend.incoming.max_payload = 100_000
    stage.world.run(1.5)
    ((_, guard),) = stage.large_offers
    assert block_hash.unpack_token_ids(guard.run.token_ids).tolist() == [7] * 100_000
    assert stage.offers == []


def test_the_question_to_a_guardian_of_many_streams_is_split_to_fit_messages(stage: Guarded) -> None:
    stage.reconfigure(max_num_seqs=40)
    names = [f"{number:0100}" for number in range(40)]
    for name in names:
        stage.run(name=name, max_tokens=60)
    asked = stage.listen()
    stage.frontend.bus.max_payload = limits.MESSAGE_RESERVE_BYTES + 2_000
    stage.world.run(1.0)
    assert sorted(key for check in asked for key in check.request_ids) == [f"default:{name}" for name in names]
    assert max(len(codec.encode(check)) for check in asked) <= 2_000


@pytest.mark.parametrize("router_id", ["", "r" * 129])
def test_a_run_by_a_router_that_could_not_be_asked_is_refused(stage: Guarded, router_id: str) -> None:
    reply = stage.run(router_id=router_id)
    assert not reply.accepted
    assert reply.error
    assert reply.error.param == "router_id"


def test_only_as_much_as_a_broker_reads_easily_is_offered_at_once_and_the_rest_in_turn(stage: Guarded) -> None:
    stage.reconfigure(max_num_seqs=20, context_length=1_000_000)
    names = [f"r{number}" for number in range(20)]
    for name in names:
        assert stage.run(name=name, max_tokens=150, prompt=[7] * 150_000).accepted
    stage.world.run(5.5)
    assert {guard.run.request_id for _, guard in stage.offers} == {f"default:{name}" for name in names}
    for at, _ in stage.offers:
        within = [guard for other, guard in stage.offers if 0 <= other - at < 0.5]
        assert sum(len(guard.run.token_ids) for guard in within) <= 4 * 1024 * 1024
