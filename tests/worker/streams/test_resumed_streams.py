"""A run that continues a stream publishes only what is new, and can publish all of it again."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.support.arithmetic import ArithmeticRunner
from tests.support.engines import thread_engine
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.bus.bus import Outgoing
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import block_hash, codec, internal, messages, subjects
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.replica_state import Serving
from tokenbus.worker.contract import engine_output
from tokenbus.worker.engine_client.listener import EngineListener
from tokenbus.worker.kv_exchange.exchange import KvExchange
from tokenbus.worker.settings.settings import FrontendSettings
from tokenbus.worker.streams.outbox import Outbox
from tokenbus.worker.streams.request_telemetry import StreamTelemetry
from tokenbus.worker.streams.streams import Streams
from tokenbus.worker.telemetry.metrics import ReplicaMetrics, WorkerMetrics

_chunks = codec.Decoder(messages.Chunk)
MAX_TOKENS = 12
SCHEME = "xxh3-64:" + "0" * 16


class Wire(RecordingBus):
    """Keeps the chunks that are published to each inbox."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: dict[str, list[messages.Chunk]] = {}
        self.changed = asyncio.Event()

    def publish_all(self, messages: Sequence[Outgoing]) -> None:
        super().publish_all(messages)
        for message in messages:
            if message.subject.startswith("_INBOX."):
                chunk = _chunks.decode(message.payload, codec.Encoding.JSON)
                self.chunks.setdefault(message.subject, []).append(chunk)
                self.changed.set()


class Worker(EngineListener):
    """The streams of a worker whose engine serves."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.announcer = Announcer(self.wire, subjects.Subjects(), "demo", "w1")  # type: ignore[arg-type]
        metrics = ReplicaMetrics(WorkerMetrics(), "demo", "w1")
        telemetry = StreamTelemetry(metrics, tracing.NoopTracer(), "demo", "w1")
        self.outbox = Outbox(self.wire, self.announcer, telemetry)  # type: ignore[arg-type]
        exchange = KvExchange(self.announcer, metrics)
        self.streams = Streams(self.announcer, self.outbox, telemetry, FrontendSettings(debug=True), exchange)
        self.engine = thread_engine(lambda _: ArithmeticRunner())
        self.engine.listener = self

    def step_done(self) -> None:
        self.outbox.flush()

    async def start(self) -> None:
        config = await self.engine.start("w1")
        serving = Serving(self.engine, config)
        self.streams.engine_started(serving)
        self.announcer.engine_started(serving)

    def accept(self, name: str, *given: int, attempt: int = 1, **params: object) -> internal.RunReply:
        asked: dict[str, object] = {"max_tokens": MAX_TOKENS, "seed": 3, "temperature": 1.0, "return_token_ids": True}
        resume_from = internal.RunResume(token_ids=block_hash.pack_token_ids(given), cached_tokens=0)
        run = internal.Run(
            request_id=f"default:{name}",
            attempt=attempt,
            epoch=self.announcer.epoch,
            router_id="router",
            reply=f"_INBOX.{name}.{attempt}",
            encoding=codec.Encoding.JSON,
            token_ids=block_hash.pack_token_ids([1, 2, 3]),
            params=GenerationParams(**(asked | params)),  # type: ignore[arg-type]
            resume_from=resume_from if given else None,
        )
        return self.streams.accept(run)

    async def answer(self, name: str, *given: int, attempt: int = 1, **params: object) -> list[messages.Chunk]:
        """Has a run served; returns its chunks."""
        reply = self.accept(name, *given, attempt=attempt, **params)
        assert reply.accepted, reply.error
        inbox = f"_INBOX.{name}.{attempt}"
        async with asyncio.timeout(10):
            while not (chunks := self.wire.chunks.get(inbox, [])) or chunks[-1].finish_reason is None:
                self.wire.changed.clear()
                await self.wire.changed.wait()
        return self.wire.chunks.pop(inbox)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    one = Worker()
    await one.start()
    yield one
    await one.engine.cleanup()


def text_of(chunks: list[messages.Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def ids_of(chunks: list[messages.Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids or []]


async def test_what_is_published_follows_what_was_published_elsewhere_to_the_byte(worker: Worker) -> None:
    whole = await worker.answer("whole")
    ids, text = ids_of(whole), text_of(whole)
    for count in range(1, MAX_TOKENS):
        head, *rest = await worker.answer(f"r{count}", *ids[:count], attempt=2)
        assert (head.attempt, head.offset, head.tokens, head.text, head.hash_scheme) == (2, count, 0, "", SCHEME)
        assert [chunk.offset for chunk in rest] == list(range(count, MAX_TOKENS))
        assert ids_of(rest) == ids[count:]
        assert text.encode()[head.text_offset :] == text_of(rest).encode()
        assert rest[-1].usage == whole[-1].usage


async def test_a_resync_from_the_start_publishes_all_of_it(worker: Worker) -> None:
    whole = await worker.answer("whole")
    ids = ids_of(whole)
    await worker.answer("again", *ids[:5])
    assert worker.streams.replay("default:again", 0)
    replayed = worker.wire.chunks["_INBOX.again.1"]
    assert (replayed[0].offset, ids_of(replayed), text_of(replayed)) == (0, ids, text_of(whole))


async def test_a_whole_answer_contains_everything(worker: Worker) -> None:
    whole = await worker.answer("whole")
    (terminal,) = await worker.answer("again", *ids_of(whole)[:5], stream=False)
    assert (terminal.offset, terminal.tokens, terminal.text) == (0, MAX_TOKENS, text_of(whole))
    assert terminal.usage == whole[-1].usage


@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_complete_already_ends_without_the_engine(worker: Worker, stream: bool) -> None:
    whole = await worker.answer("whole")
    before = worker.engine.load().generated_tokens
    *head, terminal = await worker.answer("again", *ids_of(whole), stream=stream)
    assert [(chunk.offset, chunk.tokens) for chunk in head] == [(MAX_TOKENS, 0)] * stream
    assert terminal.finish_reason is messages.FinishReason.LENGTH
    assert terminal.offset + terminal.tokens == MAX_TOKENS
    assert text_of(whole).endswith(terminal.text)
    assert terminal.usage == whole[-1].usage
    assert worker.engine.load().generated_tokens == before


async def test_a_run_that_is_refused_leaves_no_stream(worker: Worker) -> None:
    whole = await worker.answer("whole")
    reply = worker.accept("again", *ids_of(whole), 5)
    assert reply.error is not None
    assert (reply.accepted, reply.error.param) == (False, "resume_from")
    assert not worker.streams.holds("default:again")
    assert ids_of(await worker.answer("again")) == ids_of(whole)


async def test_a_bug_at_a_given_token_refuses_the_run(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stream: object, output: engine_output.Output) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tokenbus.worker.streams.stream.WorkerStream.resume", fail)
    reply = worker.accept("one", 5)
    assert reply.error is not None
    assert (reply.accepted, reply.error.code) == (False, "internal")
    assert not worker.streams.holds("default:one")
    monkeypatch.undo()
    assert await worker.answer("one", 5)


async def test_a_stream_that_only_computes_its_prompt_does_so_wherever_it_continues(worker: Worker) -> None:
    assert worker.accept("cached", max_tokens=0).accepted
    assert worker.accept("longer", max_tokens=1).accepted
    continued = {one.key: one.to_run(0.0).params.max_tokens for one in worker.streams}
    assert continued == {"default:cached": 0, "default:longer": 1}
