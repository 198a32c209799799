"""Clients that put load on a real system and check every token, and waits for its state."""

import asyncio
import json
import math
import time
from typing import Any

from tests.support.raw_client import PREFIX, RawClient
from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import messages

PROMPT = "Once upon a time"

NEAR_TIE = 0.02
"""Difference of two log probabilities below which rounding may decide which token comes first."""


class ExactStream:
    """One stream, read to its end in a task, and what must hold for it."""

    def __init__(self, stream: ChunkStream, max_tokens: int) -> None:
        self.stream = stream
        self.max_tokens = max_tokens
        self.chunks: list[messages.Chunk] = []
        self.ended_at: float | None = None
        self._spoken = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def terminal(self) -> messages.Chunk:
        return self.chunks[-1]

    @property
    def is_whole(self) -> bool:
        return self.terminal.finish_reason is messages.FinishReason.LENGTH

    async def speaks(self) -> None:
        """Waits for the first text, or the end."""
        await self._spoken.wait()

    async def speaks_on(self) -> None:
        """Waits for more tokens than there are now, or the end."""
        seen = self.num_tokens
        while self.num_tokens == seen and not self.task.done():
            await asyncio.sleep(0.01)

    async def end(self, timeout_s: float = 90.0) -> "ExactStream":
        async with asyncio.timeout(timeout_s):
            await self.task
        return self

    def check(self, whole: "ExactStream | None" = None) -> None:
        """Checks for one terminal, at the end, and for all tokens if the stream ran to its full length.

        `whole` is a stream of the same prompt, requested with `logprobs`. The text must begin like its text, except
        from a token on between which and the next one rounding may decide: batches of other sequences round
        differently."""
        assert [chunk.finish_reason is None for chunk in self.chunks] == [True] * (len(self.chunks) - 1) + [False]
        if self.is_whole:
            assert self.num_tokens == self.max_tokens
            assert self.terminal.usage
            assert self.terminal.usage.completion_tokens == self.num_tokens
        else:
            assert self.terminal.error, self.terminal
        if whole is not None and not whole.text.startswith(self.text):
            parted = next(at for at, pair in enumerate(zip(whole.text, self.text, strict=False)) if len({*pair}) > 1)
            assert whole.doubt_at(parted) < NEAR_TIE, (whole.text[parted - 40 :], self.text[parted - 40 :])

    def doubt_at(self, place: int) -> float:
        """Returns the log probability by which the token at this position of the text led the second likeliest.

        Two tokens may begin alike, so the lead of the token before counts too if it ends here."""
        end, before = 0, math.inf
        for chunk in self.chunks:
            for logprob in chunk.logprobs or []:
                end += len(logprob.text)
                first, second, *_ = [one.logprob for one in logprob.top if one.text]
                if end > place:
                    return min(first - second, before)
                before = first - second if end == place else math.inf
        raise AssertionError(f"the text ends before {place}")

    async def _read(self) -> None:
        try:
            async for chunk in self.stream:
                self.chunks.append(chunk)
                if chunk.text or chunk.finish_reason is not None:
                    self._spoken.set()
        finally:
            self._spoken.set()  # also where the stream raises, which `end` then does, too
        self.ended_at = time.monotonic()


def ask(client: WireClient, max_tokens: int, **fields: Any) -> ExactStream:
    body = {"prompt": PROMPT, "ignore_eos": True, "temperature": 0} | fields
    return ExactStream(client.generate("demo", max_tokens=max_tokens, **body), max_tokens)


async def cards(bare: RawClient) -> list[dict[str, Any]]:
    """Returns the cards that a router knows; none while no router answers."""
    try:
        reply = await bare.nats.request(f"{PREFIX}.models", b"", timeout=1)
    except Exception:  # no router yet, or no broker
        return []
    return [card for served in json.loads(reply.data)["models"] for card in served["workers"]]


async def until_ready(bare: RawClient, count: int, timeout_s: float = 60.0) -> list[dict[str, Any]]:
    async with asyncio.timeout(timeout_s):
        while True:
            found = await cards(bare)
            if sum(card["state"] == "ready" for card in found) >= count:
                return found
            await asyncio.sleep(0.02)


async def until_idle(bare: RawClient, timeout_s: float = 60.0) -> None:
    """Waits until no worker has a request, by its own count."""
    await until_taken(bare, 0, timeout_s)


async def until_taken(bare: RawClient, count: int, timeout_s: float = 60.0) -> None:
    """Waits until the workers have this many requests, by their own count."""
    async with asyncio.timeout(timeout_s):
        while _num_taken(await until_ready(bare, 1)) != count:
            await asyncio.sleep(0.02)


def _num_taken(found: list[dict[str, Any]]) -> int:
    return sum(card["load"]["running"] + card["load"]["waiting"] for card in found)
