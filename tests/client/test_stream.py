"""An answer as its user reads it: it ends, raises, or is cancelled as soon as no one waits for it."""

import asyncio
import copy
import gc
import threading
from typing import Any

import msgspec
import pytest

from tests.support.fed_stream import FakeTransport, stream_over
from tokenbus.client import (
    Answer,
    CallDelta,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    Stream,
    TokenbusError,
    TokenUsage,
    ToolCall,
)
from tokenbus.client.errors import CODE_TO_ERROR, exception_of
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.protocol.wire.messages import FinishReason

USAGE = messages.Usage(prompt_tokens=1, completion_tokens=3, total_tokens=4, cached_tokens=0)
HEAD = messages.Chunk(id="r", worker_id="w1", model="demo", created=1)


def chunk(offset: int = 0, text: str = "", tokens: int = 1, **fields: Any) -> messages.Chunk:
    """A chunk of plain ASCII, in which each token is one letter."""
    fields = {"text_offset": offset} | fields
    return messages.Chunk(id="r", offset=offset, tokens=tokens, text=text, **fields)


def failure(offset: int, code: errors.Code, **fields: Any) -> messages.Chunk:
    error = errors.make_error(code, **fields)
    return chunk(offset, tokens=0, finish_reason=FinishReason.ERROR, error=error, usage=USAGE)


WHOLE = (HEAD, chunk(0, "a"), chunk(1, "b"), chunk(2, "c", finish_reason=FinishReason.LENGTH, usage=USAGE))


class Reading:
    """A user's stream, and what its client has been told."""

    def __init__(self, *chunks: messages.Chunk) -> None:
        self.line = FakeTransport()
        self.wire = stream_over(self.line, *chunks)
        self.stream: Stream | None = Stream(self.wire, asyncio.get_running_loop())

    @property
    def held(self) -> Stream:
        assert self.stream is not None
        return self.stream

    def feed(self, *chunks: messages.Chunk) -> None:
        for one in chunks:
            self.wire.feed(codec.encode(one, codec.Encoding.JSON), 0.0)


async def next_round() -> None:
    """Lets the loop carry out what was called from a destructor."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_chunks_of_an_answer_end_with_the_one_that_has_a_finish_reason() -> None:
    one = Reading(*WHOLE)
    chunks = [chunk async for chunk in one.held]
    assert "".join(chunk.text for chunk in chunks) == "abc"
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, "length"]
    assert chunks[-1].usage == TokenUsage(prompt_tokens=1, completion_tokens=3, total_tokens=4, cached_tokens=0)
    assert (chunks[0].model, chunks[1].model) == ("demo", None)


async def test_the_answer_has_what_was_read_before() -> None:
    one = Reading(*WHOLE)
    async for part in one.held:
        if part.text == "b":
            break
    assert one.held.so_far == Answer(text="ab", model="demo")
    assert (await one.held.text(), await one.held.text()) == ("abc", "abc")
    assert one.held.so_far.finish_reason == "length"
    assert one.line.num_cancels == 0


@pytest.mark.parametrize("index", [-1, 1, 1 << 40])
async def test_a_call_without_a_beginning_ends_no_stream(index: int) -> None:
    named = messages.ToolCallDelta(index=0, id="c", function=messages.FunctionDelta(name="f"))
    astray = messages.ToolCallDelta(index=index, function=messages.FunctionDelta(arguments="{}"))
    reading = Reading(HEAD, chunk(0, tool_calls=[astray, named], finish_reason=FinishReason.TOOL_CALLS, usage=USAGE))
    answer = await reading.held.answer()
    assert answer.tool_calls == [ToolCall(id="", name="", arguments="{}"), ToolCall(id="c", name="f")]


async def test_tool_calls_are_put_together() -> None:
    first = messages.ToolCallDelta(index=0, id="c", function=messages.FunctionDelta(name="f", arguments='{"a"'))
    more = messages.ToolCallDelta(index=0, arguments_offset=4, function=messages.FunctionDelta(arguments=": 1}"))
    one = Reading(
        chunk(0, tool_calls=[first]),
        chunk(1, text_offset=0, tool_calls=[more], finish_reason=FinishReason.TOOL_CALLS, usage=USAGE),
    )
    part = await anext(one.held)
    assert part.tool_calls == [CallDelta(index=0, id="c", name="f", arguments='{"a"')]
    answer = await one.held.answer()
    assert answer.tool_calls == [ToolCall(id="c", name="f", arguments='{"a": 1}')]
    assert msgspec.to_builtins(answer.to_message()) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }


async def test_an_error_raises_with_the_text_before_it_and_raises_again() -> None:
    one = Reading(HEAD, chunk(0, "a"), failure(1, errors.Code.OVERLOADED, retry_after_ms=1_500.0))
    assert [(await anext(one.held)).text for _ in range(2)] == ["", "a"]
    for _ in range(2):
        with pytest.raises(OverloadedError) as caught:
            await anext(one.held)
    error = caught.value
    assert (error.code, error.retry_after, error.partial, error.retryable) == ("overloaded", 1.5, "a", True)
    assert error.usage is not None
    assert error.usage.completion_tokens == 3
    with pytest.raises(TokenbusError):
        await one.held.answer()


async def test_an_error_names_the_field_at_fault() -> None:
    one = Reading(failure(0, errors.Code.INVALID_REQUEST, message="top_p: no", param="top_p"))
    with pytest.raises(InvalidRequestError, match="top_p: no") as caught:
        await one.held.text()
    assert (caught.value.param, caught.value.message, caught.value.partial) == ("top_p", "top_p: no", "")


def test_every_code_of_the_wire_has_an_exception_that_can_be_copied_to_another_process() -> None:
    assert set(CODE_TO_ERROR) == set(errors.Code)
    for code in errors.Code:
        error = exception_of(errors.make_error(code, param="p"), "text", TokenUsage(prompt_tokens=1))
        again = copy.copy(error)  # as pickle does it
        assert type(again) is type(error) is CODE_TO_ERROR[code]
        assert (again.code, again.param, again.partial, again.usage) == (code, "p", "text", error.usage)


async def test_a_task_that_is_cancelled_while_it_waits_cancels_the_request_at_once() -> None:
    one = Reading(HEAD)

    async def read() -> None:
        async for _ in one.held:
            pass

    task = asyncio.create_task(read())
    await next_round()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.line.num_cancels == 1


async def test_a_timeout_around_an_answer_cancels_the_request_at_once() -> None:
    one = Reading(HEAD, chunk(0, "a"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one.held.answer(), 0.01)
    assert one.line.num_cancels == 1
    assert one.held.so_far == Answer(text="a", model="demo", finish_reason=FinishReason.CANCELLED)


async def test_leaving_a_loop_over_a_stream_that_nothing_else_holds_cancels_the_request() -> None:
    line = FakeTransport()
    async for part in Stream(stream_over(line, *WHOLE[:3]), asyncio.get_running_loop()):
        if part.text:
            break
    await next_round()
    assert line.num_cancels == 1


async def test_leaving_a_loop_over_a_stream_that_is_still_held_cancels_nothing_until_it_is_released() -> None:
    one = Reading(*WHOLE[:3])
    async for part in one.held:
        if part.text:
            break
    await next_round()
    assert one.line.num_cancels == 0
    one.stream = None
    await next_round()
    assert one.line.num_cancels == 1


async def test_a_stream_that_is_never_read_is_cancelled_when_it_is_released() -> None:
    one = Reading()
    one.stream = None
    await next_round()
    assert one.line.num_cancels == 1


async def test_a_stream_in_a_cycle_is_cancelled_by_the_collector_in_any_thread() -> None:
    one = Reading(HEAD)
    cycle: list[Any] = [one.stream]
    cycle.append(cycle)
    one.stream = None
    del cycle
    collector = threading.Thread(target=gc.collect)
    collector.start()
    await asyncio.to_thread(collector.join)
    await next_round()
    assert one.line.num_cancels == 1


async def test_a_stream_that_has_ended_is_released_without_a_cancel() -> None:
    one = Reading(*WHOLE)
    one.stream = None
    await next_round()
    assert one.line.num_cancels == 0


def test_a_stream_whose_loop_is_closed_is_released_in_silence() -> None:
    async def begin() -> Reading:
        return Reading(HEAD)

    one = asyncio.run(begin())
    one.stream = None
    gc.collect()
    assert one.line.num_cancels == 0


async def test_leaving_the_block_of_a_stream_cancels_the_request_unless_it_has_ended() -> None:
    one, ended = Reading(HEAD), Reading(*WHOLE)
    for reading in (one, ended):
        async with reading.held as stream:
            await anext(stream)
    assert (one.line.num_cancels, ended.line.num_cancels) == (1, 0)


async def test_a_stream_that_its_user_cancels_ends_quietly_with_what_there_was() -> None:
    one = Reading(HEAD, chunk(0, "a"))
    one.held.cancel()
    one.feed(chunk(1, tokens=0, finish_reason=FinishReason.CANCELLED, usage=USAGE))
    assert [part.finish_reason async for part in one.held] == [None, None, "cancelled"]
    assert (await one.held.answer()).text == "a"
    assert one.line.num_cancels == 1


async def test_a_stream_that_someone_else_cancels_raises() -> None:
    one = Reading(HEAD, chunk(0, "a"), chunk(1, tokens=0, finish_reason=FinishReason.CANCELLED, usage=USAGE))
    with pytest.raises(RequestCancelledError) as caught:
        await one.held.text()
    assert (caught.value.code, caught.value.partial) == ("cancelled", "a")


async def test_a_reader_whose_client_is_closed_learns_that_its_text_is_incomplete() -> None:
    one = Reading(HEAD, chunk(0, "a"))
    reader = asyncio.create_task(one.held.text())
    await next_round()
    one.wire.close()
    with pytest.raises(RequestCancelledError, match="the client was closed") as caught:
        await reader
    assert caught.value.partial == "a"


async def test_a_second_reader_at_the_same_time_is_refused_and_the_first_one_is_not_disturbed() -> None:
    one = Reading(HEAD)
    reader = asyncio.create_task(one.held.text())
    await next_round()
    with pytest.raises(RuntimeError, match="another task is reading this stream"):
        await anext(one.held)
    one.feed(*WHOLE)
    assert await reader == "abc"


async def test_a_stream_is_refused_in_another_event_loop() -> None:
    one = Reading(*WHOLE)

    async def elsewhere() -> str:
        with pytest.raises(RuntimeError, match="this stream belongs to another event loop"):
            one.held.cancel()
        return await one.held.text()

    with pytest.raises(RuntimeError, match="make a Client in each loop"):
        await asyncio.to_thread(asyncio.run, elsewhere())
    assert await one.held.text() == "abc"


def test_what_a_stream_offers_is_few() -> None:
    assert [name for name in dir(Stream) if not name.startswith("_")] == [
        *("aclose", "answer", "cancel", "request_id", "so_far", "text")
    ]
