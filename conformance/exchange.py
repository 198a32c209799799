"""A reply subject of one's own: every message that has come there, decoded, and waiting for more."""

import asyncio
import json
from collections.abc import Callable, Sequence

import msgspec

from tokenbus.conformance.assertions import BrokenError, Message, shorten
from tokenbus.conformance.link import Received

DEFAULT_WAIT_S = 20.0
"""How long any one thing is waited for: less than a rule may take, so that the verdict says what did not come."""


def decode(payload: bytes, *, msgpack: bool) -> Message:
    """A message in the encoding that it must have. Raises BrokenError."""
    try:
        body = msgspec.msgpack.decode(payload) if msgpack else json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        label = "MessagePack" if msgpack else "JSON"
        raise BrokenError(f"a message that is no {label} ({error}): {shorten(payload)}") from error
    if not isinstance(body, dict):
        raise BrokenError(f"a message that is no map: {shorten(payload)}")
    return body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


class Exchange:
    """What has come to one subject so far."""

    def __init__(self, inbox: str, *, msgpack: bool, request_id: str | None = None) -> None:
        self.inbox = inbox
        self.request_id = request_id
        """The id that the request was sent with, if it had one."""
        self.received: list[Received] = []
        self._msgpack = msgpack
        self._messages: list[Message] = []
        self._fault: BrokenError | None = None
        self.num_tokens = 0
        """Sampled tokens that have been accounted for, repeats included."""
        self.is_ended = False
        """Whether a terminal has come."""
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Exchange {self.request_id} at {self.inbox}: {len(self.received)} messages>"

    @property
    def messages(self) -> list[Message]:
        """Raises BrokenError if one of them could not be decoded, or was the broker's notice that nobody listens."""
        if self._fault is not None:
            raise self._fault
        return self._messages

    @property
    def text(self) -> str:
        return "".join(str(message.get("text")) for message in self.messages)

    def take(self, received: Received) -> None:
        """Never raises, whatever has come: it is called by the loop that reads the connection."""
        self.received.append(received)
        try:
            if received.is_no_responders:
                raise BrokenError("nobody listens on the request's subject")
            self._count(decode(received.data, msgpack=self._msgpack))
        except BrokenError as fault:
            self._fault = self._fault or fault
        self._changed.set()

    def _count(self, message: Message) -> None:
        self._messages.append(message)
        tokens = message.get("tokens")
        self.num_tokens += tokens if isinstance(tokens, int) else 0
        self.is_ended = self.is_ended or message.get("finish_reason") is not None

    async def until(self, holds: Callable[[], bool], what: str, timeout_s: float = DEFAULT_WAIT_S) -> None:
        """Waits for something to hold. Raises BrokenError if it does not, saying what did not come."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    if self._fault is not None:
                        raise self._fault
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise BrokenError(f"{what} did not come within {timeout_s:g} s, {self._so_far()}") from None

    async def first(self, what: str, timeout_s: float = DEFAULT_WAIT_S) -> Message:
        """Waits for any message."""
        await self.until(lambda: bool(self.received), what, timeout_s)
        return self.messages[0]

    async def parts(self, what: str) -> list[Message]:
        """Waits for all parts of an answer that comes in parts."""
        first = await self.first(what)
        await self.until(lambda: len(self.received) >= first.get("parts", 1), f"every part of {what}")
        return self.messages

    async def tokens(self, count: int) -> None:
        """Waits until so many tokens have come, or the terminal."""
        await self.until(lambda: self.num_tokens >= count or self.is_ended, f"{count} tokens")

    async def terminal(self, timeout_s: float = DEFAULT_WAIT_S) -> Message:
        """Waits for the first terminal."""
        await self.until(lambda: self.is_ended, "a terminal", timeout_s)
        return next(message for message in self.messages if message.get("finish_reason") is not None)

    def _so_far(self) -> str:
        return f"only {len(self.received)} messages" if self.received else "nor anything else"


async def any_tokens(exchanges: Sequence[Exchange], count: int) -> None:
    """Waits until so many tokens, or the terminal, have come to any of the exchanges."""
    waits = [asyncio.create_task(exchange.tokens(count)) for exchange in exchanges]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    for wait in done:
        wait.result()
