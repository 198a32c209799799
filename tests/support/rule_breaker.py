"""A system that answers everything wrongly, to test that wire-check notices every broken rule."""

import asyncio
import contextlib
import json
from typing import Any

import msgspec
import nats
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

PREFIX = "tokenbus.v1"
MODEL, WORKER = "breaker", "careless"

_CARD = {
    "worker_id": WORKER,
    "model": MODEL,
    "state": "ready",
    "epoch": "yesterday",
    "context_length": 100,
    "process_run": "unheard",
}
_MODELS = {
    "models": [{"model": MODEL, "context_length": 100, "features": "all", "workers": [_CARD]}],
    "limits": {"max_request_bytes": 10_000_000},
}
_ERROR = {"code": "invalid_request", "message": "", "retryable": "maybe"}
_STREAM: list[dict[str, Any]] = [
    {"id": "someone", "attempt": 0, "offset": 5, "tokens": 1, "text_offset": 3, "text": "once", "token_ids": []},
    {"id": "someone", "attempt": 0, "offset": 1, "tokens": 4, "text_offset": 3, "text": "upon", "token_ids": [1, 2]},
    {"id": "someone", "attempt": 0, "offset": 9, "tokens": 1, "text": "", "finish_reason": "done", "error": _ERROR},
    {"id": "someone", "attempt": 0, "offset": 9, "tokens": 1, "text": "", "finish_reason": "done", "error": _ERROR},
]


class RuleBreaker:
    """One connection that acts as router and worker."""

    def __init__(self, connection: Nats) -> None:
        self._nats = connection
        self._replies = {"": "nowhere"}
        """Reply subjects by request id; under the empty id, that of the last request without a readable one."""
        self._beat = asyncio.create_task(self._speak())

    @classmethod
    async def start(cls, url: str) -> "RuleBreaker":
        breaker = cls(await nats.connect(url, allow_reconnect=False))
        answers = {
            "models": _MODELS,
            "models.*": _MODELS,
            "fleet": {"router_id": "careless", "router": {}, "joined": [{}], "seq": -1},
            "fleet.*": {"router_id": "careless", "router": {}, "joined": [{}], "seq": -1},
            "trace": {"router_id": "careless", "requests": [{"id": "another"}]},
            "trace.*": {"router_id": "careless", "requests": [{"id": "another"}]},
            "cancel.>": {"cancelled": True},
            "embed.>": {"id": 5},
            "tokenize.>": {"id": 5, "count": 2, "token_ids": [1]},
            "detokenize.>": {"id": 5, "text": 7},
            "rerank.>": {"id": 5},
        }
        for subject, answer in answers.items():
            await breaker._answer(subject, json.dumps(answer).encode())
        for service in ("run", "control", "snapshot", "take", "tokenizer", "tokenize"):
            await breaker._answer(f"worker.*.*.{service}", msgspec.msgpack.encode({"fine": True}))
        for subject in ("guard.>", "router.*"):
            await breaker._answer(subject, msgspec.msgpack.encode({"fine": True}))
        await breaker._nats.subscribe(f"{PREFIX}.generate.>", cb=breaker._generate)
        await breaker._nats.subscribe(f"{PREFIX}.resync.>", cb=breaker._resync)
        await breaker._nats.subscribe(f"{PREFIX}.discover", cb=breaker._card)
        await breaker._nats.flush()
        return breaker

    async def stop(self) -> None:
        self._beat.cancel()
        await self._nats.close()

    async def _answer(self, subject: str, payload: bytes) -> None:
        async def answer(message: Msg) -> None:
            for _ in range(2):
                await self._nats.publish(message.reply or "nowhere", payload)

        await self._nats.subscribe(f"{PREFIX}.{subject}", cb=answer)

    async def _generate(self, message: Msg) -> None:
        request_id = ""
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            request_id = str(json.loads(message.data).get("id", ""))
        self._replies[request_id] = message.reply or "nowhere"
        await self._stream(self._replies[request_id])

    async def _stream(self, reply: str) -> None:
        for chunk in _STREAM:
            await self._nats.publish(reply, json.dumps(chunk).encode(), headers={"X-Rule-Breaker": "yes"})

    async def _resync(self, message: Msg) -> None:
        await self._nats.publish(message.reply or "nowhere", b'{"found": true}')
        await self._stream(self._replies.get(message.subject.rpartition(".")[2], self._replies[""]))

    async def _card(self, _: Msg) -> None:
        await self._nats.publish(f"{PREFIX}.card.other.{WORKER}", msgspec.msgpack.encode(_CARD))

    async def _speak(self) -> None:
        """Publishes events whose numbers have gaps."""
        seq = 0
        while True:
            events = {"worker_id": WORKER, "epoch": "1-a", "seq": seq, "state": "ready"}
            await self._nats.publish(f"{PREFIX}.events.{MODEL}.{WORKER}", msgspec.msgpack.encode(events))
            seq += 2
            await asyncio.sleep(0.1)
