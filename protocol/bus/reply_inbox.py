"""The inbox for the replies to one connection's requests: one subscription, and a future for each open request."""

import asyncio
import secrets
from collections.abc import Callable

from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import (
    Bus,
    NoRespondersError,
    OutboundBufferLimitError,
    Outgoing,
    PayloadTooLargeError,
    Subscription,
    is_no_responders,
)


class ReplyInbox:
    """Sends requests, and finds the one that a reply is for by its subject. Nobody can guess the reply subject of a
    request that was not sent to them."""

    def __init__(self, connection: Bus, to_reply: Callable[[str], str]) -> None:
        """`to_reply` makes a reply subject from a token, or the pattern matching all from an asterisk."""
        self._connection = connection
        self._to_reply = to_reply
        self._waiting: dict[str, tuple[asyncio.Future[Msg], asyncio.TimerHandle, str]] = {}
        """The requests without a reply, the timers that end them, and their subjects, by reply subject. One that was
        cancelled stays until its timer ends it."""
        self._subscribing = asyncio.Lock()
        self._subscription: Subscription | None = None

    def __repr__(self) -> str:
        return f"<ReplyInbox of {self.num_waiting} requests>"

    @property
    def num_waiting(self) -> int:
        """The requests without a reply, those that were cancelled included until their time is over."""
        return len(self._waiting)

    async def open(self) -> None:
        """Subscribes, the first time that it is called."""
        async with self._subscribing:
            if self._subscription is None:
                self._subscription = await self._connection.subscribe(self._to_reply("*"), self._take)

    async def close(self) -> None:
        """Unsubscribes: open requests get no reply."""
        if self._subscription is not None:
            await self._connection.unsubscribe(self._subscription)

    def request(self, message: Outgoing, timeout_s: float) -> "asyncio.Future[Msg]":
        """Sends a request, once the inbox is open; returns its first reply, which may be cancelled.

        Its errors are NoRespondersError, TimeoutError, PayloadTooLargeError, and ConnectionError if nothing could be
        sent."""
        assert self._subscription is not None, self
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Msg] = loop.create_future()
        subject = self._to_reply(secrets.token_hex(8))
        try:
            self._connection.publish(message.subject, message.payload, subject, message.headers)
        except (PayloadTooLargeError, ConnectionError) as error:
            reply.set_exception(error)
        except OutboundBufferLimitError as error:
            reply.set_exception(ConnectionError(str(error)))
        else:
            timer = loop.call_later(timeout_s, self._time_out, subject, timeout_s)
            self._waiting[subject] = reply, timer, message.subject
        return reply

    def _take(self, message: Msg) -> None:
        waiting = self._waiting.pop(message.subject, None)
        if waiting is None:
            return
        reply, timer, asked = waiting
        timer.cancel()
        if reply.done():
            return
        if is_no_responders(message):
            reply.set_exception(NoRespondersError(asked))
        else:
            reply.set_result(message)

    def forbid(self, words: str, advice: str) -> None:
        """Ends the requests whose subject the broker forbids, as `words` say, with ConnectionError."""
        forbidden = words.lower()  # nats-py reports the subject in lower case
        denied = [subject for subject, (_, _, asked) in self._waiting.items() if f'"{asked}"'.lower() in forbidden]
        for subject in denied:
            reply, timer, _ = self._waiting.pop(subject)
            timer.cancel()
            if not reply.done():
                reply.set_exception(ConnectionError(f"{words}: {advice}"))

    def _time_out(self, subject: str, timeout_s: float) -> None:
        reply, _, asked = self._waiting.pop(subject)
        if not reply.done():
            reply.set_exception(TimeoutError(f"no reply on {asked} within {timeout_s} s"))
