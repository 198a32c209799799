"""Answers to several requests come as those of one, each with its number."""

from collections.abc import Callable

import pytest

from tests.support.fed_stream import FakeTransport, stream_over
from tokenbus.client.wire.choices import ChoiceBatch
from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.protocol.wire import errors, messages

STOP = messages.FinishReason.STOP
Submit = Callable[[messages.GenerateRequest], ChunkStream]


def chunk(text: str, offset: int = 0, reason: messages.FinishReason | None = None) -> messages.Chunk:
    return messages.Chunk(
        id="r", tokens=len(text), offset=offset, text_offset=offset, text=text, finish_reason=reason, worker_id="w"
    )


class Server:
    """Answers each request with its id, or with nothing if it is in `silent`."""

    def __init__(self, *silent: str) -> None:
        self.silent = silent
        self.asked: list[messages.GenerateRequest] = []
        self.line = FakeTransport()

    def submit(self, request: messages.GenerateRequest) -> ChunkStream:
        self.asked.append(request)
        text = request.id or ""
        chunks = [] if text in self.silent else [chunk(text), chunk("", len(text), STOP)]
        return stream_over(self.line, *chunks)


def requests(*names: str) -> list[messages.GenerateRequest]:
    return [messages.GenerateRequest(id=name, prompt="x", seed=5) for name in names]


@pytest.mark.parametrize("n", [1, 3])
async def test_the_answers_to_a_request_are_numbered_behind_those_of_the_one_before(n: int) -> None:
    server = Server()
    texts: dict[int, str] = {}
    async with ChoiceBatch(requests("a", "b"), n, server.submit) as batch:
        async for number, one in batch.chunks():
            texts[number] = texts.get(number, "") + one.text
    expected = [name if not k else f"{name}-{k}" for name in ("a", "b") for k in range(n)]
    assert [texts[number] for number in range(2 * n)] == expected
    assert batch.request_id == "r"


async def test_the_further_answers_to_each_request_follow_its_own_first_one() -> None:
    server = Server("b")
    async with ChoiceBatch(requests("a", "b"), 2, server.submit) as batch:
        seen = [(number, one.text) async for number, one in _until(batch, 4)]
    assert sorted(seen) == [(0, ""), (0, "a"), (1, ""), (1, "a-1")]
    assert [(one.id, one.seed, one.session_id) for one in server.asked] == [
        ("a", 5, "a"), ("b", 5, "b"), ("a-1", 6, "a"),
    ]  # fmt: skip
    assert [one.copy_of for one in server.asked] == ["a", "b", "r"], "the latest id of the first answer's stream"
    assert server.line.num_cancels == 1  # of the one that did not answer


async def test_an_error_ends_all_answers() -> None:
    batch = ChoiceBatch(requests("a", "b"), 1, Server("a", "b").submit)
    batch.cancel()
    batch.fail(errors.make_error(errors.Code.SHUTTING_DOWN))
    ends = [(number, one.error.code) async for number, one in batch.chunks() if one.error]
    assert sorted(ends) == [(0, errors.Code.SHUTTING_DOWN), (1, errors.Code.SHUTTING_DOWN)]


async def _until(batch: ChoiceBatch, count: int):  # type: ignore[no-untyped-def]
    async for item in batch.chunks():
        yield item
        count -= 1
        if not count:
            return
