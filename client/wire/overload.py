"""Asks again where a router says that it is asked too much."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tokenbus.protocol.wire import errors

AnswerT = TypeVar("AnswerT")


async def ask_again(ask: Callable[[], Awaitable[AnswerT]], timeout_s: float) -> AnswerT:
    """Returns the first answer that is no `overloaded`. Raises RequestError: that one too if there is no time left."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            return await ask()
        except errors.RequestError as refusal:
            wait_s = (refusal.error.retry_after_ms or 0.0) / 1e3
            if refusal.error.code is not errors.Code.OVERLOADED or time.monotonic() + wait_s >= until:
                raise
            await asyncio.sleep(wait_s)
