"""Streams that run over and over at each site, and what became of each of them.

Half are of the library, half of plain clients, which only join the texts that they are sent. Half ask for a model that
every site serves, half for one that only one site serves, so that there are always streams that cross a link."""

import asyncio
import collections
import itertools
import secrets
import time
from dataclasses import dataclass, field

import msgspec
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.errors import SlowConsumerError

from bench.paired import quartiles
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import subjects

NAMES = subjects.Subjects()
_SILENCE_S = 90.0
"""After which a plain client has no hope of an end."""
_RETRY_S = 0.2
_STANDSTILL_S = 1.0
_PROMPT = "Once upon a time"


class _Part(msgspec.Struct):
    """The fields of a chunk that a plain client reads."""

    offset: int
    tokens: int
    finish_reason: str | None
    worker_id: str | None = None
    error: dict[str, object] | None = None


@dataclass
class Record:
    """One stream."""

    site: str
    model: str
    is_plain: bool
    crosses: bool
    """Whether its worker is at another site than its client."""
    began_at: float
    request_id: str = field(default_factory=secrets.token_urlsafe)
    """The id of its request; the library continues some under further ids."""
    ended_at: float | None = None
    end: str = ""
    """Its finish reason or the code of its error; `nothing` if no end came."""
    trouble: str = ""
    """What went wrong in its own client meanwhile, which may have cost it messages."""
    was_accepted: bool = False
    """Whether a plain client has heard of a worker that has it."""
    tokens: int = 0
    missing: int = 0
    """Tokens that a plain client has missed."""
    repeated: int = 0
    """Tokens that a plain client has read twice."""
    heard_at: list[float] = field(default_factory=list)
    """When each part with tokens came."""

    @property
    def first_s(self) -> float | None:
        return self.heard_at[0] - self.began_at if self.heard_at else None

    @property
    def is_lost(self) -> bool:
        """Whether it has begun and ended before its time, or not at all, though its client was there."""
        return self.has_begun and self.end != "length" and not self.trouble

    @property
    def has_begun(self) -> bool:
        """Whether a worker has accepted it: others have an error at once, or no answer."""
        return self.was_accepted or bool(self.heard_at) or self.end == "length"

    @property
    def pause_s(self) -> float:
        """The longest time from token to token."""
        return max((after - before for before, after in itertools.pairwise(self.heard_at)), default=0.0)


class Place:
    """The clients of one site."""

    def __init__(self, site: str, url: str, max_tokens: int) -> None:
        self.records: list[Record] = []
        self.dropped_at: list[float] = []
        """When the plain clients' own connection broke: they miss what is sent meanwhile."""
        self.overrun_at: list[float] = []
        """When their own library discarded messages that they had not read in time."""
        self.site = site
        self._url = url
        self._max_tokens = max_tokens
        self._bus = Nats()
        self._library: WireClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stood_still_until = 0.0

    async def open(self) -> None:
        async def on_error(error: Exception) -> None:
            """Also takes what nats-py would print about a broker that is away."""
            if isinstance(error, SlowConsumerError):
                self.overrun_at.append(time.monotonic())

        async def note() -> None:
            self.dropped_at.append(time.monotonic())

        await self._bus.connect(
            self._url, max_reconnect_attempts=-1, reconnect_time_wait=1, error_cb=on_error, disconnected_cb=note
        )
        self._library = await WireClient.connect(self._url)
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _watch(self) -> None:
        """Notes when this process itself has stood still, so that brokers drop its connections."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.1)
            if time.monotonic() - began >= _STANDSTILL_S:
                self._stood_still_until = time.monotonic()

    @property
    def library(self) -> WireClient:
        assert self._library is not None
        return self._library

    def trouble_since(self, began_at: float, *, plain: bool) -> str:
        """Returns what went wrong in the clients themselves, so that they have missed messages; empty if nothing did.
        The library makes up for anything but being away for so long that it counts as gone."""
        if self._stood_still_until >= began_at:
            return "the bench itself stood still"
        if not plain:
            return ""
        if any(at >= began_at for at in self.dropped_at):
            return "their own connection broke"
        return "they discarded unread messages" if any(at >= began_at for at in self.overrun_at) else ""

    def run(self, model: str, *, plain: bool, crosses: bool) -> None:
        """Begins a stream, and another one whenever it has ended."""
        self._tasks.append(asyncio.create_task(self._repeat(model, plain, crosses)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.library.close()
        await self._bus.close()

    async def _repeat(self, model: str, plain: bool, crosses: bool) -> None:
        while True:
            record = Record(self.site, model, plain, crosses, time.monotonic())
            self.records.append(record)
            await (self._plain(record) if plain else self._of_library(record))
            record.ended_at = time.monotonic()
            record.trouble = self.trouble_since(record.began_at, plain=plain)
            if record.end != "length":
                await asyncio.sleep(_RETRY_S)

    async def _of_library(self, record: Record) -> None:
        stream = self.library.generate(
            record.model, id=record.request_id, prompt=_PROMPT, ignore_eos=True, max_tokens=self._max_tokens
        )
        async for chunk in stream:
            if chunk.tokens:
                record.heard_at.append(time.monotonic())
                record.tokens += chunk.tokens
            if chunk.finish_reason is not None:
                record.end = str(chunk.error.code if chunk.error else chunk.finish_reason)
        record.missing = self._max_tokens - record.tokens if record.end == "length" else 0

    async def _plain(self, record: Record) -> None:
        parts: asyncio.Queue[_Part] = asyncio.Queue()
        decoder = msgspec.json.Decoder(_Part)

        async def take(message: Msg) -> None:
            if message.data:
                parts.put_nowait(decoder.decode(message.data))
            else:  # no router is listening
                parts.put_nowait(_Part(0, 0, "error", error={"code": "no_router"}))

        inbox = self._bus.new_inbox()
        listening = await self._bus.subscribe(inbox, cb=take)
        body = {"id": record.request_id, "prompt": _PROMPT, "ignore_eos": True, "max_tokens": self._max_tokens}
        await self._bus.publish(NAMES.generate(record.model), msgspec.json.encode(body), inbox)
        read_to = 0
        try:
            while not record.end:
                async with asyncio.timeout(_SILENCE_S):
                    part = await parts.get()
                record.was_accepted |= bool(part.tokens or part.worker_id)
                if part.tokens:
                    record.heard_at.append(time.monotonic())
                    record.missing += max(0, part.offset - read_to)
                    record.repeated += max(0, read_to - part.offset)
                    read_to = part.offset + part.tokens
                    record.tokens += part.tokens
                if part.finish_reason is not None:
                    record.end = str(part.error["code"]) if part.error else part.finish_reason
        except TimeoutError:
            record.end = "nothing"
        finally:
            await listening.unsubscribe()


def told(ran: list[Record], began_at: float) -> list[str]:
    """Returns lines about the streams that ran during an event, which began at that time."""
    return [_of(ran, plain=False), _of(ran, plain=True), _times(ran, began_at)]


def _of(ran: list[Record], *, plain: bool) -> str:
    mine = [one for one in ran if one.is_plain is plain]
    begun = [one for one in mine if one.has_begun]
    refused = [one for one in mine if one not in begun and one.ended_at is not None]
    whole = [one for one in begun if one.end == "length"]
    text = f"{len(whole)} of {len(begun)} {'plain' if plain else 'library'} streams whole"
    if ends := collections.Counter(one.end or "still running" for one in begun if one.is_lost):
        text += f"; lost: {', '.join(f'{count} {end}' for end, count in ends.items())}"
    for trouble, count in collections.Counter(one.trouble for one in begun if one not in whole and one.trouble).items():
        text += f"; {count} not, since {trouble}"
    if flawed := [one for one in whole if one.missing or one.repeated]:
        missing, repeated = max(one.missing for one in flawed), max(one.repeated for one in flawed)
        text += f"; of the whole ones {len(flawed)} with at most {missing} tokens missing and {repeated} twice"
    if refused:
        codes = ", ".join(sorted({one.trouble or one.end for one in refused}))
        text += f"; {len(refused)} refused or not answered ({codes})"
    return text


def _times(ran: list[Record], began_at: float) -> str:
    longest = max((one.pause_s for one in ran), default=0.0)
    late = sum(one.pause_s > 1.0 for one in ran)
    firsts = [
        f"{1e3 * quartiles(times).median:.0f} ms ({where}, at most {max(times):.1f} s)"
        for where, crosses in (("at their own site", False), ("from another site", True))
        if (
            times := [one.first_s for one in ran if one.began_at >= began_at and one.first_s and one.crosses is crosses]
        )
    ]
    return f"first token {', '.join(firsts)}; longest pause {longest:.1f} s, {late} streams with one over 1 s"
