"""The 32 streams of a round: each client sends its next request as soon as its stream has ended."""

import asyncio
import contextlib
import json
import math
import random
import secrets
import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
from nats.aio.msg import Msg

from tests.chaos.reading import Expected, Failure, Piece, Reading, Usage, expected_of
from tests.chaos.results import Ends
from tests.support.exact_client import cards
from tests.support.raw_client import PREFIX, RawClient
from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import messages

NUM_CLIENTS = {"library": 16, "plain": 12, "whole": 4}
ANIMALS = ("fox", "bear", "owl", "deer", "frog", "mouse", "wolf")
"""The animals of the stories; each story is requested again and again."""
SHORTEST_AT_START, SHORTEST = 0.1, 0.7
"""The smallest shares of a text that a client asks for, in its first request and in later ones. Lengths vary so that
streams do not all end at once."""
LOST_AFTER_S = 10.0
"""A stream without any message for this long is not waited for any more: there should be one every 5 s."""
IDLE_S = 3.0
"""If no worker has had a request for this long, the streams that are still open count as lost."""
_piece = msgspec.json.Decoder(Piece)
_NO_RESPONDERS = Piece(finish_reason="error", error=Failure("no_responders"))
"""The broker's notice that no router listens, as a message of the stream."""


def body(story: int, engine: str, num_tokens: int) -> dict[str, Any]:
    """Returns a request for a story. Its text is always the same; with the demo model, up to near ties."""
    sampling = {"temperature": 1.0, "seed": story} if engine == "sim" else {"temperature": 0.0, "ignore_eos": True}
    prompt = f"Once upon a time, when small steps went far and it was good to share, there was a {ANIMALS[story]}"
    return {"prompt": prompt, "max_tokens": num_tokens} | sampling


async def undisturbed(client: WireClient, engine: str, num_tokens: int) -> list[Expected]:
    """Requests every story once, and returns their texts."""
    logprobs = {"logprobs": 3} if engine == "demo" else {}
    return await asyncio.gather(
        *(
            _tell(client.generate("demo", **body(story, engine, num_tokens), **logprobs), num_tokens)
            for story in range(len(ANIMALS))
        )
    )


async def _tell(stream: ChunkStream, num_tokens: int) -> Expected:
    tokens: list[tuple[str, list[float]]] = []
    async for chunk in stream:
        if chunk.logprobs:
            # the end token has no text, and these streams never sample it
            tokens += [(one.text, [other.logprob for other in one.top if other.text]) for one in chunk.logprobs]
        else:  # each token of the simulated engine is a word
            tokens += [(f" {word}", []) for word in chunk.text.split()]
        if chunk.finish_reason is not None and chunk.finish_reason is not messages.FinishReason.LENGTH:
            raise RuntimeError(f"an undisturbed stream ended with {chunk}")
    told = expected_of(tokens)
    if told.num_tokens != num_tokens:
        raise RuntimeError(f"an undisturbed stream of {num_tokens} tokens had {told.num_tokens}")
    return told


class _Told:
    """One stream that a client reads or has read."""

    def __init__(self, client: str, request_id: str, reading: Reading, limit: asyncio.Timeout) -> None:
        self.client = client
        self.request_id = request_id
        """The request's id, which changes when the library resubmits the request."""
        self.reading = reading
        self.limit = limit
        """The timeout after which the client gives it up."""
        self.took_s: float | None = None
        """The time until its terminal."""
        self.was_cancelled = False


class Streams:
    """Keeps 32 streams open, and remembers how each of them ended."""

    def __init__(
        self,
        client: WireClient,
        bare: RawClient,
        texts: Sequence[Expected],
        engine: str,
        rng: random.Random,
        limit_s: float,
        cancels: float,
        *,
        num_http: int = 0,
        gateway_ports: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """A client gives up a stream from which nothing has come for `limit_s`, or for three times as long if it is not
        streamed. `cancels` is the share of the library's streams that are cancelled before their end. In addition to
        the 32 streams, `num_http` are requested from gateways of this machine."""
        self._client = client
        self._bare = bare
        self._texts = texts
        self._engine = engine
        self._limit_s = limit_s
        self._cancels = cancels
        self._num_clients = NUM_CLIENTS | ({"http": num_http} if num_http else {})
        self._gateway_ports = gateway_ports
        self._rng = rng
        self._name = secrets.token_hex(3)
        """Part of all request ids: workers remember the ids of earlier streams and cancels."""
        self._told: list[_Told] = []
        self._open: set[_Told] = set()
        self._finishing = False
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Streams {len(self._open)} open of {len(self._told)}>"

    def start(self) -> None:
        clients = [client for client, count in self._num_clients.items() for _ in range(count)]
        self._tasks = [asyncio.create_task(self._keep_asking(client, first)) for first, client in enumerate(clients)]

    async def finish(self) -> None:
        """Waits until all streams have ended; no new ones are started.

        Once no worker has had a request for a while, nothing more can come to clients that do not resubmit."""
        self._finishing = True
        idle_since: float | None = None
        while self._open:
            self._check()
            await asyncio.sleep(0.1)
            now = asyncio.get_running_loop().time()
            is_idle = not any(told.client == "library" for told in self._open) and await self._is_idle()
            idle_since = (idle_since or now) if is_idle else None
            if idle_since is not None and now - idle_since > IDLE_S:
                for told in self._open:
                    told.limit.reschedule(now)
                break
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def go_on(self, num_tokens: int) -> None:
        """Waits until every stream that can be watched has that many more tokens, has ended, or is lost."""
        wanted = {told: told.reading.num_tokens + num_tokens for told in self._open if told.client != "whole"}
        while wanted:
            self._check()
            await asyncio.sleep(0.05)
            lost_since = asyncio.get_running_loop().time() - LOST_AFTER_S
            wanted = {
                told: least
                for told, least in wanted.items()
                if told in self._open and told.reading.num_tokens < least and told.reading.last_message_at > lost_since
            }

    async def until_ended(self, count: int) -> None:
        """Waits until this many streams have ended, however they did."""
        while len(self._told) - len(self._open) < count:
            self._check()
            await asyncio.sleep(0.1)

    def open_ids(self) -> set[str]:
        """Returns the ids of the open streams."""
        return {told.request_id for told in self._open}

    def ends(self, accepted_ids: set[str]) -> dict[str, Ends]:
        """Returns how the streams of each kind of client have ended."""
        found = {client: Ends() for client in self._num_clients}
        for told in self._told:
            if told in self._open:  # the round was given up
                continue
            # the library and gateways always get an answer, or report why there is none
            was_accepted = told.client in ("library", "http") or told.request_id in accepted_ids
            found[told.client].add(told.reading, was_accepted=was_accepted, was_cancelled=told.was_cancelled)
        return found

    def problems(self, allowed: Collection[str]) -> list[str]:
        """Returns each stream that is wrong, has no terminal, or ended in an error that is not allowed."""
        fine = {"length", "cancelled", *allowed}
        ended = [one for one in self._told if one not in self._open]
        bad = [one for one in ended if one.reading.problem or one.reading.end not in fine]
        return [f"{one.client} {one.request_id}: {one.reading.problem or one.reading!r}" for one in bad]

    def gaps_ms(self) -> list[int]:
        return [round(1e3 * gap_s) for told in self._told_to("plain") for gap_s in told.reading.gaps_s]

    @property
    def longest_silence_s(self) -> float:
        return max((told.reading.longest_silence_s for told in self._told_to("plain")), default=0.0)

    @property
    def median_s(self) -> float:
        """The median time in which a stream reached its full length."""
        times_s = [one.took_s for one in self._told if one.took_s and one.reading.end == "length"]
        return statistics.median(times_s) if times_s else 0.0

    async def _is_idle(self) -> bool:
        loads = [card["load"] for card in await cards(self._bare)]
        return bool(loads) and not any(load["running"] + load["waiting"] for load in loads)

    def _told_to(self, client: str) -> list[_Told]:
        return [told for told in self._told if told.client == client]

    def _check(self) -> None:
        """Raises the error of a client's task, if any has failed."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _keep_asking(self, client: str, first: int) -> None:
        readers = {"library": self._read_library, "http": self._read_http}
        number, shortest = first, SHORTEST_AT_START
        while not self._finishing:
            story = number % len(ANIMALS)
            text = self._texts[story]
            expected = text.first(math.ceil(text.num_tokens * self._rng.uniform(shortest, 1.0)))
            fields = body(story, self._engine, expected.num_tokens) | {"id": f"{client}-{self._name}-{first}-{number}"}
            now = asyncio.get_running_loop().time()
            limit_s = self._limit_s if client != "whole" else 3 * self._limit_s
            told = _Told(client, fields["id"], Reading(expected, now), asyncio.timeout(limit_s))
            self._told.append(told)
            self._open.add(told)
            shortest = SHORTEST
            with contextlib.suppress(TimeoutError):
                async with told.limit:
                    await readers.get(client, self._read_plain)(told, fields)
                    told.took_s = asyncio.get_running_loop().time() - now
            self._open.remove(told)
            number += 1

    def _add(self, told: _Told, piece: Piece) -> None:
        """Adds a message to what a client has read. It is patient with a stream that makes progress, however slow."""
        now = asyncio.get_running_loop().time()
        told.reading.add(piece, now)
        if piece.text and told in self._open:
            with contextlib.suppress(RuntimeError):  # it has just expired
                told.limit.reschedule(now + self._limit_s)

    async def _read_library(self, told: _Told, fields: dict[str, Any]) -> None:
        stream = self._client.generate("demo", **fields)
        is_cancelled = self._rng.random() < self._cancels
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                told.request_id = stream.request_id
                self._add(told, _piece_of(chunk))
                if is_cancelled and chunk.text and not told.was_cancelled:
                    told.was_cancelled = True
                    stream.cancel()

    async def _read_plain(self, told: _Told, fields: dict[str, Any]) -> None:
        """Reads a stream like the client in the README. The subscription is kept after the terminal, to see that
        nothing follows."""
        ended = asyncio.Event()

        async def take(message: Msg) -> None:
            self._add(told, _piece.decode(message.data) if message.data else _NO_RESPONDERS)
            ended.set() if told.reading.terminal else None

        inbox = self._bare.nats.new_inbox()
        subscription = await self._bare.nats.subscribe(inbox, cb=take)
        payload = json.dumps(fields | {"stream": told.client == "plain"}).encode()
        await self._bare.nats.publish(f"{PREFIX}.generate.demo", payload, reply=inbox)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # the broker may be away
                await subscription.unsubscribe()
            raise

    async def _read_http(self, told: _Told, fields: dict[str, Any]) -> None:
        """Reads a completion of a gateway. Its chunks say nothing of offsets, so that a hole shows as a wrong text."""
        asked = {name: value for name, value in fields.items() if name != "id"}
        payload = msgspec.json.encode(
            asked | {"model": "demo", "stream": True, "stream_options": {"include_usage": True}}
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: {len(payload)}\r\nConnection: close"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._rng.choice(self._gateway_ports()))
        offset, finish_reason = 0, None
        try:
            writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + payload)
            status = (await reader.readline()).split()[1:2]
            async for line in reader:
                if not line.startswith((b"data: {", b"{")):  # what frames events and chunks; an error is a line of JSON
                    continue
                event = _http_event.decode(line.removeprefix(b"data: "))
                if event.error is not None or status != [b"200"]:
                    self._add(told, Piece(finish_reason="error", error=Failure(f"http {status}", line.decode())))
                    return
                for choice in event.choices:
                    finish_reason = choice.finish_reason or finish_reason
                    if choice.text:
                        self._add(told, Piece(tokens=1, text_offset=offset, text=choice.text))
                        offset += len(choice.text.encode())
                if event.usage is not None:
                    self._add(told, Piece(text_offset=offset, finish_reason=finish_reason, usage=event.usage))
                    return
            self._add(told, Piece(finish_reason="error", error=Failure("http connection cut")))
        finally:
            writer.close()


class _HttpChoice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _HttpEvent(msgspec.Struct):
    """The parts of an event of a gateway's stream that are read, or of its error."""

    choices: list[_HttpChoice] = []
    usage: Usage | None = None
    error: Any = None


_http_event = msgspec.json.Decoder(_HttpEvent)


def _piece_of(chunk: messages.Chunk) -> Piece:
    return msgspec.convert(msgspec.to_builtins(chunk), Piece)
