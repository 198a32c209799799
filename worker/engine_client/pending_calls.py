"""Calls to an engine, apart from its streams, that wait for a reply."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from tokenbus.protocol.wire import errors

ResultT = TypeVar("ResultT")


class PendingCalls(Generic[ResultT]):
    """Pending calls of one kind, each known by its call id."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[ResultT]] = {}
        self._last_call_id = 0

    def __repr__(self) -> str:
        return f"<PendingCalls {len(self._open)} open>"

    def __len__(self) -> int:
        return len(self._open)

    async def call(self, send: Callable[[int], None]) -> ResultT:
        """Sends a call under a new id, and waits for its result. Raises the RequestError with which it ends."""
        self._last_call_id += 1
        call_id = self._last_call_id
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._open[call_id] = future
        try:
            send(call_id)
            return await future
        finally:
            del self._open[call_id]

    def end(self, call_id: int, result: ResultT, error: errors.Error | None = None) -> None:
        """Ends a call with its result, or with an error if there is one. Its caller may be gone."""
        future = self._open.get(call_id)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(errors.RequestError(error))

    def fail_all(self) -> None:
        """Fails every call with `worker_lost`: no reply will come."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(errors.request_error(errors.Code.WORKER_LOST))
