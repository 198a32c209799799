"""A router takes over the requests of others if it can continue them, and hands over its own."""

import asyncio
import time
from collections.abc import Callable

import pytest
from nats.aio.msg import Msg

from tests.router.builders import NoLoads, at, card, events, fleet_of, flight, free_quota, known
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.bus import bus
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.parts import assembly
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import block_hash, codec, errors, internal, messages, subjects
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.router.fleet.model_part import ModelPart
from tokenbus.router.requests.attempts import Attempts
from tokenbus.router.requests.flights.ends import RequestEnds
from tokenbus.router.requests.flights.flight import Flight, Flights
from tokenbus.router.requests.flights.request_telemetry import FlightTelemetry, RequestLogSettings
from tokenbus.router.requests.flights.worker_client import WorkerClient
from tokenbus.router.requests.guardianship import Guardianship
from tokenbus.router.requests.lifecycle import RequestLifecycle
from tokenbus.router.requests.next_turns import NextTurns
from tokenbus.router.requests.recovery import Recovery
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.workers.worker import Worker

NAMES = subjects.Subjects()
KEY = "default:r1"
GUARDED = NAMES.worker("demo", "w1", "guarded")
ROUTER_INBOX = "_INBOX.other-router.1"
PROMPT = block_hash.pack_token_ids([1, 2, 3])
_replies = codec.Decoder(internal.GuardReply)
_unguarded = codec.Decoder(internal.Unguarded)
_guards = codec.Decoder(internal.Guard)
_uploads = codec.Decoder(messages.UploadReply)


class Broker(RecordingBus):
    """A recording bus that also keeps subscriptions, and answers one kind of request."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: dict[str, tuple[bus.Callback, str]] = {}
        """Callback and queue group by subject."""
        self.asked: list[tuple[str, internal.Guard]] = []
        self.answer: Callable[[internal.Guard], bytes] = lambda guard: b""

    def new_inbox(self) -> str:
        return "_INBOX.this-router.1"

    async def subscribe(self, subject: str, callback: bus.Callback, queue: str = "") -> str:
        self.callbacks[subject] = callback, queue
        return subject

    async def unsubscribe(self, subscription: str) -> None:
        del self.callbacks[subscription]

    def publish(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        if subject != NAMES.guard("demo"):
            super().publish(subject, payload, reply, headers)
            return
        self.asked.append((subject, _guards.decode(payload)))
        data = self.answer(self.asked[-1][1])
        take, _ = self.callbacks[f"{self.new_inbox()}.*"]
        asyncio.get_running_loop().call_soon(take, Msg(_client=None, subject=reply, data=data))  # type: ignore[arg-type]


class Queue:
    """A placement queue with one policy."""

    def check_policy(self, routing: messages.RoutingOptions | None) -> None:
        if routing is not None and routing.policy not in (None, "kv"):
            raise errors.request_error(errors.Code.INVALID_REQUEST, "unknown policy")


class Dispatcher:
    """Notes what is dispatched, and leaves it."""

    def __init__(self) -> None:
        self.dispatched: list[Flight] = []
        self.continued: list[Flight] = []

    async def dispatch(self, flight: Flight) -> None:
        self.dispatched.append(flight)
        await asyncio.Event().wait()

    async def redispatch(self, flight: Flight, worker: Worker, *, is_certain: bool, takes: bool = False) -> None:
        self.continued.append(flight)
        await asyncio.Event().wait()


class Terminals:
    def log_end(self, flight: Flight, reason: str) -> None: ...


class Testbed:
    """The guardianship of `this-router`, which follows worker w1 of two models."""

    __test__ = False

    def __init__(self, *, capacity_bytes: int = 1_000) -> None:
        self.fleet = fleet_of(card("w1"), card("w1", model="other"))
        for model in ("demo", "other"):
            self.fleet.apply_events(model, events("w1", 0), 0.0)
        self.flights = Flights(3, capacity_bytes)
        self.broker = Broker()
        replies = ReplySender(self.broker)  # type: ignore[arg-type]
        metrics = RouterMetrics()
        telemetry = FlightTelemetry(metrics, tracing.NoopTracer(), RequestLogSettings())
        self.dispatcher = Dispatcher()
        parts = (
            self.dispatcher,
            NoLoads(),
            Terminals(),
            free_quota(),
            telemetry,
            RequestEnds(),
            NextTurns(self.fleet, None, None),
        )
        self.lifecycle = RequestLifecycle(self.fleet, self.flights, None, Queue(), *parts)  # type: ignore[arg-type]
        attempts = Attempts(self.broker, NAMES, None, self.fleet, self.flights, "this-router")  # type: ignore[arg-type]
        self.parts = WorkerClient(self.broker, NAMES, "this-router", 1_000_000)  # type: ignore[arg-type]
        self.guardianship = Guardianship(
            self.broker,  # type: ignore[arg-type]
            replies,
            NAMES,
            ("_INBOX", "_T_{tenant}"),
            self.fleet,
            self.flights,
            self.lifecycle,
            attempts,
            self.parts,
            "this-router",
            ModelPart(),
        )
        self.recovery = Recovery(self.fleet, self.flights, attempts, self.lifecycle, metrics, "this-router")

    @classmethod
    async def opened(cls, **options: int) -> "Testbed":
        testbed = cls(**options)
        await testbed.guardianship.open()
        await testbed.parts.receiver.open()
        return testbed

    @property
    def worker(self) -> Worker:
        return known(self.fleet)

    def send(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> list[bytes]:
        """Delivers a message to whoever listens, and returns the answers."""
        for pattern, (callback, _) in list(self.broker.callbacks.items()):
            tokens = pattern.split(".")
            if len(tokens) == len(subject.split(".")) and all(
                mine in ("*", other) for mine, other in zip(tokens, subject.split("."), strict=True)
            ):
                message = Msg(_client=None, subject=subject, reply=reply, data=payload, headers=headers)  # type: ignore[arg-type]
                callback(message)
        self.flights.check_integrity()
        answers = self.broker.take()
        assert {one.subject for one in answers} <= {reply}
        return [one.payload for one in answers]

    def offer(
        self, guard: internal.Guard, subject: str = NAMES.guard("demo", "w1"), reply: str = GUARDED
    ) -> internal.GuardReply | None:
        """Offers a stream like a worker; returns None if there is no answer."""
        answers = self.send(subject, codec.encode(guard), reply)
        return _replies.decode(*answers) if answers else None

    def offer_in_parts(
        self, guard: internal.Guard, subject: str = NAMES.guard("demo", "w1"), reply: str = GUARDED
    ) -> internal.GuardReply | None:
        """Offers a stream in two parts; returns None if there is no answer."""
        payload = codec.encode(guard)
        to_parts = NAMES.received("demo", "w1", "1")
        answers = self.send(subject, b"", to_parts, {assembly.SIZE: str(len(payload))})
        if not answers:
            return None
        upload = _uploads.decode(*answers).upload
        assert upload is not None
        (answer,) = self.send(upload, payload[:10], to_parts, {assembly.OFFSET: "0"})
        assert _uploads.decode(answer).received == 10
        answers = self.send(upload, payload[10:], reply, {assembly.OFFSET: "10"})
        return _replies.decode(*answers) if answers else None

    def hand_on(self, guard: internal.Guard) -> internal.GuardReply | None:
        """Offers a request like a router that stops."""
        return self.offer(guard, NAMES.guard("demo"), ROUTER_INBOX)

    def hear(self, entry: internal.Events) -> None:
        update = self.fleet.apply_events("demo", entry, 0.0)
        assert update is not None
        self.recovery.apply(update, at("w1"))


def run(**changes: object) -> internal.Run:
    fields: dict[str, object] = {
        "request_id": KEY,
        "attempt": 2,
        "epoch": "100-a",
        "router_id": "gone",
        "reply": "_INBOX.client",
        "encoding": codec.Encoding.MSGPACK,
        "token_ids": PROMPT,
        "params": GenerationParams(max_tokens=9, seed=5, stream=False),
        "remaining_ms": 4_000.0,
        "age_ms": 1_000.0,
        "resume_from": internal.RunResume(
            token_ids=block_hash.pack_token_ids([7, 8]), cached_tokens=1, queue_ms=2.0, elapsed_ms=3_000.0
        ),
        "routing_options": messages.RoutingOptions(worker_id="w2"),
    }
    return internal.Run(**(fields | changes))  # type: ignore[arg-type]


def stream(**changes: object) -> internal.Guard:
    """Returns a worker's offer."""
    return internal.Guard(run=run(**changes), stream_no=4, hash_scheme="xxh3-64:0")


def request(**changes: object) -> internal.Guard:
    """Returns a router's offer of a request that no worker has accepted yet."""
    return internal.Guard(run=run(**({"epoch": "", "resume_from": None, "attempt": 0} | changes)))


ACCEPTED = internal.GuardReply(request_id=KEY, attempt=2, accepted=True, router_id="this-router", passes_on=True)
REFUSED = codec.replace(ACCEPTED, accepted=False)


async def test_offers_are_shared_between_routers_and_questions_are_not() -> None:
    testbed = await Testbed.opened()
    groups = {subject: group for subject, (_, group) in testbed.broker.callbacks.items()}
    shared = dict.fromkeys(NAMES.all_guards, "router")
    own = {NAMES.router("this-router"): "", NAMES.router_upload("this-router", "*"): ""}
    assert groups == shared | own
    await testbed.guardianship.close()
    assert testbed.broker.callbacks.keys() == {NAMES.router_upload("this-router", "*")}


# Questions of workers


async def test_each_question_is_answered_with_the_requests_that_are_not_here() -> None:
    testbed = await Testbed.opened()
    testbed.offer(stream())
    reply = NAMES.unguarded("demo", "w1", "this-router")
    subject = NAMES.router("this-router")
    for keys, unknown in (([KEY, "default:r2"], ["default:r2"]), ([KEY], []), (["b:r1"], ["b:r1"])):
        answers = testbed.send(subject, codec.encode(internal.GuardCheck(request_ids=keys)), reply)
        expected = [internal.Unguarded(router_id="this-router", request_ids=unknown, passes_on=True)]
        assert [_unguarded.decode(one) for one in answers] == expected


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "_INBOX.client",
        NAMES.unguarded("demo", "w1", "other-router"),
        NAMES.worker("demo", "w1", "control"),
        NAMES.events("demo", "w1"),
        "tokenbus.v1.worker.demo.w1.unguarded",
        "tokenbus.v1.worker.demo.w1.x.unguarded.this-router",
    ],
)
async def test_a_question_that_no_worker_asks_has_no_answer(reply: str) -> None:
    testbed = await Testbed.opened()
    check = codec.encode(internal.GuardCheck(request_ids=["default:r2"]))
    assert testbed.send(NAMES.router("this-router"), check, reply) == []


def confirmed(testbed: Testbed, *asked: tuple[str, int], epoch: str = "100-a") -> internal.Unguarded | None:
    """Asks like a worker of this version about streams, each with its attempt; returns None if there is no answer."""
    check = internal.GuardCheck(
        request_ids=[key for key, _ in asked], attempts=[attempt for _, attempt in asked], epoch=epoch, number=7
    )
    reply = NAMES.unguarded("demo", "w1", "this-router")
    answers = testbed.send(NAMES.router("this-router"), codec.encode(check), reply)
    return _unguarded.decode(*answers) if answers else None


async def test_an_answer_to_a_check_says_where_the_router_is_and_keeps_the_worker_from_being_given_up() -> None:
    testbed = await Testbed.opened()
    testbed.offer(stream())
    testbed.fleet.expire_leases(time.monotonic() + 100.0)
    assert known(testbed.fleet).lease_expired
    expected = internal.Unguarded(router_id="this-router", request_ids=[], passes_on=True, number=7, network="broker")
    assert confirmed(testbed, (KEY, 2)) == expected
    assert not known(testbed.fleet).lease_expired


async def test_a_worker_is_told_which_streams_have_moved_and_which_are_in_doubt() -> None:
    testbed = await Testbed.opened()
    testbed.offer(stream())
    for attempt, moved in ((1, {KEY: 1}), (2, {}), (3, {KEY: 3})):
        answer = confirmed(testbed, (KEY, attempt))
        assert answer is not None
        assert (answer.moved, answer.doubtful) == (moved, [])
    found = testbed.flights.find_flight(KEY)
    assert found is not None
    testbed.flights.reclaim(found)
    found.in_doubt = True
    for attempt, doubtful in ((2, [KEY]), (1, [])):
        answer = confirmed(testbed, (KEY, attempt))
        assert answer is not None
        assert answer.doubtful == doubtful
    found.in_doubt = False
    answer = confirmed(testbed, (KEY, 2))
    assert answer is not None
    assert (answer.moved, answer.doubtful) == ({}, [KEY]), "it waits for a worker, and may find this one"


async def test_a_worker_is_told_that_a_stream_has_moved_whose_end_was_at_another_one() -> None:
    testbed = await Testbed.opened()
    testbed.fleet.apply_card(card("w2"), 0.0)
    for name, entry in (("w2", events("w2", 0, finished=[KEY])), ("w1", events("w1", 1, finished=["default:r2"]))):
        assert testbed.fleet.apply_events("demo", entry, time.monotonic()) is not None, name
    answer = confirmed(testbed, (KEY, 1), ("default:r2", 1), ("default:r3", 1))
    assert answer is not None
    assert (answer.moved, answer.request_ids) == ({KEY: 1}, ["default:r2", "default:r3"])


async def test_a_check_of_another_epoch_confirms_nothing() -> None:
    testbed = await Testbed.opened()
    assert confirmed(testbed, (KEY, 2), epoch="99-a") is None


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", b'{"request_ids": []}'])
async def test_a_malformed_question_has_no_answer(payload: bytes) -> None:
    testbed = await Testbed.opened()
    reply = NAMES.unguarded("demo", "w1", "this-router")
    assert testbed.send(NAMES.router("this-router"), payload, reply) == []


# Offers of workers


async def test_a_stream_that_a_worker_offers_is_known_as_if_this_router_had_placed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 50.0)
    testbed = await Testbed.opened()
    assert testbed.offer(stream()) == ACCEPTED
    found = testbed.flights.find_flight(KEY)
    assert found is not None
    assert (found.worker_id, found.attempt, found.attempt_worker_id) == ("w1", 2, "w1")
    assert (found.model, found.tenant, found.reply, found.encoding) == (
        "demo",
        "default",
        "_INBOX.client",
        codec.Encoding.MSGPACK,
    )
    assert (found.prompt_ids, found.num_prompt_tokens) == (PROMPT, 3)
    assert (list(found.completion.token_ids), found.hash_scheme) == ([7, 8], "xxh3-64:0")
    assert (found.received_at, found.first_accepted_at, found.remaining_ms(51.0)) == (49.0, 47.0, 3_000.0)
    assert found.request.routing == messages.RoutingOptions(worker_id="w2")
    assert (found.request.max_tokens, found.request.seed, found.request.is_streamed) == (9, 5, False)
    resumed = found.completion.resume_from(0.0)
    assert resumed is not None
    assert (resumed.cached_tokens, resumed.queue_ms) == (1, 2.0)
    assert testbed.dispatcher.dispatched == []


async def test_tokens_behind_an_offer_are_those_of_the_stream_that_it_names() -> None:
    testbed = await Testbed.opened()
    testbed.offer(stream())
    testbed.hear(events("w1", 1, tokens=[(3, 90), (4, 91)]))
    found = testbed.flights.find_flight(KEY)
    assert found is not None
    assert list(found.completion.token_ids) == [7, 8, 91]


async def test_the_log_goes_on_while_an_offer_comes_in_parts_so_that_a_snapshot_has_the_latest_tokens() -> None:
    testbed = await Testbed.opened()
    assert testbed.offer_in_parts(stream()) == ACCEPTED
    adopted = testbed.flights.find_flight(KEY)
    assert adopted is not None
    assert (list(adopted.completion.token_ids), adopted.stream) == ([7, 8], None)
    assert testbed.worker.log.is_behind
    # a gap is no reason to refuse an offer in parts, and it is one to refuse any other
    assert testbed.offer_in_parts(stream(request_id="default:r2")) == codec.replace(ACCEPTED, request_id="default:r2")
    assert testbed.offer(stream(request_id="default:r3")) == codec.replace(REFUSED, request_id="default:r3")


@pytest.mark.parametrize("subject", [NAMES.guard("demo", "w2"), NAMES.guard("demo"), NAMES.guard("other", "w1")])
async def test_an_offer_in_parts_is_announced_by_the_worker_that_it_names(subject: str) -> None:
    testbed = await Testbed.opened()
    assert testbed.offer_in_parts(stream(), subject) is None
    assert testbed.parts.receiver.num_uploads == 0


@pytest.mark.parametrize("name", ["r1", "r2"])
async def test_a_request_without_a_deadline_has_none_here(name: str) -> None:
    testbed = await Testbed.opened()
    testbed.offer(stream(request_id=f"default:{name}", remaining_ms=None, age_ms=None))
    found = testbed.flights.find_flight(f"default:{name}")
    assert found is not None
    assert found.remaining_ms(1e9) is None


@pytest.mark.parametrize("is_named", [False, True])
async def test_this_router_continues_an_offered_stream_only_once_the_log_names_it(is_named: bool) -> None:
    testbed = await Testbed.opened()
    testbed.offer(stream())
    if is_named:
        testbed.hear(codec.replace(events("w1", 1), guardians={4: "this-router"}))
    found = testbed.flights.find_flight(KEY)
    (lost, _) = testbed.fleet.expire_leases(2.0)
    testbed.recovery.recover(lost, is_certain=False)
    await asyncio.sleep(0)
    assert testbed.dispatcher.continued == [found] * is_named
    assert len(testbed.flights) == is_named
    # whoever continues it finds out whether the worker is gone
    assert (testbed.fleet.find_worker(at("w1")) is lost) is is_named


async def test_a_stream_is_forgotten_once_the_log_names_another_router() -> None:
    testbed = await Testbed.opened()
    testbed.offer(stream())
    testbed.hear(codec.replace(events("w1", 1), guardians={3: "other", 4: "this-router"}))
    assert testbed.flights.find_flight(KEY) is not None
    testbed.hear(codec.replace(events("w1", 2), guardians={4: "other"}))
    assert len(testbed.flights) == 0


async def test_a_stream_that_is_offered_again_is_accepted_again() -> None:
    testbed = await Testbed.opened()
    assert testbed.offer(stream()) == ACCEPTED
    found = testbed.flights.find_flight(KEY)
    more = internal.RunResume(token_ids=block_hash.pack_token_ids([7, 8, 9]))
    assert testbed.offer(stream(resume_from=more)) == ACCEPTED
    assert testbed.flights.find_flight(KEY) is found
    assert found is not None
    assert list(found.completion.token_ids) == [7, 8]  # its log says the rest


async def test_another_client_s_request_with_the_same_id_is_not_taken_over() -> None:
    testbed = await Testbed.opened()
    testbed.offer(stream())
    assert testbed.offer(stream(reply="_INBOX.somebody-else")) == REFUSED
    assert testbed.hand_on(request(attempt=2, reply="_INBOX.somebody-else")) == REFUSED


async def test_a_stream_of_an_epoch_that_is_unknown_or_over_is_not_taken_over() -> None:
    testbed = await Testbed.opened()
    for epoch in ("99-z", "101-a", ""):
        assert testbed.offer(stream(epoch=epoch)) == REFUSED
    assert len(testbed.flights) == 0


async def test_a_stream_at_a_worker_whose_log_is_not_followed_is_not_taken_over() -> None:
    """Tokens of it may be missing here."""
    testbed = await Testbed.opened()
    testbed.fleet.mark_all_behind()
    assert testbed.offer(stream()) == REFUSED
    unknown = testbed.offer(stream(), NAMES.guard("demo", "w9"), NAMES.worker("demo", "w9", "guarded"))
    assert unknown == REFUSED
    assert len(testbed.flights) == 0


async def test_a_stream_at_a_worker_that_counts_as_lost_is_not_taken_over() -> None:
    testbed = await Testbed.opened()
    testbed.fleet.expire_leases(2.0)
    assert testbed.offer(stream()) == REFUSED
    assert len(testbed.flights) == 0


async def test_what_there_is_no_room_for_is_not_taken_over() -> None:
    testbed = await Testbed.opened(capacity_bytes=19)
    assert testbed.offer(stream()) == REFUSED  # 12 bytes of prompt and 8 of completion
    assert testbed.hand_on(request(attempt=2, token_ids=PROMPT * 2)) == REFUSED
    for number in range(3):
        assert testbed.offer(stream(request_id=f"default:{number}", resume_from=None)) is not None
    assert testbed.offer(stream(resume_from=None)) == REFUSED
    assert len(testbed.flights) == 3


@pytest.mark.parametrize(
    ("subject", "reply"),
    [
        (NAMES.guard("demo", "w1"), NAMES.worker("other", "w1", "guarded")),
        (NAMES.guard("demo", "w1"), NAMES.worker("demo", "w2", "guarded")),
        (NAMES.guard("demo", "w1"), NAMES.worker("demo", "w1", "control")),
        (NAMES.guard("demo", "w1"), "_INBOX.client"),
        (NAMES.guard("demo", "w1"), ""),
        (NAMES.guard("demo"), GUARDED),
        (NAMES.guard("demo"), ROUTER_INBOX),  # with the number of a stream
        ("tokenbus.v1.guard.=41.w1", "tokenbus.v1.worker.=41.w1.guarded"),
        ("tokenbus.v1.guard.demo.w=3", GUARDED),
    ],
)
async def test_an_offer_of_a_stream_by_anybody_but_its_worker_has_no_answer(subject: str, reply: str) -> None:
    testbed = await Testbed.opened()
    assert testbed.offer(stream(), subject, reply) is None
    assert len(testbed.flights) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"reply": ""},
        {"reply": "tokenbus.v1.cancel.r1"},
        {"reply": "_T_acme.client"},
        {"reply": "_INBOX"},
        {"request_id": "r1"},
        {"request_id": "default:r.1"},
        {"request_id": "a.b:r1"},
        {"router_id": ""},
        {"router_id": "r" * 129},
        {"attempt": -1},
        {"age_ms": float("nan")},
        {"token_ids": PROMPT[:-1]},
        {"resume_from": internal.RunResume(token_ids=b"12345")},
        {"resume_from": internal.RunResume(token_ids=b"")},
        {"resume_from": internal.RunResume(token_ids=b"1234", elapsed_ms=-1.0)},
        {"params": GenerationParams(temperature=-1.0)},
        {"routing_options": messages.RoutingOptions(policy="nobody's")},
    ],
    ids=str,
)
async def test_a_request_that_no_router_can_have_placed_is_not_taken_over(changes: dict[str, object]) -> None:
    testbed = await Testbed.opened()
    assert testbed.offer(stream(**changes)) is None
    assert testbed.hand_on(request(**changes)) is None
    assert (len(testbed.flights), testbed.dispatcher.dispatched) == (0, [])


async def test_each_tenant_is_answered_in_its_own_inbox_only() -> None:
    testbed = await Testbed.opened()
    for tenant, key, is_taken in (("acme", "acme:r1", True), ("acme", "default:r2", False)):
        reply = testbed.offer(stream(request_id=key, reply=f"_T_{tenant}.client"))
        assert (reply is not None) is is_taken


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", codec.encode(internal.GuardCheck(request_ids=[]))])
async def test_a_malformed_offer_has_no_answer(payload: bytes) -> None:
    testbed = await Testbed.opened()
    assert testbed.send(NAMES.guard("demo", "w1"), payload, GUARDED) == []
    assert testbed.send(NAMES.guard("demo"), payload, ROUTER_INBOX) == []


# Offers of routers


async def test_a_request_that_another_router_hands_on_is_dispatched_here() -> None:
    testbed = await Testbed.opened()
    given = internal.RunResume(token_ids=block_hash.pack_token_ids([7]), elapsed_ms=3_000.0)
    guard = codec.replace(request(attempt=2, resume_from=given), hash_scheme="xxh3-64:0")
    assert testbed.hand_on(guard) == ACCEPTED
    await asyncio.sleep(0)
    (one,) = testbed.dispatcher.dispatched
    assert (one.key, one.worker_id, one.attempt, one.is_named) == (KEY, None, 2, True)
    assert (one.prompt_ids, list(one.completion.token_ids), one.hash_scheme) == (PROMPT, [7], "xxh3-64:0")
    assert one.has_begun
    assert testbed.hand_on(guard) == ACCEPTED
    await asyncio.sleep(0)
    assert testbed.dispatcher.dispatched == [one]


@pytest.mark.parametrize("reply", ["", GUARDED, "tokenbus.v1.cancel.r1", "_INBOXES.a", "_INBOX"])
async def test_a_request_that_no_router_hands_on_has_no_answer(reply: str) -> None:
    testbed = await Testbed.opened()
    assert testbed.offer(request(), NAMES.guard("demo"), reply) is None
    assert len(testbed.flights) == 0


async def test_a_request_that_no_worker_has_accepted_yet_has_not_begun_here_either() -> None:
    testbed = await Testbed.opened()
    assert testbed.hand_on(request()) is not None
    await asyncio.sleep(0)
    assert not testbed.dispatcher.dispatched[0].has_begun


async def test_a_request_is_not_taken_over_where_only_a_stream_that_nobody_may_act_on_has_its_id() -> None:
    """It would never be placed."""
    testbed = await Testbed.opened()
    testbed.offer(stream())
    assert testbed.hand_on(request(attempt=2)) == REFUSED
    testbed.hear(codec.replace(events("w1", 1), guardians={4: "this-router"}))
    assert testbed.hand_on(request(attempt=2)) == ACCEPTED


# Handing over


def waiting(**changes: object) -> Flight:
    """Returns a request of this router that no worker has."""
    one = flight("r1", received_at=0.0, max_tokens=9, seed=5, timeout_ms=1e9)
    one.prompt_ids, one.attempt, one.hash_scheme = PROMPT, 2, "xxh3-64:0"
    for name, value in changes.items():
        setattr(one, name, value)
    return one


@pytest.mark.parametrize("accepted", [True, False])
async def test_a_request_is_offered_to_one_router_which_may_accept_it(accepted: bool) -> None:
    testbed = Testbed()
    await testbed.parts.open()
    testbed.broker.answer = lambda guard: codec.encode(codec.replace(ACCEPTED, accepted=accepted))
    assert await testbed.guardianship.offer(waiting()) is accepted
    ((subject, guard),) = testbed.broker.asked
    assert (subject, guard.stream_no, guard.hash_scheme) == (NAMES.guard("demo"), None, "xxh3-64:0")
    assert (guard.run.request_id, guard.run.attempt, guard.run.epoch, guard.run.router_id) == (
        KEY,
        2,
        "",
        "this-router",
    )
    other = await Testbed.opened()
    assert other.hand_on(guard) == ACCEPTED


@pytest.mark.parametrize(
    "problem", [bus.NoRespondersError(), bus.PayloadTooLargeError(), TimeoutError(), ConnectionError(), None]
)
async def test_without_a_proper_answer_nobody_has_taken_a_request_over(problem: Exception | None) -> None:
    def fail(guard: internal.Guard) -> bytes:
        if problem is not None:
            raise problem
        return b"\xc1"

    testbed = Testbed()
    await testbed.parts.open()
    testbed.broker.answer = fail
    assert not await testbed.guardianship.offer(waiting())
    assert len(testbed.broker.asked) == 1


async def test_a_request_without_its_prompt_is_offered_to_nobody() -> None:
    testbed = Testbed()
    assert not await testbed.guardianship.offer(waiting(prompt_ids=None))
    assert testbed.broker.asked == []


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_cancel_that_comes_while_a_request_is_handed_over_follows_it(is_cancelled: bool) -> None:
    """The other router may have read it before the offer."""
    testbed, one = Testbed(), waiting()

    def accept(guard: internal.Guard) -> bytes:
        one.cancelled = is_cancelled
        return codec.encode(ACCEPTED)

    await testbed.parts.open()
    testbed.broker.answer = accept
    assert await testbed.guardianship.offer(one)
    assert [message.subject for message in testbed.broker.take()] == [NAMES.cancel("r1", model="demo")] * is_cancelled
