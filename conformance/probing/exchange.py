"""One reply subject: collects and decodes every message that arrives there, and waits for more."""

import asyncio
import json
from collections.abc import Callable, Sequence

import msgspec

from tokenbus.conformance.probing.assertions import BrokenError, Message, shorten
from tokenbus.conformance.probing.link import Received
from tokenbus.protocol import tasks

DEFAULT_WAIT_S = 20.0
"""Without the message that a rule waits for, after which the rule is broken."""


def decode(payload: bytes, *, msgpack: bool) -> Message:
    """Decodes a message in the encoding it must have. Raises BrokenError."""
    try:
        body = msgspec.msgpack.decode(payload) if msgpack else json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        label = "MessagePack" if msgpack else "JSON"
        raise BrokenError(f"a message that is not {label} ({error}): {shorten(payload)}") from error
    if not isinstance(body, dict):
        raise BrokenError(f"a message that is not a map: {shorten(payload)}")
    return body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


class Exchange:
    """The messages received on one subject so far."""

    def __init__(
        self, inbox: str, *, msgpack: bool, request_id: str | None = None, wait_s: float = DEFAULT_WAIT_S
    ) -> None:
        self.inbox = inbox
        self._wait_s = wait_s
        self.request_id = request_id
        """The request's id, if it has one."""
        self.received: list[Received] = []
        self._msgpack = msgpack
        self._messages: list[Message] = []
        self._fault: BrokenError | None = None
        self.num_tokens = 0
        """Sampled tokens in all messages, including replayed ones."""
        self.is_ended = False
        """Whether a terminal has arrived."""
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Exchange {self.request_id} at {self.inbox}: {len(self.received)} messages>"

    @property
    def messages(self) -> list[Message]:
        """The decoded messages. Raises BrokenError if one could not be decoded, or the request had no subscriber."""
        if self._fault is not None:
            raise self._fault
        return self._messages

    @property
    def pairs(self) -> list[tuple[Received, Message]]:
        """Each message, both as received and decoded."""
        return list(zip(self.received, self.messages, strict=True))

    @property
    def text(self) -> str:
        return "".join(str(message.get("text")) for message in self.messages)

    def take(self, received: Received) -> None:
        """Adds a message. Never raises, since the connection's read loop calls it."""
        self.received.append(received)
        try:
            if received.is_no_responders:
                raise BrokenError("the request's subject has no subscribers")
            self._count(decode(received.data, msgpack=self._msgpack))
        except BrokenError as fault:
            self._fault = self._fault or fault
        self._changed.set()

    def _count(self, message: Message) -> None:
        self._messages.append(message)
        tokens = message.get("tokens")
        self.num_tokens += tokens if isinstance(tokens, int) else 0
        self.is_ended = self.is_ended or message.get("finish_reason") is not None

    async def until(
        self, holds: Callable[[], bool], what: str, timeout_s: float | None = None, *, of_silence: bool = False
    ) -> None:
        """Waits until a condition holds, at most for a time; with `of_silence`, for that time after the latest message.
        Raises BrokenError naming what did not arrive in time."""
        timeout_s = timeout_s or self._wait_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                # Clearing before waiting can't lose a message: nothing else runs in between.
                while not holds():
                    if self._fault is not None:
                        raise self._fault
                    self._changed.clear()
                    await self._changed.wait()
                    if of_silence:
                        limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
        except TimeoutError:
            after = f"{timeout_s:g} s of silence" if of_silence else f"{timeout_s:g} s"
            raise BrokenError(f"{what} did not arrive within {after}, {self._so_far()}") from None

    async def first(self, what: str, timeout_s: float | None = None) -> Message:
        """Waits for the first message and returns it."""
        await self.until(lambda: bool(self.received), what, timeout_s)
        return self.messages[0]

    async def parts(self, what: str) -> list[Message]:
        """Waits for all parts of a multi-part reply."""
        first = await self.first(what)
        await self.until(lambda: len(self.received) >= first.get("parts", 1), f"every part of {what}")
        return self.messages

    async def tokens(self, count: int) -> None:
        """Waits until `count` tokens or the terminal have arrived."""
        await self.until(lambda: self.num_tokens >= count or self.is_ended, f"{count} tokens", of_silence=True)

    async def terminal(self, timeout_s: float | None = None) -> Message:
        """Waits for the first terminal and returns it. A slow stream may take as long as its rule."""
        await self.until(lambda: self.is_ended, "a terminal", timeout_s, of_silence=True)
        return next(message for message in self.messages if message.get("finish_reason") is not None)

    def _so_far(self) -> str:
        return f"only {len(self.received)} messages" if self.received else "and nothing else did"


async def any_tokens(exchanges: Sequence[Exchange], count: int) -> None:
    """Waits until `count` tokens or the terminal have arrived on one of the exchanges."""
    waits = [tasks.awaited(exchange.tokens(count)) for exchange in exchanges]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    for wait in done:
        wait.result()
