"""A large message goes from its sender to its receiver, or the sender learns why not; over a simulated broker."""

import asyncio
import gc
from collections.abc import Iterator

import pytest
from nats.aio.msg import Msg

from tests.sim.network import Broker
from tests.sim.sim_bus import SimBus
from tests.sim.world import Process, World, world
from tokenbus.protocol.bus.bus import NoRespondersError, Outgoing
from tokenbus.protocol.bus.reply_inbox import ReplyInbox
from tokenbus.protocol.parts import assembly
from tokenbus.protocol.parts.assembly import UploadLimits
from tokenbus.protocol.parts.receiver import PartsReceiver
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.wire import codec, errors, limits, messages
from tokenbus.protocol.wire.errors import Code

BODY = bytes(range(256)) * 40
"""11 parts of a broker that allows 1,000 bytes beside headers."""
_answers = codec.Decoder(messages.UploadReply)


class Stage:
    """A sender, and a receiver in a queue group."""

    def __init__(self, made: World) -> None:
        self.world = made
        self.broker = Broker(made)
        self.process = made.process("sender")
        self.bus = self.connect(self.process)
        self.sender = PartsSender(self.bus, ReplyInbox(self.bus, "answer.{}".format), timeout_s=1.0, tries=2)
        self.whole: list[Msg] = []
        self.outcomes: list[str] = []
        self.receivers = [self.receive("r0")]
        self.parts: list[Msg] = []
        self.process.do(self.bus.subscribe("parts.>", self.parts.append))
        made.run(0.1)

    def connect(self, process: Process) -> SimBus:
        bus = SimBus(process, self.broker)
        bus.max_payload = limits.MESSAGE_RESERVE_BYTES + 1_000
        return bus

    def receive(self, name: str) -> PartsReceiver:
        """Starts a receiver, one of those among which messages are shared."""
        process = self.world.process(name)
        bus = self.connect(process)
        receiver = PartsReceiver(
            bus,
            lambda owner, upload_id: f"parts.{name}.{upload_id}",
            UploadLimits(20_000, 20_000, 20_000),
            lambda part: part.reply.startswith("answer."),
            on_ended=self.outcomes.append,
        )

        def on_message(message: Msg) -> None:
            try:
                if not receiver.announced(message, "owner", self.whole.append):
                    self.whole.append(message)
            except errors.RequestError as error:
                bus.publish(message.reply, codec.encode(messages.UploadReply(error=error.error)))

        process.do(receiver.open())
        process.do(bus.subscribe("work", on_message, "group"))
        return receiver

    async def send(self, body: bytes = BODY, subject: str = "work") -> Outgoing:
        last = await self.sender.stage(Outgoing(subject, body, "answer.whole", {"traceparent": "t"}))
        self.bus.publish(last.subject, last.payload, last.reply, last.headers)
        return last

    def refusal(self, body: bytes = BODY, subject: str = "work") -> errors.Error:
        with pytest.raises(errors.RequestError) as refused:
            self.process.do(self.send(body, subject))
        return refused.value.error

    def announce(self, size: str) -> messages.UploadReply:
        return self.ask("work", b"", {assembly.SIZE: size})

    def ask(self, subject: str, part: bytes, sent: dict[str, str]) -> messages.UploadReply:
        """Sends one message as anybody could, and returns the answer."""
        heard: list[Msg] = []
        subscription = self.process.do(self.bus.subscribe("answer.raw", heard.append))
        self.process.call(self.bus.publish, subject, part, "answer.raw", sent)
        self.world.run(0.1)
        self.process.do(self.bus.unsubscribe(subscription))
        (answer,) = heard
        return _answers.decode(answer.data)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with world(seed=3) as made:
        yield Stage(made)
        for process in made.processes:
            assert process.faults == [], process


def test_a_message_that_fits_is_sent_as_it_is(stage: Stage) -> None:
    body = bytes(1_000)
    last = stage.process.do(stage.send(body))
    stage.world.run(0.1)
    assert last == Outgoing("work", body, "answer.whole", {"traceparent": "t"})
    assert [(one.data, one.reply, one.headers) for one in stage.whole] == [(body, "answer.whole", {"traceparent": "t"})]
    assert stage.parts == []


@pytest.mark.parametrize("size", [1_001, 2_000, 2_001, len(BODY)])
def test_a_message_in_parts_arrives_as_if_it_had_come_in_one(stage: Stage, size: int) -> None:
    stage.process.do(stage.send(BODY[:size]))
    stage.world.run(0.1)
    (whole,) = stage.whole
    assert (whole.subject, whole.data, whole.reply) == ("work", BODY[:size], "answer.whole")
    assert whole.headers == {"traceparent": "t"} | (codec.content_headers(codec.Encoding.MSGPACK) or {})
    assert stage.outcomes == ["complete"]
    assert len(stage.parts) == -(-size // 1_000)
    assert max(len(part.data) for part in stage.parts) == 1_000
    assert (stage.receivers[0].num_uploads, stage.receivers[0].held_bytes) == (0, 0)


def test_of_an_announcement_only_the_headers_are_kept_that_are_read_later(stage: Stage) -> None:
    sent = {assembly.SIZE: "2", "Other": "x" * 100_000, "Tracestate": "y" * 100_000, "Traceparent": "t"}
    answer = stage.ask("work", b"", sent)
    assert answer.upload is not None
    stage.process.call(stage.bus.publish, answer.upload, b"ab", "answer.raw", {assembly.OFFSET: "0"})
    stage.world.run(0.1)
    (whole,) = stage.whole
    assert whole.headers == {"traceparent": "t"} | (codec.content_headers(codec.Encoding.MSGPACK) or {})


def test_before_the_last_part_the_receiver_has_no_message(stage: Stage) -> None:
    stage.process.do(stage.sender.stage(Outgoing("work", BODY, "answer.whole")))
    stage.world.run(0.1)
    assert stage.whole == []


def test_all_parts_of_a_message_reach_the_one_receiver_of_its_announcement(stage: Stage) -> None:
    stage.receivers.append(stage.receive("r1"))
    for _ in range(20):
        stage.process.do(stage.send())
    stage.world.run(0.1)
    assert [one.data for one in stage.whole] == [BODY] * 20
    assert {part.subject.split(".")[1] for part in stage.parts} == {"r0", "r1"}


def test_messages_that_are_sent_at_the_same_time_are_kept_apart(stage: Stage) -> None:
    bodies = [bytes([number]) * (1_500 + number) for number in range(12)]

    async def send_all() -> None:
        await asyncio.gather(*map(stage.send, bodies))

    stage.process.do(send_all())
    stage.world.run(0.1)
    assert sorted(one.data for one in stage.whole) == bodies


def test_a_part_whose_answer_is_lost_is_sent_again_and_counts_once(stage: Stage) -> None:
    answer, dropped = stage.sender._replies._take, []

    def lose_one(message: Msg) -> None:
        if len(stage.parts) == 3 and not dropped:
            dropped.append(message)
        else:
            answer(message)

    stage.sender._replies._take = lose_one  # type: ignore[method-assign]
    stage.process.do(stage.send())
    stage.world.run(0.1)
    assert len(dropped) == 1
    assert [one.data for one in stage.whole] == [BODY]
    assert len(stage.parts) == 12


def test_without_a_receiver_the_sender_learns_that_nobody_listens(stage: Stage) -> None:
    with pytest.raises(NoRespondersError):
        stage.process.do(stage.send(subject="nobody"))


def test_a_receiver_that_dies_in_the_middle_loses_the_upload_and_another_one_takes_it_next_time(stage: Stage) -> None:
    first = stage.world.processes[-1]
    sending = stage.process.spawn(stage.send())
    stage.world.run_until(lambda: len(stage.parts) >= 5)
    first.kill()
    stage.receive("r1")
    stage.world.run(5.0)
    error = sending.exception()
    assert isinstance(error, errors.RequestError)
    assert (error.error.code, error.error.retryable) == (Code.UPLOAD_LOST, True)
    stage.process.do(stage.send())
    stage.world.run(0.1)
    assert [one.data for one in stage.whole] == [BODY]


def test_a_receiver_that_stops_has_the_message_sent_again(stage: Stage) -> None:
    answer = stage.announce("3000")
    assert answer.upload is not None
    stage.receivers[0].stop()
    refused = stage.ask(answer.upload, b"x", {assembly.OFFSET: "0"}).error
    assert refused is not None
    assert refused.code is Code.UPLOAD_LOST
    assert stage.refusal().code is Code.SHUTTING_DOWN


def test_a_message_above_the_limit_is_refused_before_any_part_is_sent(stage: Stage) -> None:
    assert stage.refusal(bytes(20_001)).code is Code.PAYLOAD_TOO_LARGE
    assert stage.parts == []


def test_a_sender_that_is_cancelled_gives_its_upload_up(stage: Stage) -> None:
    sending = stage.process.spawn(stage.send())
    stage.world.run_until(lambda: len(stage.parts) >= 5)
    stage.process.call(sending.cancel)
    stage.world.run(0.1)
    assert stage.outcomes == ["given_up"]
    assert stage.receivers[0].held_bytes == 0


def test_an_upload_whose_sender_is_gone_expires(stage: Stage) -> None:
    answer = stage.announce("3000")
    assert answer.upload is not None
    assert stage.ask(answer.upload, bytes(900), {assembly.OFFSET: "0"}).received == 900
    assert stage.receivers[0].held_bytes == 900
    stage.world.run(limits.UPLOAD_IDLE_S + 1.5)
    assert stage.outcomes == ["expired"]
    assert (stage.receivers[0].num_uploads, stage.receivers[0].held_bytes) == (0, 0)
    refused = stage.ask(answer.upload, b"x", {assembly.OFFSET: "900"}).error
    assert refused is not None
    assert refused.code is Code.UPLOAD_LOST


@pytest.mark.parametrize("size", ["0", "-1", "many", "20001", ""])
def test_a_size_that_can_not_be_is_refused(stage: Stage, size: str) -> None:
    answer = stage.announce(size)
    assert answer.upload is None
    assert answer.error is not None
    assert stage.receivers[0].num_uploads == 0


@pytest.mark.parametrize("sent", [{}, {assembly.OFFSET: "x"}, {assembly.OFFSET: "-1"}])
def test_a_part_without_an_offset_is_refused_and_harms_nothing(stage: Stage, sent: dict[str, str]) -> None:
    answer = stage.announce("3000")
    assert answer.upload is not None
    assert stage.ask(answer.upload, b"x", sent).error is not None
    assert stage.ask(answer.upload, b"x", {assembly.OFFSET: "0"}).received == 1


def test_nothing_is_published_to_a_reply_subject_that_may_not_be_answered(stage: Stage) -> None:
    answer = stage.announce("3000")
    assert answer.upload is not None
    heard: list[Msg] = []
    stage.process.do(stage.bus.subscribe("secret.*", heard.append))
    stage.process.call(stage.bus.publish, answer.upload, b"x", "secret.a", {assembly.OFFSET: "0"})
    stage.process.call(stage.bus.publish, "parts.r0.none", b"x", "secret.b", {assembly.OFFSET: "0"})
    stage.world.run(0.1)
    assert heard == []


def test_a_sender_that_could_not_subscribe_once_tries_again_with_the_next_message(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ConnectionError("there is no broker")

    with monkeypatch.context() as broken:
        broken.setattr(stage.bus, "subscribe", fail)
        with pytest.raises(ConnectionError):
            stage.process.do(stage.send())
    stage.process.do(stage.send())
    stage.world.run(0.1)
    assert [message.data for message in stage.whole] == [BODY]


def test_an_answer_that_fails_to_come_after_its_sender_was_cancelled_is_no_failure(stage: Stage) -> None:
    stage.process.do(stage.bus.subscribe("silent", lambda message: None))
    sending = stage.process.spawn(stage.send(subject="silent"))
    stage.world.run(0.1)
    sending.cancel()
    stage.world.run(2.0)
    assert sending.cancelled()
    gc.collect()
    assert stage.process.faults == []
