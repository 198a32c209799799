"""The outbox publishes in the order that the wire promises, and nothing that the broker would not take."""

import msgspec
import pytest

from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.engines import thread_engine
from tokenbus.protocol.bus.bus import OutboundBufferLimitError
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker import contract
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.outbox import Outbox
from tokenbus.worker.frontend.metrics import ReplicaMetrics, WorkerMetrics
from tokenbus.worker.streams.request_telemetry import RequestTelemetry
from tokenbus.worker.streams.stream import Stream

TIMINGS = messages.Timings(queue_ms=0, prefill_ms=0, ttft_ms=0, decode_ms=0, total_ms=0)
_events = codec.Decoder(internal.Events)
_chunks = codec.Decoder(messages.Chunk)


class Wire:
    """Keeps what is published instead of sending it."""

    def __init__(self, max_payload: int) -> None:
        self.max_payload = max_payload
        self.is_busy = False
        self.published: list[tuple[str, bytes, dict[str, str]]] = []

    def publish(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        if self.is_busy:
            raise OutboundBufferLimitError("too much is waiting")
        self.published.append((subject, payload, headers or {}))


class Sender:
    """An outbox and its announcer on one wire, with an engine that serves."""

    def __init__(self, max_payload: int = 1_000_000) -> None:
        self.wire = Wire(max_payload)
        self.announcer = Announcer(self.wire, subjects.Subjects(), "demo", "w1")  # type: ignore[arg-type]
        metrics = ReplicaMetrics(WorkerMetrics(), "demo", "w1")
        telemetry = RequestTelemetry(metrics, tracing.NoopTracer(), "demo", "w1")
        self.outbox = Outbox(self.wire, self.announcer, telemetry)  # type: ignore[arg-type]
        self.announcer.engine_started(thread_engine(lambda _: ArithmeticRunner()), make_config(), None)
        self.wire.published.clear()

    def published(self) -> list[messages.Chunk | internal.Events]:
        """Everything published, in order, and forgets it."""
        published = [
            _events.decode(payload) if ".events." in subject else _chunks.decode(payload, codec.Encoding.JSON)
            for subject, payload, _ in self.wire.published
        ]
        self.wire.published.clear()
        return published


def stream(name: str = "r1", **params: object) -> Stream:
    run = internal.Run(
        request_id=f"default:{name}",
        attempt=0,
        epoch="1-a",
        router_id="router",
        reply=f"_INBOX.{name}",
        encoding=codec.Encoding.JSON,
        token_ids=b"",
        params=GenerationParams(**params),  # type: ignore[arg-type]
    )
    return Stream(run, "demo", "w1", now=0.0)


def output(text: str, token_id: int = 1, *, last: bool = False) -> contract.Output:
    plain = contract.Output(token_ids=[token_id], text=text)
    if not last:
        return plain
    usage = messages.Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2, cached_tokens=0)
    return msgspec.structs.replace(plain, finish_reason=messages.FinishReason.LENGTH, usage=usage, timings=TIMINGS)


async def test_an_event_announces_a_first_token_once_and_before_its_chunk() -> None:
    sender, one, two = Sender(), stream("r1"), stream("r2")
    sender.outbox.put_head(one, 1.0)
    sender.outbox.put(one, output("a"), 1.0)
    sender.outbox.put(two, output("b"), 1.0)
    sender.outbox.flush()
    events, *chunks = sender.published()
    assert isinstance(events, internal.Events)
    assert events.first_token_sent == ["default:r1", "default:r2"]
    assert [chunk.id for chunk in chunks if isinstance(chunk, messages.Chunk)] == ["r1", "r1", "r2"]
    sender.outbox.put(one, output("c"), 2.0)
    sender.outbox.flush()
    (chunk,) = sender.published()
    assert isinstance(chunk, messages.Chunk)


async def test_a_head_is_not_a_first_token() -> None:
    sender, one = Sender(), stream()
    sender.outbox.put_head(one, 3.0)
    sender.outbox.flush()
    (head,) = sender.published()
    assert isinstance(head, messages.Chunk)
    assert (one.first_token_sent, one.last_chunk_at) == (False, 3.0)


async def test_changed_blocks_are_published_before_the_chunks_of_their_step() -> None:
    sender, one = Sender(), stream()
    one.first_token_sent = True
    sender.announcer.blocks_changed([], [(1, 2), (2, 3), (2, 4)])
    sender.outbox.put(one, output("a"), 1.0)
    sender.outbox.flush()
    events, chunk = sender.published()
    assert isinstance(events, internal.Events)
    assert isinstance(chunk, messages.Chunk)
    stored = [internal.BlockRun(parent=1, hashes=[2, 3]), internal.BlockRun(parent=2, hashes=[4])]
    assert (events.removed, events.stored) == ([], stored)
    sender.announcer.blocks_changed([4], [])
    sender.outbox.put(one, output("b"), 1.0)
    sender.outbox.flush()
    events, chunk = sender.published()
    assert isinstance(events, internal.Events)
    assert (events.removed, events.stored) == ([4], [])


async def test_an_event_announces_the_end_of_a_stream_after_its_terminal() -> None:
    sender, one = Sender(), stream()
    sender.outbox.put(one, output("a", last=True), 1.0)
    sender.outbox.flush()
    before, terminal, after = sender.published()
    assert isinstance(before, internal.Events)
    assert isinstance(terminal, messages.Chunk)
    assert isinstance(after, internal.Events)
    assert (before.finished, terminal.finish_reason, after.finished) == ([], "length", ["default:r1"])
    assert after.seq == before.seq + 1


async def test_nothing_is_published_before_the_flush_or_twice() -> None:
    sender = Sender()
    sender.outbox.put(stream(), output("a"), 1.0)
    assert sender.published() == []
    sender.outbox.flush()
    assert len(sender.published()) == 2
    sender.outbox.flush()
    assert sender.published() == []


@pytest.mark.parametrize(("spare_bytes", "fits"), [(0, True), (-1, False)])
async def test_a_terminal_that_just_fits_is_sent_and_one_byte_more_makes_it_an_error(
    spare_bytes: int, fits: bool
) -> None:
    whole = stream(stream=False)
    size = len(codec.encode(_terminal_of(stream(stream=False), "x" * 500), codec.Encoding.JSON))
    sender = Sender(max_payload=size + limits.MESSAGE_RESERVE_BYTES + spare_bytes)
    whole.created = 1_000_000_000
    sender.outbox.put(whole, output("x" * 500, last=True), 1.0)
    sender.outbox.flush()
    headers = sender.wire.published[-2][2]
    terminal = sender.published()[-2]
    assert isinstance(terminal, messages.Chunk)
    if fits:
        assert (terminal.text, terminal.finish_reason, headers) == ("x" * 500, "length", {})
    else:
        assert (terminal.text, terminal.finish_reason) == ("", "error")
        assert terminal.error
        assert terminal.error.code is errors.Code.PAYLOAD_TOO_LARGE
        assert headers == codec.error_headers(terminal.error)


def _terminal_of(one: Stream, text: str) -> messages.Chunk:
    one.created = 1_000_000_000
    chunk = one.chunk(output(text, last=True))
    assert chunk is not None
    return chunk


async def test_a_chunk_that_does_not_fit_ends_its_stream_and_nothing_follows() -> None:
    sender, one, other = Sender(max_payload=limits.MESSAGE_RESERVE_BYTES + 700), stream("r1"), stream("r2")
    cut: list[Stream] = []
    sender.outbox.on_truncated = cut.append
    for text in ("a", "x" * 800, "c"):
        sender.outbox.put(one, output(text), 1.0)
        sender.outbox.put(other, output("o"), 1.0)
    sender.outbox.flush()
    published = sender.published()
    mine = [chunk for chunk in published if isinstance(chunk, messages.Chunk) and chunk.id == "r1"]
    assert [(chunk.offset, chunk.tokens, chunk.finish_reason) for chunk in mine] == [(0, 1, None), (1, 1, "error")]
    terminal = mine[-1]
    assert terminal.error
    assert terminal.usage
    assert terminal.timings
    assert (terminal.error.code, terminal.worker_id) == (errors.Code.PAYLOAD_TOO_LARGE, "w1")
    assert terminal.usage.completion_tokens == 2
    assert cut == [one]
    assert sum(isinstance(chunk, messages.Chunk) and chunk.id == "r2" for chunk in published) == 3
    assert isinstance(published[-1], internal.Events)
    assert published[-1].finished == ["default:r1"]
    sender.outbox.replay(one, 0, 2.0)
    again = [chunk for chunk in sender.published() if isinstance(chunk, messages.Chunk)]
    assert [(chunk.offset, chunk.finish_reason) for chunk in again] == [(0, None), (1, "error")]


async def test_an_error_terminal_has_its_error_in_headers_too() -> None:
    sender, one = Sender(), stream()
    error = errors.make_error(errors.Code.WORKER_LOST)
    ended = msgspec.structs.replace(output("", last=True), finish_reason=messages.FinishReason.ERROR, error=error)
    sender.outbox.put(one, ended, 1.0)
    sender.outbox.flush()
    assert sender.wire.published[-2][2] == codec.error_headers(error)


async def test_a_chunk_that_the_connection_has_no_room_for_is_dropped_and_counted() -> None:
    sender, one = Sender(), stream()
    sender.outbox.put(one, output("a"), 1.0)
    sender.outbox.flush()
    sender.wire.is_busy = True
    sender.outbox.put(one, output("b"), 1.0)
    sender.outbox.flush()
    assert sender.outbox.dropped_chunks == 1
