"""Asks all routers how requests of one tenant went, and puts their answers together."""

import asyncio
import secrets
from typing import NamedTuple

from nats.aio.msg import Msg

from tokenbus.protocol.bus import bus
from tokenbus.protocol.wire import codec, errors, messages

_replies = codec.Decoder(messages.TraceReply)
_FIRST_S = 1.0
"""The time that the first router has."""
_OTHERS_S = 0.15
"""The time after an answer in which the next one must come."""
_MAX_ROUTERS = 256
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


def bare_id(given: str) -> str:
    """Returns a request's id without the beginning that it has in an HTTP API."""
    return next((given.removeprefix(one) for one in _PREFIXES if given.startswith(one)), given)


class RoutedTrace(NamedTuple):
    """A request, and the router that knows of it."""

    router_id: str
    trace: messages.RequestTrace


class Traces(NamedTuple):
    """The answers of all routers to one question."""

    requests: list[RoutedTrace]
    """The latest first."""
    router_ids: list[str]
    """The routers that have answered."""
    truncated: bool
    """Whether there are more requests like these."""

    def named(self, request_id: str) -> RoutedTrace | None:
        """Returns the request of exactly this id, else the latest one whose id begins with it, if there is one."""
        exact = [one for one in self.requests if one.trace.id == request_id]
        return next(iter(exact or self.requests), None)


class TraceReader:
    """One question to all routers."""

    def __init__(self, asked: messages.TraceRequest) -> None:
        self._asked = asked
        self._heard = asyncio.Event()
        self._answers: dict[str, messages.TraceReply] = {}
        self._problem = "no router answers"

    def __repr__(self) -> str:
        return f"<TraceReader of {self._asked.id}, {len(self._answers)} answers>"

    async def read(self, connection: bus.Bus, subject: str, inbox: str, encoding: codec.Encoding) -> Traces:
        """Publishes the question, and returns what comes within about a second. Raises RequestError if nothing does,
        and for what a router refuses."""

        def take(message: Msg) -> None:
            self._take(message, encoding)

        reply = f"{inbox}.{secrets.token_hex(8)}"
        subscription = await connection.subscribe(reply, take)
        try:
            connection.publish(subject, codec.encode(self._asked, encoding), reply, codec.content_headers(encoding))
            await self._wait()
        except (ConnectionError, bus.OutboundBufferLimitError) as error:
            raise errors.request_error(errors.Code.NO_WORKER, str(error)) from error
        finally:
            if connection.is_connected:
                await connection.unsubscribe(subscription)
        return self.result()

    def result(self) -> Traces:
        """Returns the answers so far. Raises RequestError if there is none."""
        for answer in self._answers.values():
            if answer.error:
                raise errors.RequestError(answer.error)
        if not self._answers:
            raise errors.request_error(errors.Code.NO_WORKER, self._problem)
        found = [RoutedTrace(name, one) for name, answer in self._answers.items() for one in answer.requests]
        found.sort(key=lambda one: -one.trace.received_at_ms)
        most = self._asked.limit or len(found)
        truncated = len(found) > most or any(answer.truncated for answer in self._answers.values())
        return Traces(found[:most], sorted(self._answers), truncated)

    async def _wait(self) -> None:
        timeout_s = _FIRST_S
        try:
            while not self._is_complete():
                self._heard.clear()
                async with asyncio.timeout(timeout_s):
                    await self._heard.wait()
                timeout_s = _OTHERS_S
        except TimeoutError:
            pass

    def _is_complete(self) -> bool:
        """Whether no other router can know more: the request that was asked for by its whole id is there."""
        found = (one for answer in self._answers.values() for one in answer.requests)
        return self._asked.id is not None and any(one.id == self._asked.id for one in found)

    def _take(self, message: Msg, encoding: codec.Encoding) -> None:
        if bus.is_no_responders(message):
            self._heard.set()
            return
        try:
            answer = _replies.decode(message.data, encoding)
        except errors.RequestError as error:  # of another version, or forged: the others are not to blame
            self._problem = f"a router's answer can't be read: {error.error.message}"
            return
        if not all(self._is_asked_for(one) for one in answer.requests):
            self._problem = "a router has answered with requests that were not asked for"
            return
        if len(self._answers) < _MAX_ROUTERS:
            self._answers[answer.router_id] = answer
        self._heard.set()

    def _is_asked_for(self, trace: messages.RequestTrace) -> bool:
        return self._asked.id is None or trace.id == self._asked.id or trace.id.startswith(f"{self._asked.id}-")
