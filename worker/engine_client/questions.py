"""Questions to an engine, beside its streams, that it has not answered yet."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from tokenbus.protocol.wire import errors

Answer = TypeVar("Answer")


class Questions(Generic[Answer]):
    """Of one kind, each with a ticket."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._last_ticket = 0

    def __repr__(self) -> str:
        return f"<Questions {len(self._open)} open>"

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, send: Callable[[int], None]) -> Answer:
        """Has `send` carry the question under its ticket, and waits for its answer. Raises the RequestError that it is
        refused with."""
        self._last_ticket += 1
        ticket = self._last_ticket
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[ticket] = future
        try:
            send(ticket)
            return await future
        finally:
            del self._open[ticket]

    def answer(self, ticket: int, answer: Answer) -> None:
        """The engine has answered; who asked may have gone meanwhile."""
        future = self._open.get(ticket)
        if future is not None and not future.done():
            future.set_result(answer)

    def refuse(self, ticket: int, error: errors.Error) -> None:
        """Likewise."""
        future = self._open.get(ticket)
        if future is not None and not future.done():
            future.set_exception(errors.RequestError(error))

    def lose(self) -> None:
        """Nobody will answer any more."""
        for ticket in self._open:
            self.refuse(ticket, errors.make_error(errors.Code.WORKER_LOST))
