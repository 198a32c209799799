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

    async def call(self, send: Callable[[int], None], abort: Callable[[int], None] | None = None) -> ResultT:
        """Sends a call under a new id with `send`, and waits for its result. Raises the RequestError that it is
        rejected with. `abort` takes the call back if the caller is cancelled."""
        self._last_call_id += 1
        call_id = self._last_call_id
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._open[call_id] = future
        try:
            send(call_id)
            return await future
        except asyncio.CancelledError:
            if abort is not None:
                abort(call_id)
            raise
        finally:
            del self._open[call_id]

    def resolve(self, call_id: int, answer: ResultT) -> None:
        """Completes a call; its caller may be gone."""
        future = self._open.get(call_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def reject(self, call_id: int, error: errors.Error) -> None:
        """Fails a call; its caller may be gone."""
        future = self._open.get(call_id)
        if future is not None and not future.done():
            future.set_exception(errors.RequestError(error))

    def end(self, call_id: int, answer: ResultT, error: errors.Error | None) -> None:
        """Completes a call, or fails it if there is an error."""
        if error is None:
            self.resolve(call_id, answer)
        else:
            self.reject(call_id, error)

    def fail_all(self) -> None:
        """Fails every call with `worker_lost`: no reply will come."""
        for call_id in self._open:
            self.reject(call_id, errors.make_error(errors.Code.WORKER_LOST))
