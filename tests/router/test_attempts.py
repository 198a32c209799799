"""An attempt is taken back from its worker, or taken over with all its tokens, before there may be another one."""

import asyncio
from collections.abc import Callable

import pytest
from nats.aio.msg import Msg

from tests.router.builders import at, card, events, fleet_of, flight, known
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.bus.bus import Outgoing
from tokenbus.protocol.wire import block_hash, codec, errors, internal, limits, messages, subjects
from tokenbus.router.placement.placement import Placement, PlacementRequest
from tokenbus.router.requests.attempts import Attempts, Revocation
from tokenbus.router.requests.flights.flight import Flights
from tokenbus.router.requests.flights.worker_client import Operation
from tokenbus.router.requests.recovery import Recovery
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.workers.worker import Worker

KEY = "default:r1"
LEAVING = messages.WorkerState.LEAVING
FIRST = internal.FirstToken(stream_no=1, cached_tokens=1, queue_ms=2.0, prefill_ms=3.0)
REFUSED = internal.TakeReply(ok=False, epoch="100-a")
Answer = Callable[[], codec.Message]


def taken(num_tokens: int, *token_ids: int, epoch: str = "100-a") -> internal.TakeReply:
    """Returns the reply of a worker that gives up a stream."""
    packed = block_hash.pack_token_ids(token_ids)
    return internal.TakeReply(ok=True, epoch=epoch, num_tokens=num_tokens, token_ids=packed, first_token=FIRST)


class Testbed:
    """A request with tokens 5 and 6 at worker w1, which leaves, and the worker's answers, one after another.

    It is its own worker client."""

    __test__ = False

    def __init__(self, *answers: Answer | codec.Message) -> None:
        self.fleet = fleet_of(card("w1"))
        self.flights = Flights(8, 1_000)
        self.asked: list[tuple[str, codec.Message]] = []
        self._answers = list(answers)
        names = subjects.Subjects()
        self.attempts = Attempts(RecordingBus(), names, self, self.fleet, self.flights, "router-1")  # type: ignore[arg-type]
        self._recovery = Recovery(self.fleet, self.flights, self.attempts, None, RouterMetrics(), "router-1")  # type: ignore[arg-type]
        self.flight = flight("r1")
        self.flights.add(self.flight, 10)
        self.flights.set_prompt_ids(self.flight, b"1234")
        self.flights.start_attempt(self.flight, "w1")
        self.hear(events(seq=0, started=(KEY,), tokens=[(1, 5), (1, 6)]))
        self.hear(events(seq=1, state=LEAVING))

    def hear(self, entry: internal.Events) -> None:
        update = self.fleet.apply_events("demo", entry, 0.0)
        assert update is not None
        self._recovery.apply(update, at("w1"))

    async def call(
        self, card: messages.Card, op: Operation, message: codec.Message, timeout_s: float, headers: object = None
    ) -> codec.Message:
        self.asked.append((op.name, message))
        answer = self._answers.pop(0)
        return answer() if callable(answer) else answer

    @property
    def sender(self) -> "Testbed":
        return self

    def fits(self, payload: bytes) -> bool:
        return True

    def prepare(self, card: messages.Card, op: Operation, message: codec.Message, headers: object) -> Outgoing:
        self.asked.append((op.name, message))
        return Outgoing(op.name, b"")

    def send(self, staged: Outgoing, timeout_s: float) -> asyncio.Future[Msg]:
        reply: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        answer = self._answers.pop(0)
        try:
            data = codec.encode(answer() if callable(answer) else answer)
        except TimeoutError as error:
            reply.set_exception(error)
        else:
            reply.set_result(Msg(_client=None, data=data))  # type: ignore[arg-type]
        return reply

    async def read(self, card: messages.Card, op: Operation, reply: Msg) -> codec.Message:
        return op.replies.decode(reply.data)

    async def run(self, placement: Placement) -> errors.Error | None:
        return await self.attempts.finish(self.flight, self.attempts.begin(self.flight, placement))

    async def revoke(self, *, takes: bool) -> Revocation:
        return await self.attempts.revoke(self.flight, known(self.fleet), takes=takes)

    @property
    def tokens(self) -> list[int]:
        return list(self.flight.completion.token_ids)


def no_answer() -> codec.Message:
    raise TimeoutError


async def test_a_stream_is_taken_with_the_tokens_that_are_not_known() -> None:
    testbed = Testbed(taken(4, 7, 8))
    assert await testbed.revoke(takes=True) is Revocation.DROPPED
    take = internal.Take(request_id=KEY, attempt=1, known_tokens=2, router_id="router-1")
    assert testbed.asked == [("take", take)]
    assert testbed.tokens == [5, 6, 7, 8]
    assert testbed.flight.completion.first_token == FIRST
    assert (testbed.flight.worker_id, testbed.flight.in_doubt) == (None, False)


async def test_tokens_that_come_while_a_stream_is_taken_count_once() -> None:
    testbed = Testbed()

    def answer() -> codec.Message:
        testbed.hear(events(seq=2, state=LEAVING, tokens=[(1, 7)]))
        return taken(4, 7, 8)

    testbed._answers.append(answer)
    assert await testbed.revoke(takes=True) is Revocation.DROPPED
    testbed.hear(events(seq=3, state=LEAVING, tokens=[(1, 8)]))
    assert testbed.tokens == [5, 6, 7, 8]
    assert testbed.flight.stream is None


async def test_an_earlier_answer_that_is_repeated_is_understood() -> None:
    testbed = Testbed(no_answer, taken(3, 6, 7))
    assert await testbed.revoke(takes=True) is Revocation.DROPPED
    assert testbed.tokens == [5, 6, 7]


@pytest.mark.parametrize("answer", [taken(4, 8), taken(1), codec.replace(taken(4), token_ids=b"12345")])
async def test_a_stream_of_which_tokens_are_missing_ends(answer: internal.TakeReply) -> None:
    testbed = Testbed(answer)
    with pytest.raises(errors.RequestError) as refused:
        await testbed.revoke(takes=True)
    assert refused.value.error.code is errors.Code.WORKER_LOST


async def test_a_worker_that_refuses_keeps_the_stream_and_its_log_is_read_again() -> None:
    testbed = Testbed(REFUSED)
    assert await testbed.revoke(takes=True) is Revocation.KEPT
    assert testbed.flight.worker_id == "w1"
    assert testbed.tokens == [5, 6]
    assert known(testbed.fleet).log.is_behind


async def test_what_another_epoch_gives_up_is_not_believed() -> None:
    testbed = Testbed()

    def answer() -> codec.Message:
        testbed.fleet.apply_card(card("w1", epoch="101-a"), 0.0)
        return taken(4, 7, 8, epoch="101-a")

    testbed._answers.append(answer)
    assert await testbed.revoke(takes=True) is Revocation.LOST
    assert testbed.tokens == [5, 6]


@pytest.mark.parametrize("takes", [False, True])
async def test_a_lost_worker_stays_lost_while_its_successor_loads_and_has_no_card(takes: bool) -> None:
    reply = taken(4, 7, 8, epoch="101-a") if takes else internal.ControlReply(ok=True, epoch="101-a")
    testbed = Testbed(reply)
    assert testbed.fleet.expire_leases(limits.WORKER_LOST_AFTER_S)
    assert await testbed.revoke(takes=takes) is Revocation.LOST
    assert len(testbed.asked) == 1
    assert testbed.tokens == [5, 6]


async def test_an_answer_of_another_epoch_does_not_keep_a_silent_worker_alive() -> None:
    """A successor that loads answers again and again, and the lease of the dead one must end in spite of it."""
    testbed = Testbed()

    def answer() -> codec.Message:
        if len(testbed.asked) == 3:
            testbed.fleet.expire_leases(limits.WORKER_LOST_AFTER_S)
        return internal.ControlReply(ok=True, epoch="101-a")

    testbed._answers += [answer] * 3
    assert await testbed.revoke(takes=False) is Revocation.LOST
    assert len(testbed.asked) == 3


async def test_a_run_without_an_answer_is_dropped_even_if_its_worker_leaves() -> None:
    """A worker that never got it could not give it up, and would seem to have ended it."""
    testbed = Testbed(no_answer, internal.ControlReply(ok=True, epoch="100-a"))
    placement = Placement(known(testbed.fleet), "kv")
    testbed.fleet.book(at("w1"), PlacementRequest(KEY, 1), 0.0)
    refusal = await testbed.run(placement)
    assert refusal
    assert refusal.code is errors.Code.NO_WORKER
    assert [name for name, _ in testbed.asked] == ["run", "control"]
    assert testbed.flight.worker_id is None


async def test_a_run_that_is_being_dropped_is_not_taken_once_its_worker_leaves() -> None:
    """The lost reply may have said that it was dropped."""
    testbed = Testbed(no_answer, internal.ControlReply(ok=True, epoch="100-a"))
    worker = known(testbed.fleet)
    worker.state = messages.WorkerState.READY

    def lose() -> codec.Message:
        testbed.hear(events(seq=2, state=LEAVING))
        raise TimeoutError

    testbed._answers[0] = lose
    assert await testbed.revoke(takes=False) is Revocation.DROPPED
    assert [name for name, _ in testbed.asked] == ["control", "control"]


async def test_a_run_names_the_worker_from_which_blocks_may_be_fetched_and_its_epoch() -> None:
    testbed = Testbed(internal.RunReply(accepted=True))
    holder = Worker(card("w2", epoch="7-b"), 0.0)
    await testbed.run(Placement(known(testbed.fleet), "kv", fetch_from=holder, fetch_blocks=9))
    (_, run), *_ = testbed.asked
    assert isinstance(run, internal.Run)
    assert run.fetch_from == internal.FetchSource(worker_id="w2", epoch="7-b")
