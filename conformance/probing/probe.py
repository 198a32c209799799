"""A rule's raw client: sends requests, collects the replies, and cleans up after itself."""

import asyncio
import itertools
import json
import secrets
from typing import NamedTuple

import msgspec
from nats.aio.subscription import Subscription

from tokenbus.conformance.probing import schemas
from tokenbus.conformance.probing.assertions import Message, SkippedError, shorten
from tokenbus.conformance.probing.exchange import DEFAULT_WAIT_S, Exchange
from tokenbus.conformance.probing.link import ProbeLink
from tokenbus.protocol.wire import subjects

MSGPACK = "application/msgpack"
PROMPT = "Once upon a time"
_LONG_TOKENS = 2_000
"""The length of a stream that must run for seconds, even on a fast engine."""
_ROOM_FOR_PROMPT = 64
"""Tokens of the context left for the prompt."""


class ProbeTarget(NamedTuple):
    """The model to check, as the models reply describes it."""

    model: str
    context_length: int
    worker_ids: tuple[str, ...]
    max_request_bytes: int
    max_upload_bytes: int
    """0 if the reply gives none."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters that are loaded for this tenant."""


class Probe:
    """One rule's own client. Closing it cancels every request it has started."""

    def __init__(
        self,
        link: ProbeLink,
        names: subjects.Subjects,
        tenant: str,
        inbox_prefix: str,
        target: ProbeTarget,
        wait_s: float = DEFAULT_WAIT_S,
    ) -> None:
        self.link = link
        self.names = names
        self.tenant = tenant
        self.inbox_prefix = inbox_prefix
        self.target = target
        self._wait_s = wait_s
        self.used_subjects: set[str] = set()
        """All subjects published or subscribed to, to detect interfering permissions."""
        self._nonce = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._subscriptions: dict[str, Subscription] = {}
        self._started: list[tuple[str, Exchange]] = []

    def __repr__(self) -> str:
        return f"<Probe {self._nonce}, {len(self._started)} requests>"

    def new_id(self) -> str:
        return f"wire-check-{self._nonce}-{next(self._numbers)}"

    def require_workers(self) -> tuple[str, ...]:
        """Returns the workers' names. Raises SkippedError if the models reply has none."""
        if not self.target.worker_ids:
            raise SkippedError("the models reply names no workers")
        return self.target.worker_ids

    @property
    def subject(self) -> str:
        """The subject of this tenant's generate requests."""
        return self.names.generate(self.target.model, self.tenant)

    async def send(
        self,
        body: bytes | Message,
        *,
        subject: str | None = None,
        content_type: str | None = None,
        inbox: str | None = None,
        tenant: str | None = None,
    ) -> Exchange:
        """Publishes a request, with a new reply subject unless `inbox` is given."""
        tenant = tenant or self.tenant
        msgpack = (content_type or "").lower().startswith(MSGPACK)
        request_id = body.get("id") if isinstance(body, dict) else None
        exchange = await self.listen(inbox or self.link.new_inbox(), msgpack=msgpack, request_id=request_id)
        if subject is None and schemas.REQUEST_ID.holds(request_id):
            self._started.append((self.cancel_subject(str(request_id), tenant), exchange))
        payload = body if isinstance(body, bytes) else _encode(body, msgpack=msgpack)
        headers = {"Content-Type": content_type} if content_type else None
        to = subject or self.names.generate(self.target.model, tenant)
        await self.publish(to, payload, exchange.inbox, headers)
        return exchange

    async def ask(
        self, body: bytes | Message, *, content_type: str | None = None, tenant: str | None = None
    ) -> Exchange:
        """Sends a generate request and waits for its terminal."""
        exchange = await self.send(body, content_type=content_type, tenant=tenant)
        await exchange.terminal()
        return exchange

    async def short(self, max_tokens: int = 16, **fields: object) -> Exchange:
        """Runs a whole short stream of exactly `max_tokens` tokens, and returns it."""
        return await self.ask(short_request(max_tokens, **fields))

    @property
    def long_tokens(self) -> int:
        """The length of a stream that runs for a long time."""
        return max(1, min(_LONG_TOKENS, self.target.context_length - _ROOM_FOR_PROMPT))

    def long_request(self, **fields: object) -> Message:
        """Returns a request with an id and a long-running stream."""
        return {"id": self.new_id(), **short_request(self.long_tokens), **fields}

    async def live(self, *, inbox: str | None = None, tenant: str | None = None, **fields: object) -> Exchange:
        """Starts a long stream with an id and waits for its first tokens."""
        exchange = await self.send(self.long_request(**fields), inbox=inbox, tenant=tenant)
        if fields.get("stream") is not False:
            await exchange.tokens(4)
        return exchange

    async def call(self, subject: str, body: bytes | Message = b"", *, content_type: str | None = None) -> Message:
        """Sends a client's message and returns the first reply."""
        exchange = await self.send(body, subject=subject, content_type=content_type)
        return await exchange.first(f"a reply on {subject}")

    async def send_internal(self, subject: str, body: bytes | Message = b"") -> Exchange:
        """Sends a message between routers and workers, which is MessagePack without a Content-Type."""
        exchange = await self.listen(self.link.new_inbox(), msgpack=True)
        await self.publish(subject, body if isinstance(body, bytes) else _encode(body, msgpack=True), exchange.inbox)
        return exchange

    async def call_internal(self, subject: str, body: bytes | Message = b"") -> Message:
        """Sends an internal message and returns the first reply."""
        exchange = await self.send_internal(subject, body)
        return await exchange.first(f"a reply on {subject}")

    async def is_answered(self, subject: str, body: bytes | Message = b"", within_s: float = 0.6) -> bool:
        """Returns whether anyone other than the broker replies to a message."""
        exchange = await self.send(body, subject=subject)
        await asyncio.sleep(within_s)
        return any(not received.is_no_responders for received in exchange.received)

    async def listen(self, subject: str, *, msgpack: bool, request_id: str | None = None) -> Exchange:
        """Collects the messages on a subject from now on."""
        exchange = Exchange(subject, msgpack=msgpack, request_id=request_id, wait_s=self._wait_s)
        self.used_subjects.add(subject)
        self._subscriptions[subject] = await self.link.subscribe(subject, exchange.take)
        return exchange

    async def stop_listening(self, exchange: Exchange) -> None:
        """Unsubscribes like a client that goes away."""
        await self.link.unsubscribe(self._subscriptions.pop(exchange.inbox))
        await self.link.flush()

    async def publish(
        self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        self.used_subjects.add(subject)
        await self.link.publish(subject, payload, reply, headers)

    def cancel_subject(self, request_id: str, tenant: str | None = None) -> str:
        return self.names.cancel(request_id, tenant or self.tenant)

    def resync_subject(self, request_id: str, tenant: str | None = None) -> str:
        return self.names.resync(request_id, tenant or self.tenant)

    async def cancel(self, exchange: Exchange) -> None:
        """Cancels a stream and waits for its terminal."""
        assert exchange.request_id is not None, exchange
        await self.publish(self.cancel_subject(exchange.request_id), b"")
        await exchange.terminal()

    async def close(self) -> None:
        """Cancels the running streams, and unsubscribes from everything."""
        for subject, exchange in self._started:
            if not exchange.is_ended:
                await self.link.publish(subject, b"")
        for subscription in self._subscriptions.values():
            await self.link.unsubscribe(subscription)


def short_request(max_tokens: int = 16, **fields: object) -> Message:
    """Returns a request for exactly `max_tokens` tokens, sampled greedily."""
    return {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **fields}


def skip_if_unsupported(terminal: Message) -> None:
    """Raises SkippedError if the model does not support the request."""
    error = terminal.get("error")
    if isinstance(error, dict) and error.get("code") == "unsupported":
        raise SkippedError(f"the model does not support that: {shorten(error.get('message'))}")


def _encode(body: Message, *, msgpack: bool) -> bytes:
    return msgspec.msgpack.encode(body) if msgpack else json.dumps(body).encode()
