"""Asks one question for all who want the answer, and keeps it for a moment."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from tokenbus.protocol import tasks

AnswerT = TypeVar("AnswerT")
KEEP_S = 1.0


class SharedAnswer(Generic[AnswerT]):
    """An answer that is at most a second old. Concurrent callers share it, or its failure."""

    def __init__(
        self, ask: Callable[[], Coroutine[Any, Any, AnswerT]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._asking: asyncio.Future[AnswerT] | None = None
        self._answered_at = 0.0

    def __repr__(self) -> str:
        return f"<SharedAnswer {self._asking}>"

    async def get(self) -> AnswerT:
        """Raises what the question raises."""
        asking = self._asking
        # A failure is kept like an answer, so that a router in trouble is not asked more often.
        if asking is None or (asking.done() and self._clock() - self._answered_at >= KEEP_S):
            asking = self._asking = tasks.awaited(self._ask())
            asking.add_done_callback(self._note)
        return await asyncio.shield(asking)  # a cancelled caller must not cancel the others

    def _note(self, asked: "asyncio.Future[AnswerT]") -> None:
        self._answered_at = self._clock()
        if not asked.cancelled():
            asked.exception()  # marks it as retrieved: all callers may have been cancelled
