"""A router without checks: sends anything to one worker, and to every other subject."""

import asyncio
import secrets
import struct
from collections import Counter
from typing import Any

import msgspec
import nats
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

from tests.support.raw_client import PREFIX, Message
from tests.support.system import System


class RawRouter:
    """One connection and the worker it talks to."""

    def __init__(self, connection: Nats, model: str, worker_id: str) -> None:
        self.nats = connection
        self.subject = f"{PREFIX}.worker.{model}.{worker_id}"
        self.card_subject = f"{PREFIX}.card.{model}.{worker_id}"
        self.card: Message = {}
        self.replies: Counter[str] = Counter()
        """Number of replies by reply subject."""
        self.inbox = f"_INBOX.{secrets.token_hex(8)}"

    @classmethod
    async def connect(cls, url: str, model: str, worker_id: str) -> "RawRouter":
        peer = cls(await nats.connect(url, allow_reconnect=False), model, worker_id)

        async def count(message: Msg) -> None:
            peer.replies[message.subject] += 1

        await peer.nats.subscribe(peer.inbox + ".>", cb=count)
        return peer

    async def find(self) -> Message:
        """Waits until the worker is ready and returns its card."""
        cards: asyncio.Queue[Message] = asyncio.Queue()

        async def take(message: Msg) -> None:
            cards.put_nowait(msgspec.msgpack.decode(message.data))

        subscription = await self.nats.subscribe(self.card_subject, cb=take)
        async with asyncio.timeout(60):
            while self.card.get("state") != "ready":
                await self.nats.publish(f"{PREFIX}.discover", b"")
                try:
                    self.card = await asyncio.wait_for(cards.get(), 0.5)
                except TimeoutError:
                    continue
        await subscription.unsubscribe()
        return self.card

    def run(self, **fields: Any) -> Message:
        """Returns a valid run with these fields replaced."""
        return {
            "request_id": f"default:{secrets.token_hex(8)}",
            "attempt": 1,
            "epoch": self.card["epoch"],
            "router_id": "hostile",
            "reply": f"_INBOX.{secrets.token_hex(8)}",
            "encoding": "json",
            "token_ids": struct.pack("<4I", 5, 6, 7, 8),
            "params": {"max_tokens": 2, "ignore_eos": True},
            "remaining_ms": 400.0,
            "age_ms": 1.0,
        } | fields

    async def call(self, service: str, body: Message | bytes) -> Message:
        payload = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
        answer = await self.nats.request(f"{self.subject}.{service}", payload, timeout=5)
        return msgspec.msgpack.decode(answer.data)  # type: ignore[no-any-return]

    async def must_serve(self) -> None:
        """Checks that the worker still has its first epoch and completes an ordinary run."""
        reply = f"_INBOX.{secrets.token_hex(8)}"
        ended: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        async def take(message: Msg) -> None:
            chunk = msgspec.json.decode(message.data)
            if chunk["finish_reason"] is not None:
                ended.set_result(chunk)

        subscription = await self.nats.subscribe(reply, cb=take)
        answer = await self.call("run", self.run(reply=reply, remaining_ms=10_000.0))
        assert answer.get("accepted") is True, answer
        async with asyncio.timeout(10):
            terminal = await ended
        await subscription.unsubscribe()
        assert (terminal["finish_reason"], terminal["usage"]["completion_tokens"]) == ("length", 2), terminal

    async def close(self) -> None:
        await self.nats.close()


def check_idle(system: System, name: str) -> None:
    """Checks that a worker's log has no error of its own, only complaints about what it was sent."""
    wrong = {"message_failed", "engine_died", "request_crashes_engine", "nats_closed", "nats_disconnected", "replaced"}
    lines = [line for line in system.log(name) if line["event"] in wrong]
    assert not lines, lines[:3]
    assert "Traceback" not in system.text_log(name)
