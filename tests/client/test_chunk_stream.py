"""A client's stream always ends: with the terminal that came, or with one made by the client that says why."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenbus.cli.console import nats_server
from tokenbus.client.wire.chunk_stream import MAX_UNREAD_BYTES, ChunkStream
from tokenbus.client.wire.continuation import MAX_RESUBMITS
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import codec, errors, messages

LENGTH, STOP, CANCELLED, ERROR = (
    messages.FinishReason.LENGTH,
    messages.FinishReason.STOP,
    messages.FinishReason.CANCELLED,
    messages.FinishReason.ERROR,
)


class FakeTransport:
    """A stream, and what it asks of its client."""

    def __init__(
        self,
        *,
        encoding: codec.Encoding = codec.Encoding.JSON,
        cancel: Callable[[], None] = lambda: None,
        **fields: object,
    ) -> None:
        self.num_cancels = 0
        self.num_closes = 0
        self.resyncs: list[int] = []
        self.resubmitted: list[messages.GenerateRequest] = []
        self._encoding = encoding
        self._then = cancel
        self.began = self.now = 0.0
        request = messages.GenerateRequest(id="r", prompt="hi", **fields)  # type: ignore[arg-type]
        self.stream = ChunkStream(request, encoding, self, self.began)

    def send_cancel(self, stream: ChunkStream) -> None:
        self.num_cancels += 1
        self._then()

    def send_resync(self, stream: ChunkStream, offset: int, prompt_offset: int | None = None) -> None:
        self.resyncs.append(offset)

    def submit(self, stream: ChunkStream, request: messages.GenerateRequest) -> None:
        self.resubmitted.append(request)

    def forget(self, stream: ChunkStream) -> None:
        self.num_closes += 1

    def wait(self, until_s: float) -> None:
        """Lets time pass, in the steps of a client's clock, until so long after the request."""
        while self.now < self.began + until_s:
            self.now += 0.1
            self.stream.tick(self.now)

    @property
    def counts(self) -> tuple[int, int]:
        """Cancels and closes so far."""
        return self.num_cancels, self.num_closes

    def feed(self, *chunks: messages.Chunk) -> None:
        for chunk in chunks:
            self.stream.feed(codec.encode(chunk, self._encoding), self.now)

    async def rest(self) -> list[messages.Chunk]:
        async with asyncio.timeout(60):
            return [chunk async for chunk in self.stream]


def chunk(offset: int = 0, text: str = "", tokens: int = 1, **fields: object) -> messages.Chunk:
    """A chunk of plain ASCII, in which each token is one letter."""
    return messages.Chunk(id="r", offset=offset, tokens=tokens, text_offset=offset, text=text, **fields)  # type: ignore[arg-type]


HEAD = messages.Chunk(id="r", worker_id="w1", model="demo", created=1)
WHOLE = (HEAD, chunk(0, "a"), chunk(1, "b"), chunk(2, "c", finish_reason=LENGTH))


def code_of(terminal: messages.Chunk) -> errors.Code:
    assert terminal.finish_reason is ERROR
    assert terminal.error
    return terminal.error.code


@pytest.mark.parametrize("encoding", codec.Encoding)
async def test_chunks_are_handed_out_in_order_and_the_iteration_ends_after_the_terminal(
    encoding: codec.Encoding,
) -> None:
    line = FakeTransport(encoding=encoding)
    line.feed(*WHOLE)
    assert await line.rest() == list(WHOLE)
    assert await line.rest() == []
    assert line.counts == (0, 1)


async def test_a_reader_that_came_first_is_woken_by_each_chunk() -> None:
    line = FakeTransport()
    reader = asyncio.create_task(line.rest())
    for one in WHOLE:
        await asyncio.sleep(0)
        line.feed(one)
    assert await reader == list(WHOLE)


async def test_nothing_is_taken_after_the_terminal() -> None:
    line = FakeTransport()
    line.feed(*WHOLE, chunk(3, "d"), WHOLE[-1])
    line.stream.fail(errors.make_error(errors.Code.NO_WORKER))
    assert await line.rest() == list(WHOLE)
    assert line.counts == (0, 1)


async def test_chunks_of_an_earlier_attempt_are_not_handed_out() -> None:
    line = FakeTransport()
    line.feed(HEAD, messages.Chunk(id="r", attempt=1), chunk(0, "old"), chunk(0, "a", attempt=1, finish_reason=STOP))
    assert [one.text for one in await line.rest()] == ["", "", "a"]


async def test_a_terminal_of_an_earlier_attempt_does_not_end_the_stream() -> None:
    line = FakeTransport()
    line.feed(messages.Chunk(id="r", attempt=1), messages.Chunk(id="r", finish_reason=ERROR))
    assert line.counts == (0, 0)
    line.feed(chunk(0, "a", attempt=1, finish_reason=STOP))
    assert [one.finish_reason for one in await line.rest()] == [None, STOP]


@pytest.mark.parametrize("ahead", [chunk(2, "c"), chunk(2, "c", finish_reason=STOP)], ids=["gap", "terminal"])
async def test_what_is_missing_is_asked_for_at_once_and_the_stream_goes_on_when_it_has_come(
    ahead: messages.Chunk,
) -> None:
    line = FakeTransport()
    line.feed(HEAD, chunk(0, "a"), ahead)
    assert line.resyncs == [1]
    line.feed(chunk(1, "b"), chunk(2, "c", finish_reason=STOP))
    assert [one.text for one in await line.rest()] == ["", "a", "b", "c"]
    assert line.counts == (0, 1)


async def test_a_chunk_that_comes_again_is_handed_out_once() -> None:
    line = FakeTransport()
    line.feed(HEAD, chunk(0, "a"), chunk(0, "a"), chunk(0, "ab", tokens=2), chunk(2, "c", finish_reason=STOP))
    assert [one.text for one in await line.rest()] == ["", "a", "b", "c"]


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b'{"offset": "x"}', b"\xff\xfe", b'{"id": 1}'])
async def test_a_message_that_is_no_chunk_ends_the_stream_in_internal(payload: bytes) -> None:
    line = FakeTransport()
    line.stream.feed(payload, 0.0)
    (terminal,) = await line.rest()
    assert code_of(terminal) is errors.Code.INTERNAL
    assert line.counts == (1, 1)
    assert line.resubmitted == []


async def test_a_stream_that_says_nothing_is_asked_for_and_one_that_nobody_holds_is_lost() -> None:
    line = FakeTransport()
    line.feed(HEAD, chunk(0, "a"))
    line.wait(9.8)
    assert line.resyncs == []
    line.wait(11.8)
    assert line.resyncs == [1, 1]
    assert line.counts == (0, 0)
    line.wait(12.2)
    *before, terminal = await line.rest()
    assert before == [HEAD, chunk(0, "a")]
    assert code_of(terminal) is errors.Code.WORKER_LOST
    assert (terminal.offset, terminal.text_offset) == (1, 1)
    assert line.counts == (1, 1)


async def test_a_stream_that_somebody_holds_is_waited_for() -> None:
    line = FakeTransport()
    line.feed(HEAD, chunk(0, "a"))
    line.wait(10.2)
    line.stream.feed_resync(b'{"found": true}', line.now)
    line.wait(19.8)
    assert line.resyncs == [1]
    line.feed(chunk(1, "b", finish_reason=STOP))
    assert len(await line.rest()) == 3


async def test_a_request_that_nobody_holds_is_made_again_while_nothing_of_it_has_come_but_not_for_ever() -> None:
    line = FakeTransport(timeout_ms=60_000.0)
    for number in range(MAX_RESUBMITS):
        line.began = line.now
        line.wait(4.8)
        assert (line.resyncs, len(line.resubmitted)) == ([0, 0] * (number + 1), number)
        line.wait(5.2)
        assert len(line.resubmitted) == number + 1
        assert line.num_cancels == number + 1
        assert 0 < (line.resubmitted[-1].timeout_ms or 0) < 60_000
    line.began = line.now
    line.wait(5.2)
    assert len(line.resubmitted) == MAX_RESUBMITS
    assert code_of((await line.rest())[-1]) is errors.Code.WORKER_LOST


@pytest.mark.parametrize(("named", "expected"), [("r", None), ("first", "first")])
async def test_a_first_answer_names_itself_still_when_it_is_made_again(named: str, expected: str | None) -> None:
    line = FakeTransport(timeout_ms=60_000.0, copy_of=named)
    line.began = line.now
    for seconds in (4.8, 5.2):
        line.wait(seconds)
    (again,) = line.resubmitted
    assert again.id != "r"
    assert again.copy_of == (expected or again.id)


async def test_a_request_whose_time_has_passed_is_not_made_again() -> None:
    line = FakeTransport(timeout_ms=4_000.0)
    line.wait(5.2)
    assert line.resubmitted == []
    assert code_of((await line.rest())[-1]) is errors.Code.DEADLINE_EXCEEDED


async def test_a_cancelled_request_that_nobody_holds_ends_as_cancelled_and_is_not_made_again() -> None:
    line = FakeTransport()
    line.stream.cancel()
    line.wait(5.2)
    assert line.resubmitted == []
    assert [chunk.finish_reason for chunk in await line.rest()] == [CANCELLED]


async def test_a_stream_whose_cancel_cannot_be_sent_still_ends() -> None:
    """The broker may be gone for good: the reader must learn it from a terminal, as of everything else."""

    def refuse() -> None:
        raise ConnectionError("the connection to the broker is closed")

    silent = FakeTransport(cancel=refuse)
    silent.feed(chunk(0, "a"))
    silent.wait(12.2)
    assert code_of((await silent.rest())[-1]) is errors.Code.WORKER_LOST
    broken = FakeTransport(cancel=refuse)
    broken.stream.feed(b"{", 0.0)
    assert code_of((await broken.rest())[-1]) is errors.Code.INTERNAL
    left = FakeTransport(cancel=refuse)
    await left.stream.aclose()
    assert left.num_closes == 1


async def test_as_many_bytes_as_may_may_wait_unread_and_one_more_chunk_ends_the_stream_in_overloaded() -> None:
    full, over = FakeTransport(), FakeTransport()
    payload = codec.encode(messages.Chunk(id="r"), codec.Encoding.JSON)
    payload += b" " * (1024 - len(payload))
    for line in (full, over):
        for _ in range(MAX_UNREAD_BYTES // 1024):
            line.stream.feed(payload, 0.0)
        assert line.counts == (0, 0)
    over.stream.feed(payload, 0.0)
    assert over.counts == (1, 1)
    chunks = await over.rest()
    assert len(chunks) == MAX_UNREAD_BYTES // 1024 + 1
    assert code_of(chunks[-1]) is errors.Code.OVERLOADED
    assert over.resubmitted == []
    await anext(full.stream)
    full.stream.feed(payload, 0.0)
    assert full.counts == (0, 0)


async def test_a_terminal_of_our_own_stands_where_the_stream_was() -> None:
    line = FakeTransport()
    line.feed(messages.Chunk(id="r", attempt=2), chunk(0, "a", attempt=2))
    line.stream.fail(errors.make_error(errors.Code.NO_WORKER, "nobody listens"))
    terminal = (await line.rest())[-1]
    assert (terminal.id, terminal.attempt, terminal.offset, terminal.text_offset) == ("r", 2, 1, 1)
    assert terminal.error == errors.make_error(errors.Code.NO_WORKER, "nobody listens")
    assert line.counts == (0, 1)


async def test_only_the_first_end_counts() -> None:
    line = FakeTransport()
    line.stream.fail(errors.make_error(errors.Code.NO_WORKER))
    line.stream.fail(errors.make_error(errors.Code.WORKER_LOST))
    assert [code_of(one) for one in await line.rest()] == [errors.Code.NO_WORKER]
    assert line.counts == (0, 1)


async def test_closing_cancels_once_and_ends_the_iteration() -> None:
    line = FakeTransport()
    line.feed(HEAD)
    await line.stream.aclose()
    await line.stream.aclose()
    assert line.counts == (1, 1)
    line.feed(*WHOLE[1:])
    assert await line.rest() == [HEAD]


async def test_closing_wakes_a_reader() -> None:
    line = FakeTransport()
    reader = asyncio.create_task(line.rest())
    await asyncio.sleep(0)
    await line.stream.aclose()
    assert await reader == []


async def test_closing_what_has_ended_cancels_nothing() -> None:
    line = FakeTransport()
    line.feed(*WHOLE)
    await line.stream.aclose()
    line.stream.cancel()
    assert line.counts == (0, 1)


async def test_leaving_the_block_early_cancels_also_where_an_error_leaves_it() -> None:
    left, failed = FakeTransport(), FakeTransport()
    async with left.stream:
        left.feed(HEAD)
        assert await anext(left.stream) == HEAD
    assert left.counts == (1, 1)
    with pytest.raises(ZeroDivisionError):
        async with failed.stream:
            raise ZeroDivisionError
    assert failed.counts == (1, 1)


async def test_a_cancel_asks_for_the_end_and_the_stream_goes_on_until_its_terminal() -> None:
    line = FakeTransport()
    line.feed(HEAD)
    line.stream.cancel()
    assert line.counts == (1, 0)
    line.feed(chunk(0, "a"), chunk(1, "", tokens=0, finish_reason=CANCELLED))
    assert [one.finish_reason for one in await line.rest()] == [None, None, CANCELLED]
    assert line.counts == (1, 1)


async def test_where_no_router_listens_a_stream_ends_at_once_in_no_worker(tmp_path: Path) -> None:
    nats = await nats_server.start(0, tmp_path / "nats.log")
    try:
        async with await WireClient.connect(nats.url) as client, asyncio.timeout(60):
            (terminal,) = [one async for one in client.generate("demo", prompt="hi", id="mine")]
            assert (terminal.id, code_of(terminal)) == ("mine", errors.Code.NO_WORKER)
            assert not await client.cancel("mine")
            with pytest.raises(errors.RequestError, match="no router listens"):
                await client.models()
    finally:
        nats.stop()


async def test_a_request_too_large_for_the_broker_ends_like_any_other_where_nobody_listens(tmp_path: Path) -> None:
    nats = await nats_server.start(0, tmp_path / "nats.log")
    try:
        async with await WireClient.connect(nats.url) as client, asyncio.timeout(60):
            (terminal,) = [one async for one in client.generate("demo", prompt="x" * 2_000_000)]
            assert code_of(terminal) is errors.Code.NO_WORKER
            (terminal,) = [one async for one in client.generate("demo", prompt="x")]
            assert code_of(terminal) is errors.Code.NO_WORKER
    finally:
        nats.stop()


async def test_a_field_of_a_wrong_type_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    nats = await nats_server.start(0, tmp_path / "nats.log")
    try:
        async with await WireClient.connect(nats.url) as client:
            with pytest.raises(errors.RequestError, match="max_tokens"):
                client.generate("demo", prompt="x", max_tokens="many")
    finally:
        nats.stop()


async def test_while_parts_of_a_request_are_sent_its_silence_means_nothing() -> None:
    transport = FakeTransport()
    transport.stream.is_uploading = True
    transport.wait(60)
    assert transport.resyncs == transport.resubmitted == []
    transport.stream.uploaded(transport.now)
    transport.wait(62.8)
    assert transport.resyncs == []
    transport.wait(63.2)
    assert transport.resyncs == [0]
