"""A client that uses only NATS and JSON or MessagePack, the way anyone could write one from docs/wire.md."""

import asyncio
import json
from typing import Any

import msgspec
import nats
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

PREFIX = "tokenbus.v1"
Message = dict[str, Any]


class Answer:
    """The messages of one stream received so far."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.raw: list[Msg] = []
        self._changed = asyncio.Event()

    @property
    def text(self) -> str:
        return "".join(message["text"] for message in self.messages)

    @property
    def num_tokens(self) -> int:
        return sum(message["tokens"] for message in self.messages)

    @property
    def terminals(self) -> list[Message]:
        return [message for message in self.messages if message["finish_reason"] is not None]

    @property
    def flaws(self) -> tuple[int, int]:
        """The tokens that a client who concatenates texts misses, and those that it reads twice."""
        end = missing = repeated = 0
        for message in self.messages:
            if message["tokens"]:
                missing += max(0, message["offset"] - end)
                repeated += max(0, end - message["offset"])
                end = message["offset"] + message["tokens"]
        return missing, repeated

    def take(self, message: Msg, *, msgpack: bool) -> None:
        self.raw.append(message)
        self.messages.append(msgspec.msgpack.decode(message.data) if msgpack else json.loads(message.data))
        self._changed.set()

    async def until(self, count: int, timeout_s: float = 60.0) -> None:
        """Waits until `count` messages or the terminal have arrived."""
        async with asyncio.timeout(timeout_s):
            while len(self.messages) < count and not self.terminals:
                self._changed.clear()
                await self._changed.wait()

    async def terminal(self, timeout_s: float = 60.0) -> Message:
        await self.until(1 << 30, timeout_s)
        return self.terminals[0]


class RawClient:
    """A connection that follows docs/wire.md and uses none of our code."""

    def __init__(self, connection: Nats) -> None:
        self.nats = connection

    @classmethod
    async def connect(cls, url: str, *, reconnects: bool = False) -> "RawClient":
        if not reconnects:
            return cls(await nats.connect(url, allow_reconnect=False))
        return cls(await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=_ignore))

    async def close(self) -> None:
        await self.nats.close()

    async def settle(self) -> None:
        """Waits until the broker has carried out everything that was sent before."""
        # nats-py writes a PING before commands that it still holds; those are written by the time of the first answer.
        for _ in range(2):
            await self.nats.flush()

    async def generate(
        self,
        payload: bytes | Message,
        *,
        subject: str = f"{PREFIX}.generate.demo",
        content_type: str | None = None,
        reply: str | None = None,
    ) -> Answer:
        answer = Answer()
        msgpack = (content_type or "").lower().startswith("application/msgpack")

        async def take(message: Msg) -> None:
            answer.take(message, msgpack=msgpack)

        inbox = reply or self.nats.new_inbox()
        await self.nats.subscribe(inbox, cb=take)
        if isinstance(payload, dict):
            payload = msgspec.msgpack.encode(payload) if msgpack else json.dumps(payload).encode()
        headers = {"Content-Type": content_type} if content_type else None
        await self.nats.publish(subject, payload, reply=inbox, headers=headers)
        return answer

    async def ask(self, payload: bytes | Message, **options: Any) -> Answer:
        """Sends a request and waits for the whole answer."""
        answer = await self.generate(payload, **options)
        await answer.terminal()
        return answer


async def _ignore(error: Exception) -> None:
    """Takes what nats-py would print about a broker that is away."""


def check_stream(answer: Answer, request_id: str | None = None) -> None:
    """Checks what holds for every stream, however it ends."""
    offset = text_offset = 0
    for number, message in enumerate(answer.messages):
        assert (message["finish_reason"] is None) == (number < len(answer.messages) - 1), "one terminal, and last"
        assert message["offset"] == offset
        is_routers = not message["tokens"] and message.get("worker_id", "") is None  # which knows no text
        assert message["text_offset"] == (0 if is_routers else text_offset), message
        offset += message["tokens"]
        text_offset += len(message["text"].encode())
        if request_id is not None:
            assert message["id"] == request_id
        if message["tokens"] == 0 or message["finish_reason"]:
            assert {"worker_id", "model", "created"} <= message.keys()
    terminal = answer.messages[-1]
    assert terminal["usage"]["completion_tokens"] == offset
    usage = terminal["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    fetching = {"fetched_tokens", "fetch_ms"}  # only there if blocks were fetched
    assert terminal["timings"].keys() - fetching == {"queue_ms", "prefill_ms", "ttft_ms", "decode_ms", "total_ms"}
