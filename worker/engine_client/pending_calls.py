"""Questions to an engine, beside its streams, that it has not answered yet."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from tokenbus.protocol.wire import errors

ResultT = TypeVar("ResultT")


class PendingCalls(Generic[ResultT]):
    """Of one kind, each with a ticket."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[ResultT]] = {}
        self._last_call_id = 0

    def __repr__(self) -> str:
        return f"<Questions {len(self._open)} open>"

    def __len__(self) -> int:
        return len(self._open)

    async def call(self, send: Callable[[int], None]) -> ResultT:
        """Has `send` carry the question under its ticket, and waits for its answer. Raises the RequestError that it is
        refused with."""
        self._last_call_id += 1
        call_id = self._last_call_id
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._open[call_id] = future
        try:
            send(call_id)
            return await future
        finally:
            del self._open[call_id]

    def resolve(self, call_id: int, answer: ResultT) -> None:
        """The engine has answered; who asked may have gone meanwhile."""
        future = self._open.get(call_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def reject(self, call_id: int, error: errors.Error) -> None:
        """Likewise."""
        future = self._open.get(call_id)
        if future is not None and not future.done():
            future.set_exception(errors.RequestError(error))

    def fail_all(self) -> None:
        """Nobody will answer any more."""
        for call_id in self._open:
            self.reject(call_id, errors.make_error(errors.Code.WORKER_LOST))
