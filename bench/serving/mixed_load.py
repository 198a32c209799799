"""A running system, and clients that ask it for everything that the API has."""

import asyncio
import collections
import contextlib
import itertools
import json
import random
import string
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import errors, messages

_SENTENCES = ("The fox and the river met again. ", "What is 20 + 22? ", "Überall dröhnt's, 夏の川 🦊. ", "def f(x): ")
_WORDS = [first + last for first in string.ascii_lowercase for last in ("olar", "ino", "ump")]


class Answer(NamedTuple):
    status: int
    body: bytes
    """The part of it that was read."""


class Fleet:
    """A running `tokenbus up`."""

    def __init__(self, pid: int, said: dict[str, Any], keys: list[str]) -> None:
        self.pid = pid
        self.nats_url: str = said["nats"]
        self.keys = keys
        """Keys of three tenants, and one that allows few requests."""
        self.operator: str = said["key"]
        address = urlsplit(said["http"])
        self._place = (address.hostname, address.port)
        self._pages = {name: urlsplit(url) for name, url in said["metrics"].items()}

    async def ask(self, path: str, body: object = None, key: str = "", *, cut: int = 0, pause_s: float = 0.0) -> Answer:
        """Sends one HTTP request; closes the connection after `cut` pieces of the answer, and pauses before each."""
        return await _http(*self._place, path, body, key or self.keys[0], cut, pause_s)

    async def num_tasks(self) -> dict[str, int]:
        """Returns the asyncio tasks of each process that shows them."""
        pages = {name: await _http(page.hostname, page.port, "/status") for name, page in self._pages.items()}
        return {name: json.loads(page.body)["tasks"] for name, page in pages.items()}


async def _http(
    host: str | None, port: int | None, path: str, body: object = None, key: str = "", cut: int = 0, pause_s: float = 0
) -> Answer:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=4_096)
    try:
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nAuthorization: Bearer {key}\r\n\r\n"
        writer.write(head.encode() + data)
        began = time.monotonic()
        line = await reader.readline()
        if not line:
            raise ConnectionResetError(f"{path} was closed without an answer after {time.monotonic() - began:.1f} s")
        status = int(line.split()[1])
        read = []
        for number in itertools.count(1):
            await asyncio.sleep(pause_s)
            piece = await reader.read(1_000 if pause_s else 65_536)
            read.append(piece)
            if not piece or number == cut:
                return Answer(status, b"".join(read).partition(b"\r\n\r\n")[2])
        raise AssertionError
    finally:
        writer.close() if not cut else writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class Load:
    """Clients that together send requests at a given rate, at random times; fewer while all wait for answers."""

    def __init__(self, fleet: Fleet, client: WireClient) -> None:
        self._fleet = fleet
        self._client = client
        self.ends: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._next_at = 0.0
        self._kinds: list[tuple[Callable[[random.Random], Awaitable[str]], int]] = [
            (self._complete, 6),
            (self._chat, 6),
            (self._go_away, 4),
            (self._read_slowly, 1),
            (self._constrain, 4),
            (self._call_tools, 2),
            (self._choices, 2),
            (self._embed, 2),
            (self._respond, 2),
            (self._other_dialects, 2),
            (self._be_refused, 4),
            (self._console, 1),
            (self._adapter, 1),
            (self._over_nats, 8),
        ]

    async def run(self, num_clients: int, rate: float, seconds: float) -> None:
        """Puts the load on the system for a time; `rate` is requests a second."""
        self._next_at = time.monotonic()
        ends_at = self._next_at + seconds
        await asyncio.gather(*(self._live(random.Random(seed), rate, ends_at) for seed in range(num_clients)))

    async def _live(self, rng: random.Random, rate: float, ends_at: float) -> None:
        kinds, weights = zip(*self._kinds, strict=True)
        while (at := max(self._next_at, time.monotonic())) < ends_at:
            self._next_at = at + rng.expovariate(rate)
            await asyncio.sleep(at - time.monotonic())
            (kind,) = rng.choices(kinds, weights)
            name = kind.__name__.strip("_")
            try:
                async with asyncio.timeout(120):
                    end = await kind(rng)
            except (OSError, TimeoutError, errors.RequestError) as error:
                end = f"failed: {error!r} at {time.strftime('%X')}"
            if end.startswith("failed") and len(self.wrong) < 10:
                self.wrong.append(f"{name} {end}")
            self.ends[f"{name} {'failed' if end.startswith('failed') else end}"] += 1

    async def _post(self, rng: random.Random, path: str, body: Mapping[str, object], **how: Any) -> str:
        """Sends a request of one of the tenants, which is answered or refused because all is full."""
        answer = await self._fleet.ask(path, {"model": "demo"} | dict(body), rng.choice(self._fleet.keys[:3]), **how)
        return _expect(answer, 200, 429, 503)

    async def _complete(self, rng: random.Random) -> str:
        body = {"prompt": _text(rng), "max_tokens": rng.choice([1, 8, 40, 200]), "ignore_eos": True}
        body |= rng.choice([{}, {"stream": True}, {"echo": True, "logprobs": 2}, {"cache_salt": "s"}, {"priority": 3}])
        return await self._post(rng, "/v1/completions", body)

    async def _chat(self, rng: random.Random) -> str:
        turns = [{"role": ("user", "assistant")[place % 2], "content": _text(rng, 3)} for place in range(1, 6)]
        body = {"messages": [{"role": "user", "content": _text(rng)}, *turns[: 2 * rng.randrange(3)]], "max_tokens": 60}
        return await self._post(rng, "/v1/chat/completions", body | {"stream": rng.random() < 0.7})

    async def _go_away(self, rng: random.Random) -> str:
        body = {"prompt": _text(rng), "max_tokens": 500, "ignore_eos": True, "stream": True}
        return await self._post(rng, "/v1/completions", body, cut=rng.randrange(1, 8))

    async def _read_slowly(self, rng: random.Random) -> str:
        body = {"prompt": _text(rng), "max_tokens": 300, "ignore_eos": True, "stream": True}
        return await self._post(rng, "/v1/completions", body, pause_s=0.05)

    async def _constrain(self, rng: random.Random) -> str:
        names = rng.sample(_WORDS, rng.choice([1, 2, 4, 6, 60]))  # mostly new to the engine; 60 are not small
        fields = {name: {"type": "integer"} for name in names}
        schema = {"type": "object", "properties": fields, "required": names, "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
        regex = f"({'|'.join(names)})+[0-9]{{2}}"
        constraint: dict[str, object] = rng.choice([{"response_format": form}, {"regex": regex}, {"choice": names}])
        body = {"messages": [{"role": "user", "content": _text(rng, 2)}], "max_tokens": 60}
        return await self._post(rng, "/v1/chat/completions", body | constraint)

    async def _call_tools(self, rng: random.Random) -> str:
        parameters = {"type": "object", "properties": {rng.choice(_WORDS): {"type": "string"}}}
        function = {"name": rng.choice(_WORDS), "description": "Looks it up.", "parameters": parameters}
        body = {
            "messages": [{"role": "user", "content": "Look it up."}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": rng.choice(["auto", "required", "none"]),
            "max_tokens": 80,
            "stream": rng.random() < 0.5,
        }
        return await self._post(rng, "/v1/chat/completions", body)

    async def _choices(self, rng: random.Random) -> str:
        body = {"messages": [{"role": "user", "content": _text(rng, 2)}], "n": 3, "max_tokens": 20, "seed": 1}
        return await self._post(rng, "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 5})

    async def _embed(self, rng: random.Random) -> str:
        return await self._post(rng, "/v1/embeddings", {"input": [_text(rng) for _ in range(rng.randrange(1, 5))]})

    async def _respond(self, rng: random.Random) -> str:
        return await self._post(rng, "/v1/responses", {"input": _text(rng, 9), "max_output_tokens": 30, "store": True})

    async def _other_dialects(self, rng: random.Random) -> str:
        talk: dict[str, object] = {"messages": [{"role": "user", "content": _text(rng, 4)}]}
        bodies: dict[str, Mapping[str, object]] = {
            "/v1/messages": talk | {"max_tokens": 20},
            "/api/chat": talk | {"options": {"num_predict": 20}},
            "/v1/chat/completions/input_tokens": talk,
            "/tokenize": {"prompt": _text(rng)},
        }
        path = rng.choice([*bodies])
        return await self._post(rng, path, bodies[path])

    async def _be_refused(self, rng: random.Random) -> str:
        limited = self._fleet.keys[3]
        ways: list[tuple[str, object, str, tuple[int, ...]]] = [
            ("/v1/completions", b'{"model": "demo", "prompt": ', "", (400,)),
            ("/v1/completions", {"model": f"no-{rng.random()}", "prompt": "a"}, "", (503, 404)),
            ("/v1/completions", {"model": "demo", "prompt": "fox " * 3_000}, "", (400,)),
            ("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": -1}, "", (400,)),
            ("/v1/chat/completions", {"model": "demo", "messages": [], "regex": "("}, "", (400,)),
            ("/v1/models", None, f"tb_{rng.randrange(10**9)}_wrong", (401,)),
            (f"/v1/no/{rng.random()}", None, "", (404,)),
            ("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 2}, limited, (200, 429)),
        ]
        path, body, key, statuses = rng.choice(ways)
        return _expect(await self._fleet.ask(path, body, key), *statuses)

    async def _console(self, rng: random.Random) -> str:
        """Looks at the console for a moment, as five pages of one operator."""
        cuts = [rng.randrange(1, 8) for _ in range(5)]
        pages = [self._fleet.ask("/console/stream", key=self._fleet.operator, cut=cut) for cut in cuts]
        answers = [*await asyncio.gather(*pages)]
        answers += [
            await self._fleet.ask(f"/{path}", key=self._fleet.operator) for path in ("console/requests", "v1/usage")
        ]
        return next((end for answer in answers if (end := _expect(answer, 200)).startswith("failed")), "200")

    async def _adapter(self, rng: random.Random) -> str:
        body = {"model": "demo:pirate", "prompt": _text(rng, 2), "max_tokens": 20}
        return await self._post(rng, "/v1/completions", body)

    async def _over_nats(self, rng: random.Random) -> str:
        request = messages.GenerateRequest(
            prompt=_text(rng),
            max_tokens=rng.choice([1, 8, 40, 200, 500]),
            ignore_eos=True,
            priority=rng.randrange(4),
            cache_prompt=rng.random() > 0.1,
            timeout_ms=rng.choice([None, None, 300.0, 3_000.0]),
        )
        cancel_after = rng.randrange(1, 60) if rng.random() < 0.3 else None
        stream = self._client.generate("demo", request)
        ends, tokens = [], 0
        async for chunk in stream:
            tokens += chunk.tokens
            if cancel_after is not None and tokens >= cancel_after:
                cancel_after = None
                stream.cancel()
            if chunk.finish_reason is not None:
                ends.append(str(chunk.error.code if chunk.error else chunk.finish_reason))
        known = {"overloaded", "deadline_exceeded", "length", "cancelled", "cancel"}
        return ends[0] if len(ends) == 1 and ends[0] in known else f"failed: ended with {ends}"


def _text(rng: random.Random, most: int = 16) -> str:
    return rng.choice(_SENTENCES) * rng.randrange(1, most + 1) + rng.choice(_WORDS)


def _expect(answer: Answer, *statuses: int) -> str:
    return f"failed: {answer}"[:600] if answer.status not in statuses else str(answer.status)
