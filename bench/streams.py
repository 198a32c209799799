"""Requests of a measurement: streams of the whole system, and how fast several of them decode at once."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from bench import system
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import codec, messages


class Complete(Protocol):
    """Returns when each token of a greedy completion arrived, by `time.perf_counter`."""

    def __call__(
        self, token_ids: Sequence[int], max_tokens: int, on_token: Callable[[], None] = ...
    ) -> Coroutine[Any, Any, list[float]]: ...


class Timing(msgspec.Struct, frozen=True):
    """How long concurrent streams took: seconds, and tokens."""

    prompt_s: float
    """Time until every prompt had its first token."""
    decode_s: float
    """Time from there on, while all streams decoded."""
    cpu_s: float
    """CPU time in that period, of the process that computes."""
    decoded: int
    """Tokens of all streams in that period."""
    whole_s: float
    """Time until every prompt had its last token."""

    def __str__(self) -> str:
        return f"{self.decoded / self.decode_s:.1f} tokens/s"


def longest_pause_s(times: Sequence[float], since: float) -> float:
    """Returns the longest time between two of a stream's tokens, from the last one before a time on."""
    after = [max(at for at in times if at <= since), *(at for at in times if at > since)]
    return max(second - first for first, second in itertools.pairwise(after))


async def chunks(client: WireClient, request: messages.GenerateRequest) -> AsyncIterator[messages.Chunk]:
    """Yields the chunks of an answer. Raises SystemExit if the request ends in an error."""
    async for chunk in client.generate("m", request):
        if chunk.error:
            raise SystemExit(f"the system refused: {chunk.error.message}")
        yield chunk


async def say(
    client: WireClient, request: messages.GenerateRequest, turns: list[messages.ChatMessage]
) -> messages.Usage:
    """Sends a conversation as a request asks, and appends the model's answer to it, without its reasoning."""
    text, usage = "", None
    async for chunk in chunks(client, codec.replace(request, messages=list(turns))):
        text += chunk.text
        usage = chunk.usage if isinstance(chunk.usage, messages.Usage) else usage
    assert usage is not None
    turns.append(messages.ChatMessage(role="assistant", content=text))
    return usage


async def drain(client: WireClient, request: messages.GenerateRequest) -> None:
    """Reads an answer and does nothing else, so that this process's CPU time is the client library's."""
    async for chunk in client.generate("m", request):
        if chunk.error:
            raise SystemExit(f"the system refused: {chunk.error.message}")


async def complete(
    client: WireClient, token_ids: Sequence[int], max_tokens: int, on_token: Callable[[], None] = lambda: None
) -> list[float]:
    """Returns when each token of a greedy completion arrived, by `time.perf_counter`."""
    request = messages.GenerateRequest(token_ids=list(token_ids), max_tokens=max_tokens, temperature=0, ignore_eos=True)
    times = []
    async for chunk in chunks(client, request):
        times += [time.perf_counter()] * chunk.tokens
        if chunk.tokens:
            on_token()
    assert len(times) == max_tokens
    return times


async def decode(complete: Complete, prompts: Sequence[Sequence[int]], tokens: int, engine_pid: int) -> Timing:
    """Runs a stream for each prompt at once. Streams begin and end one after another: only the time from the first
    token of the last one to the last token of the first one counts as decoding."""
    begun_cpu = ended_cpu = 0.0
    num_begun = 0

    def on_token_of_stream() -> Callable[[], None]:
        places = itertools.count(1)

        def on_token() -> None:
            nonlocal begun_cpu, ended_cpu, num_begun
            place = next(places)
            num_begun += place == 1
            if place == 1 and num_begun == len(prompts):
                begun_cpu = system.cpu_seconds(engine_pid)
            if place == tokens and not ended_cpu:
                ended_cpu = system.cpu_seconds(engine_pid)

        return on_token

    asked = time.perf_counter()
    times = await asyncio.gather(*(complete(prompt, tokens, on_token_of_stream()) for prompt in prompts))
    begun, ended = max(one[0] for one in times), min(one[-1] for one in times)
    decoded = sum(begun < at <= ended for one in times for at in one)
    if not decoded:
        raise SystemExit("the first stream ended before the last began: pass more --tokens, or a shorter --prompt")
    whole_s = max(one[-1] for one in times) - asked
    return Timing(begun - asked, ended - begun, ended_cpu - begun_cpu, decoded, whole_s)
