"""Several answers to one or more requests. The first answer to a prompt is placed; the others follow it to its worker,
where the prompt is cached.

They follow by session and are not pinned: a pinned request bypasses those that wait, and fails with its worker."""

import abc
import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.protocol import tasks
from tokenbus.protocol.wire import codec, errors, messages

ItemT = TypeVar("ItemT")
Submit = Callable[[messages.GenerateRequest], ChunkStream]


class Answers(abc.ABC):
    """The streams of all answers requested together. `aclose`, or leaving an `async with` block early, cancels all."""

    def __init__(self, parts: "Sequence[ChunkStream | Answers]") -> None:
        """`parts` may grow until the last chunk."""
        self._parts = parts

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._parts}>"

    @abc.abstractmethod
    def chunks(self) -> AsyncIterator[tuple[int, messages.Chunk]]:
        """Yields the chunks of all streams as they arrive, each with the number of its choice, from 0. Each choice ends
        with one terminal. Iterate it only once."""

    @property
    def request_id(self) -> str:
        """The latest id of the first choice's request."""
        return self._parts[0].request_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends all streams and cancels their requests, unless they have ended. Idempotent."""
        for part in self._parts:
            await part.aclose()

    def cancel(self) -> None:
        """Cancels all requests. Each choice continues until its terminal."""
        for part in self._parts:
            part.cancel()

    def fail(self, error: errors.Error) -> None:
        """Ends all choices with an error."""
        for part in self._parts:
            part.fail(error)


class Choices(Answers):
    """The streams of one request made `n` times, with the seeds `seed`, `seed + 1` and so on."""

    def __init__(self, request: messages.GenerateRequest, n: int, submit: Submit) -> None:
        assert request.id is not None
        if n > 1:
            request = codec.replace(request, session_id=request.session_id or request.id, copy_of=request.id)
        self._request = request
        self._n = n
        self._submit = submit
        self._streams = [submit(request)]
        self._failure: errors.Error | None = None
        super().__init__(self._streams)

    def fail(self, error: errors.Error) -> None:
        """Ends all choices with an error, including those that have not started."""
        self._failure = error
        super().fail(error)

    async def chunks(self) -> AsyncIterator[tuple[int, messages.Chunk]]:
        async for chunk in self._streams[0]:
            yield 0, chunk
            if self._n > 1 and (chunk.tokens or (chunk.finish_reason and not chunk.error)):
                break  # the prompt is computed and cached
        else:
            return
        self._start_others()
        async for item in _merged(self._streams):
            yield item

    def _start_others(self) -> None:
        request = self._request
        for number in range(1, self._n):
            seed = None if request.seed is None else (request.seed + number) % 2**32
            again = codec.replace(request, id=f"{request.id}-{number}", seed=seed, copy_of=self._streams[0].request_id)
            stream = self._submit(again)
            self._streams.append(stream)
            if self._failure is not None:
                stream.cancel()
                stream.fail(self._failure)


class ChoiceBatch(Answers):
    """The choices of several requests, numbered as if of one: request `r` has `n` numbers from `r * n` on."""

    def __init__(self, requests: Sequence[messages.GenerateRequest], n: int, submit: Submit) -> None:
        self._n = n
        self._choices = [Choices(request, n, submit) for request in requests]
        super().__init__(self._choices)

    async def chunks(self) -> AsyncIterator[tuple[int, messages.Chunk]]:
        async for request, (choice, chunk) in _merged([one.chunks() for one in self._choices]):
            yield request * self._n + choice, chunk


async def _merged(sources: Sequence[AsyncIterator[ItemT]]) -> AsyncIterator[tuple[int, ItemT]]:
    """Yields the items of all sources as they arrive, each with the number of its source."""
    waiting = {_next(source): number for number, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[_next(sources[number])] = number
                yield number, item
    finally:
        for task in waiting:
            task.cancel()


def _next(source: AsyncIterator[ItemT]) -> "asyncio.Task[ItemT]":
    async def step() -> ItemT:
        return await anext(source)

    return tasks.awaited(step())
